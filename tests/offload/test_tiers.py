"""Training with offloaded state: the same bits in every tier."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import every
from ranks import RankPools, RanksFailed, on_ranks
from torch import Tensor, nn

import hadal
from hadal import comm, utils
from hadal.config import load_config
from hadal.engine import policies
from hadal.engine.policies import tiers_of
from hadal.errors import OffloadError, OptimizerError, UnbuiltConfigError
from hadal.optim import workspace
from hadal.optim.one_bit import OneBitAdam
from hadal.zero import offload
from hadal.zero.policy import Tier

WIDTH = 96
ACCUMULATION = 2
PART = 4096
# (optimizer, weights) by stage; the device is what they are compared with.
PLACES = {
    0: [("cpu", None)],
    1: [("cpu", None), ("nvme", None)],
    2: [("cpu", None), ("nvme", None)],
    3: [
        ("cpu", "cpu"),
        ("nvme", "nvme"),
        ("cpu", "nvme"),
        ("nvme", None),
    ],
}


def model_of() -> nn.Sequential:
    torch.manual_seed(0)
    blocks = [
        nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))
        for _ in range(2)
    ]
    return nn.Sequential(*blocks)


def config_of(
    stage: int, dtype: str, optimizer: str | None, weights: str | None, path: str, **zero: Any
) -> dict[str, Any]:
    """Return a configuration whose buckets span several parts on the disk, and several buffers."""
    section: dict[str, Any] = {
        "stage": stage,
        "stage3_param_persistence_threshold": 40,
        "stage3_max_live_parameters": 20_000,
        "stage3_max_reuse_distance": 0,
        "reduce_bucket_size": 20_000,
        "sub_group_size": PART,
        **zero,
    }
    if optimizer is not None:
        section["offload_optimizer"] = {
            "device": optimizer,
            "nvme_path": str(path),
            **section.get("offload_optimizer", {}),
        }
    if weights is not None:
        section["offload_param"] = {
            "device": weights,
            "nvme_path": str(path),
            "max_in_cpu": 10_000,
            "buffer_size": 20_000,
            "buffer_count": 2,
            **section.get("offload_param", {}),
        }
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": ACCUMULATION,
        "gradient_clipping": 0.1,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "weight_decay": 0.1}},
        "zero_optimization": section,
        **({} if dtype == "fp32" else {dtype: {"enabled": True}}),
    }


@contextmanager
def small_blocks() -> Iterator[None]:
    """Make parts on the disk as short as possible."""
    before = workspace._CPU_BLOCK_NUMEL
    workspace._CPU_BLOCK_NUMEL = PART
    try:
        yield
    finally:
        workspace._CPU_BLOCK_NUMEL = before


def inputs_of(engine: Any, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(10 * step + comm.get_rank())
    dtype = next(engine.module.parameters()).dtype
    return torch.randn(2, WIDTH, generator=generator).to(engine.device, dtype)


def train(engine: Any, updates: int, first: int = 0) -> list[float]:
    losses = []
    for step in range(first * ACCUMULATION, (first + updates) * ACCUMULATION):
        loss = engine(inputs_of(engine, step)).float().square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def state_of(engine: Any) -> list[Tensor]:
    """Return the full masters, moments and weights."""
    parameters = list(engine.module.parameters())
    found = [utils.safe_get_full_fp32_param(p) for p in parameters]
    for key in ("exp_avg", "exp_avg_sq"):
        found += [utils.safe_get_full_optimizer_state(p, key) for p in parameters]
    return [*found, *engine.state_dict().values()]


def trained(config: dict[str, Any], updates: int) -> tuple[list[float], list[Tensor]]:
    engine, *_ = hadal.initialize(model=model_of(), config=config)
    losses = train(engine, updates)
    state = state_of(engine)
    engine.destroy()
    return losses, state


def compare_places(stage: int, dtype: str, path: str, updates: int) -> None:
    with small_blocks():
        losses, state = trained(config_of(stage, dtype, None, None, path), updates)
        for optimizer, weights in PLACES[stage]:
            config = config_of(stage, dtype, optimizer, weights, path)
            other_losses, other = trained(config, updates)
            assert other_losses == losses, (optimizer, weights)
            for mine, theirs in zip(other, state, strict=True):
                assert torch.equal(mine, theirs), (optimizer, weights)
    comm.barrier()  # another rank may be removing its folder
    assert list(Path(path).rglob("*.bin")) == []
    assert losses[-1] < losses[0]


@pytest.mark.fast_cells("1-fp16")
@pytest.mark.claims(
    "zero_optimization.offload_param",
    "zero_optimization.offload_param.device",
    "zero_optimization.offload_param.nvme_path",
    "zero_optimization.offload_optimizer",
    "zero_optimization.offload_optimizer.device",
    "zero_optimization.offload_optimizer.nvme_path",
)
@every(stage=[0, 1, 2, 3], dtype=["bf16", "fp16", "fp32"])
def test_device_host_and_disk_give_the_same_bits(
    stage: int, dtype: str, ranks: RankPools, tmp_path: Path
) -> None:
    ranks(2).run(compare_places, stage, dtype, str(tmp_path), 20 if dtype == "bf16" else 5)


@pytest.mark.slow
def test_one_rank_alone_offloads_too(ranks: RankPools, tmp_path: Path) -> None:
    for stage in (2, 3):
        ranks(1).run(compare_places, stage, "bf16", str(tmp_path), 3)


# ---- where the device has memory of its own ------------------------------------------------------


@contextmanager
def apart() -> Iterator[None]:
    """Treat host memory as separate from the device's, so that everything is copied."""
    before = offload.is_host_memory
    offload.is_host_memory = policies.is_host_memory = lambda device: False
    try:
        yield
    finally:
        offload.is_host_memory = policies.is_host_memory = before


@pytest.mark.fast_cells("0-fp32")
@every(stage=[0, 1, 2, 3], dtype=["fp32", "bf16"])
@on_ranks(2)
def test_host_and_disk_are_equal_where_the_device_has_its_own_memory(
    stage: int, dtype: str, tmp_path: Path
) -> None:
    with small_blocks(), apart():
        _, on_device = trained(config_of(stage, dtype, None, None, tmp_path), 4)
        sums = ("device", "host") if stage >= 2 and dtype == "bf16" else ("device",)
        for (optimizer, weights), place in product(PLACES[stage], sums):
            offload = {"accumulate_on": place}
            config = config_of(
                stage, dtype, optimizer, weights, tmp_path, offload_optimizer=offload
            )
            _, other = trained(config, 4)
            for mine, theirs in zip(other, on_device, strict=True):
                assert torch.equal(mine, theirs), (optimizer, weights, place)


def host_bytes(path: str, ratio: float) -> tuple[int, int]:
    """Return the elements of all masters, and of those that are not on the device."""
    offload = {"device": "cpu", "ratio": ratio}
    with apart():
        config = config_of(3, "bf16", "cpu", None, path, offload_optimizer=offload)
        engine, *_ = hadal.initialize(model=model_of(), config=config)
        train(engine, 2)
        buckets = [b for b in engine._parts.runtime.buckets if b.trainable]
        off = [b for b in buckets if b.offload.optimizer is Tier.HOST]
        engine.destroy()
    return sum(b.layout.numel for b in buckets), sum(b.layout.numel for b in off)


@pytest.mark.claims("zero_optimization.offload_optimizer.ratio")
def test_the_host_updates_its_fraction(ranks: RankPools, tmp_path: Path) -> None:
    for ratio in (0.0, 0.4, 1.0):
        total, off = ranks(2).run(host_bytes, str(tmp_path), ratio)[0]
        assert abs(off / total - ratio) <= 0.25
        assert (off == 0) == (ratio == 0) and (off == total) == (ratio == 1)


def pinned_numel(path: str, **sections: Any) -> dict[tuple[bool, torch.dtype], int]:
    """Return the elements of host memory requested, by pinning and dtype."""
    found: Counter[tuple[bool, torch.dtype]] = Counter()
    plain = offload.host_empty

    def spy(numel: int, dtype: torch.dtype, *, pinned: bool = False) -> Tensor:
        found[pinned, dtype] += numel
        return plain(numel, dtype, pinned=pinned)

    offload.host_empty = spy
    try:
        with apart():
            config = config_of(3, "bf16", "cpu", "cpu", path, **sections)
            config["data_types"] = {"grad_accum_dtype": "fp32"}
            engine, *_ = hadal.initialize(model=model_of(), config=config)
            train(engine, 1)
            engine.destroy()
    finally:
        offload.host_empty = plain
    return dict(found)


@pytest.mark.claims(
    "zero_optimization.offload_param.pin_memory", "zero_optimization.offload_optimizer.pin_memory"
)
@on_ranks(2)
def test_each_section_controls_its_pinned_memory(tmp_path: Path) -> None:
    both = pinned_numel(tmp_path)
    numel = both[True, torch.bfloat16]
    # Masters are not: what leaves them is cast first.
    assert both == {
        (True, torch.bfloat16): numel,
        (True, torch.float32): numel,
        (False, torch.float32): numel,
    }
    weights = pinned_numel(tmp_path, offload_optimizer={"pin_memory": False})
    assert weights == {(True, torch.bfloat16): numel, (False, torch.float32): 2 * numel}
    optimizer = pinned_numel(tmp_path, offload_param={"pin_memory": False})
    assert optimizer == {
        (False, torch.bfloat16): numel,
        (True, torch.float32): numel,
        (False, torch.float32): numel,
    }


@pytest.mark.claims(
    "zero_optimization.cpu_offload",
    "zero_optimization.cpu_offload_param",
    "zero_optimization.cpu_offload_use_pin_memory",
)
def test_old_names_of_offloading_mean_the_host() -> None:
    base = {"train_batch_size": 4}
    zero: dict[str, Any] = {"stage": 3, "cpu_offload": True, "cpu_offload_param": True}
    config = load_config({**base, "zero_optimization": zero})
    found = tiers_of(config)
    assert (found.weights, found.optimizer) == (Tier.HOST, Tier.HOST)
    off = tiers_of(load_config({**base, "zero_optimization": {"stage": 2, "cpu_offload": False}}))
    assert (off.weights, off.optimizer) == (Tier.DEVICE, Tier.DEVICE)
    pinned = {**zero, "cpu_offload_use_pin_memory": False}
    notes = load_config({**base, "zero_optimization": pinned}).notes
    assert any("cpu_offload_use_pin_memory" in note for note in notes)
    low = load_config({**base, "zero_optimization": {"stage": 2, "cpu_offload_param": True}})
    assert any("has no effect at stage 2" in note for note in low.notes)
    assert tiers_of(low).weights is Tier.DEVICE


def test_unbuilt_keys_and_keys_without_effect_are_reported() -> None:
    def loaded(**offload: Any) -> Any:
        zero = {"stage": 2, "offload_optimizer": {"device": "cpu", **offload}}
        return load_config({"train_batch_size": 4, "zero_optimization": zero})

    with pytest.raises(UnbuiltConfigError, match="super_offload  true is not built yet; leave it"):
        loaded(super_offload=True)
    with pytest.raises(UnbuiltConfigError, match="super_offload  true is not built yet"):
        loaded(super_offload=True, cpuadam_cores_perc=0.5)
    assert any("without super_offload" in note for note in loaded(cpuadam_cores_perc=0.5).notes)
    assert not loaded(cpuadam_cores_perc=0.8, super_offload=False).notes
    zero = {"stage": 2, "offload_optimizer": {"device": "cpu"}}
    zero["zenflow"] = {"topk_ratio": 0.2, "overlap_step": True}
    with pytest.raises(UnbuiltConfigError, match=r"zenflow  the section is not built yet; leave"):
        load_config({"train_batch_size": 4, "zero_optimization": zero})


def test_disk_keys_have_no_effect_in_memory() -> None:
    def notes(**sections: Any) -> list[str]:
        return list(load_config({"train_batch_size": 4, "zero_optimization": sections}).notes)

    disk = {"nvme_path": "/nvme", "buffer_count": 7}
    weights = {**disk, "buffer_size": 10**6, "max_in_cpu": 10}
    optimizer = {**disk, "pipeline_read": False, "pipeline_write": False, "fast_init": True}
    for device, count in (("cpu", 9), ("nvme", 0), ("none", 0)):
        told = notes(
            stage=3,
            offload_param={**weights, "device": device},
            offload_optimizer={**optimizer, "device": device},
        )
        mine = " ".join(one for one in told if 'with device "cpu"' in one)
        assert mine.count("zero_optimization.offload_") == count
    assert not notes(stage=2, offload_optimizer={"device": "cpu", "buffer_count": 4})


# ---- what the disk does --------------------------------------------------------------------------


def look_while_training(path: str, section: dict[str, Any]) -> dict[str, Any]:
    """Measure the host memory and the disk accesses of an update."""
    from hadal.offload import buffers, store
    from hadal.offload.tensors import DiskTensor

    pools: list[tuple[int, int]] = []
    reads: list[int] = []
    writes: list[int] = []
    underway: list[int] = []
    plain_pool = buffers.BufferPool.__init__
    plain_read, plain_write = DiskTensor.start_read, DiskTensor.start_write

    def pool(self: Any, count: int, nbytes: int, **named: Any) -> None:
        pools.append((count, nbytes))
        plain_pool(self, count, nbytes, **named)

    def read(self: Any, start: int, out: Tensor, **more: Any) -> Any:
        reads.append(out.numel())
        underway.append(len(writes))
        return plain_read(self, start, out, **more)

    def write(self: Any, start: int, values: Tensor) -> Any:
        writes.append(values.numel())
        return plain_write(self, start, values)

    config = config_of(2, "bf16", "nvme", None, path, offload_optimizer=section)
    with small_blocks():
        engine, *_ = hadal.initialize(model=model_of(), config=config)
        buffers.BufferPool.__init__ = pool
        train(engine, 1)
        DiskTensor.start_read, DiskTensor.start_write = read, write
        try:
            train(engine, 1, 1)
        finally:
            buffers.BufferPool.__init__ = plain_pool
            DiskTensor.start_read, DiskTensor.start_write = plain_read, plain_write
        files = [file for file in Path(path).rglob("*") if file.is_file() and file.stat().st_size]
        assert isinstance(engine._parts.sharded.offloading._stores[Path(path)], store.DiskStore)
        engine.destroy()
    [(count, nbytes)], largest = pools, max(reads)  # kept from one update to the next
    return {
        "buffers": count,
        "nbytes": nbytes * count,
        "largest": largest,
        "first writes": underway[: 2 * 3],
        "files": len(files),
    }


@pytest.mark.claims(
    "zero_optimization.offload_optimizer.buffer_count",
    "zero_optimization.offload_optimizer.pipeline_read",
    "zero_optimization.offload_optimizer.pipeline_write",
    "zero_optimization.sub_group_size",
)
def test_disk_updates_are_bounded_and_pipelined(ranks: RankPools, tmp_path: Path) -> None:
    def found(**section: Any) -> dict[str, Any]:
        result: dict[str, Any] = ranks(1).run(look_while_training, str(tmp_path), section)[0]
        return result

    one = found(pipeline_read=False, pipeline_write=False, buffer_count=3)
    assert one["buffers"] == 3  # a master and two moments
    assert one["largest"] == PART
    assert one["first writes"] == [0, 0, 0, 3, 3, 3]  # the second part is read when the first is
    ahead = found(pipeline_read=True, pipeline_write=False)
    assert ahead["buffers"] == 6
    assert ahead["first writes"] == [0] * 6  # the second part is read before the first is written
    both = found(pipeline_read=True, pipeline_write=True)
    assert both["buffers"] == 9
    wide = found(pipeline_read=False, pipeline_write=False, buffer_count=12)
    assert wide["largest"] == PART  # a part is no longer than a sub-group
    assert wide["files"] >= 1


def peak_of_reading(path: str, buffer_count: int, max_in_cpu: int) -> dict[str, int]:
    from hadal.offload.tensors import DiskTensor

    ahead = {"count": 0}
    plain = offload.Stored.read_ahead

    def start(self: Any) -> None:
        plain(self)
        ahead["count"] += self._ahead is not None and self._ahead._buffer is not None

    weights = {"buffer_count": buffer_count, "max_in_cpu": max_in_cpu}
    config = config_of(3, "bf16", None, "nvme", path, offload_param=weights)
    engine, *_ = hadal.initialize(model=model_of(), config=config)
    buckets = engine._parts.runtime.buckets
    on_disk = [b for b in buckets if b.disk_weights is not None]
    train(engine, 2)
    offload.Stored.read_ahead = start
    try:
        train(engine, 1, 2)
    finally:
        offload.Stored.read_ahead = plain
    assert all(isinstance(b.disk_weights, DiskTensor) for b in on_disk)
    largest = max((b._shard.numel for b in on_disk), default=0)
    in_memory = sum(
        b._shard.numel for b in buckets if b.partition.weights and b.disk_weights is None
    )
    engine.destroy()
    return {"disk": len(on_disk), "ahead": ahead["count"], "in": in_memory, "largest": largest}


@pytest.mark.slow
@pytest.mark.claims(
    "zero_optimization.offload_param.buffer_count",
    "zero_optimization.offload_param.buffer_size",
    "zero_optimization.offload_param.max_in_cpu",
)
def test_weights_are_read_ahead_into_few_buffers(ranks: RankPools, tmp_path: Path) -> None:
    pool = ranks(2)
    some = pool.run(peak_of_reading, str(tmp_path), 2, 0)[0]
    assert some["disk"] > 2 and some["ahead"] > some["disk"] and some["in"] == 0
    assert 0 < some["largest"] <= 20_000
    none = pool.run(peak_of_reading, str(tmp_path), 0, 0)[0]
    assert none["ahead"] == 0
    kept = pool.run(peak_of_reading, str(tmp_path), 2, 12_000)[0]
    assert 0 < kept["in"] <= 12_000 and 0 < kept["disk"] < some["disk"]
    assert pool.run(peak_of_reading, str(tmp_path), 2, 10**9)[0]["disk"] == 0
    with pytest.raises(RanksFailed, match=r"offload_param\.buffer_size is 100; raise it to 9"):
        pool.run(too_large, str(tmp_path))


def too_large(path: str) -> None:
    weights = {"buffer_size": 100, "max_in_cpu": 0}
    hadal.initialize(
        model=model_of(), config=config_of(3, "bf16", None, "nvme", path, offload_param=weights)
    )


def first_update_writes(path: str, fast_init: bool) -> list[int]:
    from hadal.offload.tensors import DiskTensor

    starts: list[int] = []
    plain = DiskTensor.start_write

    def write(self: Any, start: int, values: Tensor) -> Any:
        starts.append(values.numel())
        return plain(self, start, values)

    offload = {"fast_init": fast_init}
    config = config_of(2, "bf16", "nvme", None, path, offload_optimizer=offload)
    engine, *_ = hadal.initialize(model=model_of(), config=config)
    DiskTensor.start_write = write
    try:
        train(engine, 1)
    finally:
        DiskTensor.start_write = plain
    state = state_of(engine)
    engine.destroy()
    return [sum(starts), *[float(one.double().sum()) for one in state]]


@pytest.mark.claims("zero_optimization.offload_optimizer.fast_init")
def test_fast_init_writes_no_zeros(ranks: RankPools, tmp_path: Path) -> None:
    fast, slow = (ranks(1).run(first_update_writes, str(tmp_path), f)[0] for f in (True, False))
    assert fast[1:] == slow[1:]
    assert slow[0] * 3 == fast[0] * 5  # two moments more than master and two moments


# ---- everything else that looks at state ---------------------------------------------------------


@pytest.mark.slow
@on_ranks(2)
def test_state_on_the_disk_is_read_and_edited_like_other_state(tmp_path: Path) -> None:
    """Edits, safe access, frozen layers and later groups work with state on the disk."""
    states = []
    for optimizer, weights in ((None, None), ("nvme", "nvme")):
        with small_blocks():
            model = model_of()
            model[1][2].bias.requires_grad_(False)
            config = config_of(3, "bf16", optimizer, weights, tmp_path)
            engine, torch_optimizer, *_ = hadal.initialize(model=model, config=config)
            train(engine, 2)
            weight = model[1][0].weight
            with hadal.zero.GatheredParameters([weight], modifier_rank=0):
                weight.data[0] = 3.0
            utils.safe_set_full_fp32_param(model[1][0].bias, torch.full((2 * WIDTH,), 0.25))
            utils.safe_set_full_optimizer_state(
                model[0][0].weight, torch.full((2 * WIDTH, WIDTH), 0.5), "exp_avg_sq"
            )
            local = utils.safe_get_local_fp32_param(weight)
            utils.safe_set_local_fp32_param(weight, local * 0.5)
            model[1][2].weight.requires_grad_(False)
            train(engine, 2, 2)
            model[1][2].bias.requires_grad_(True)
            torch_optimizer.add_param_group({"params": [model[1][2].bias]})
            train(engine, 2, 4)
            states.append(state_of(engine))
            saved = torch_optimizer.state_dict()["state"].values()
            states[-1] += [one[key] for one in saved for key in ("exp_avg", "exp_avg_sq", "step")]
            engine.destroy()
    for mine, theirs in zip(*states, strict=True):
        assert torch.equal(mine, theirs)


@on_ranks(2)
def test_edits_of_whole_weights_reach_masters_on_the_disk(tmp_path: Path) -> None:
    """Below stage 3 the update notices edits, as it reads the masters anyway."""
    states = []
    for optimizer in (None, "nvme"):
        config = config_of(2, "bf16", optimizer, None, tmp_path)
        engine, *_ = hadal.initialize(model=model_of(), config=config)
        train(engine, 2)
        with torch.no_grad():
            engine.module[0][0].weight[3] = 1.5
            engine.module[1][0].bias.data.add_(0.125)
        assert float(utils.safe_get_full_fp32_param(engine.module[0][0].weight)[3, 0]) == 1.5
        train(engine, 2, 2)
        states.append(state_of(engine))
        engine.destroy()
    for mine, theirs in zip(*states, strict=True):
        assert torch.equal(mine, theirs)


# ---- faults --------------------------------------------------------------------------------------


@pytest.mark.slow
@on_ranks(2)
def test_an_update_with_a_disk_failure_changes_nothing(tmp_path: Path) -> None:
    """Let one rank's disk fail during an update: nothing has changed on any rank."""
    from hadal.offload.tensors import DiskTensor

    with small_blocks():
        engine, *_ = hadal.initialize(
            model=model_of(), config=config_of(2, "bf16", "nvme", None, tmp_path)
        )
        train(engine, 2)
        before, plain, calls = state_of(engine), DiskTensor.start_write, [0]

        def write(self: Any, start: int, values: Tensor) -> Any:
            calls[0] += 1
            request = plain(self, start, values)
            if calls[0] == 4 and comm.get_rank() == 1:
                request.wait()
                raise OffloadError(f"{tmp_path}: the disk is gone")
            return request

        DiskTensor.start_write = write
        try:
            with pytest.raises(OffloadError, match="the disk is gone"):
                train(engine, 1, 2)
        finally:
            DiskTensor.start_write = plain
        for mine, theirs in zip(state_of(engine), before, strict=True):
            assert torch.equal(mine, theirs)
        train(engine, 2, 2)
        found = state_of(engine)
        engine.destroy()
        _, wanted = trained(config_of(2, "bf16", None, None, tmp_path), 4)
        for mine, theirs in zip(found, wanted, strict=True):
            assert torch.equal(mine, theirs)


@on_ranks(1)
def test_updates_that_cannot_be_rolled_back_are_refused(tmp_path: Path) -> None:
    config, model = config_of(2, "bf16", "nvme", None, tmp_path), model_of()
    del config["optimizer"]
    signs = OneBitAdam(model.parameters(), lr=0.01)
    with pytest.raises(OptimizerError, match=r'OneBitAdam keeps its state in memory.*device "cpu"'):
        hadal.initialize(model=model, config=config, optimizer=signs)
    partly = {"device": "nvme", "ratio": 0.5}
    for kind in ("Lamb", "Muon", "Adafactor"):
        config = config_of(3, "bf16", "nvme", None, tmp_path, offload_optimizer=partly)
        with pytest.raises(OptimizerError, match=rf"{kind} cannot be combined with .*set ratio 1"):
            hadal.initialize(
                model=model_of(), config={**config, "optimizer": {"type": kind, "params": {}}}
            )


def born_on(path: str) -> None:
    """`zero.Init` places shards in the configured tier without changing any value."""
    wanted = {name: value.clone() for name, value in model_of().state_dict().items()}
    for tier in ("cpu", "nvme", None):
        for given in ({"bf16": {"enabled": True}}, {}):
            zero = {"stage": 3, "offload_param": {"device": tier or "nvme", "nvme_path": str(path)}}
            source = {"zero_optimization": zero, **given}
            with apart():
                with hadal.zero.Init(remote_device=tier, config_dict_or_path=source):
                    model = model_of()
                with hadal.zero.GatheredParameters(list(model.parameters())):
                    found = {name: value.clone() for name, value in model.state_dict().items()}
            for name, value in wanted.items():
                assert torch.equal(found[name], value.to(found[name].dtype))
            files = [f for f in Path(path).rglob("*") if f.is_file() and f.stat().st_size]
            assert bool(files) == (tier != "cpu") or tier == "cpu"
            config = config_of(3, "bf16" if given else "fp32", "cpu", "cpu", path)
            engine, *_ = hadal.initialize(model=model, config=config)
            born = [utils.safe_get_full_fp32_param(p) for p in model.parameters()]
            assert all(map(torch.equal, born, wanted.values()))
            engine.destroy()


def test_modules_are_created_on_the_host_and_on_the_disk(ranks: RankPools, tmp_path: Path) -> None:
    ranks(2).run(born_on, str(tmp_path))
    assert os.path.isdir(tmp_path)
