"""What `hadal.plan` says before a run, against the test device's own count."""

from __future__ import annotations

import gc
import importlib.util
import json
import logging
import re
import sys
from collections.abc import Callable
from functools import partial, reduce
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from engine.logs import logged
from ranks import RankPools
from torch import Tensor, nn

import hadal
import npu
from hadal.comm import functions
from hadal.comm.comms_log import numbers_of
from hadal.config import load_config
from hadal.engine import planned_memory
from hadal.engine.candidates import merged
from hadal.engine.topology import communicators_of

from .features import experts, in_stages, keys, of_transformers

WIDTH, BLOCKS, ROWS = 256, 8, 64
PARTS = (
    "llama, 2 tensor ranks",
    "mixtral, 2 expert ranks, stage 1",
    "llama, 2 sequence ranks, stage 1",
)
LIMITS = {
    "stage3_param_persistence_threshold": 0,
    "stage3_max_live_parameters": 600_000,
    "stage3_max_reuse_distance": 600_000,
    "stage3_prefetch_bucket_size": 300_000,
}


class Tower(nn.Module):
    """As many activations as weights, about."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.ReLU(), nn.Linear(2 * WIDTH, WIDTH))
            for _ in range(BLOCKS)
        )

    def forward(self, values: Tensor) -> Tensor:
        for block in self.blocks:
            values = values + block(values)
        return values


def peak_of_an_update(config: dict[str, Any]) -> int:
    """Return the most bytes in use in the fifth update."""
    gc.collect()
    before = torch.accelerator.memory_allocated()
    engine, *_ = hadal.initialize(model=Tower(), config=config)
    dtype = next(engine.module.parameters()).dtype
    values = torch.ones(ROWS, WIDTH, device=engine.device, dtype=dtype)
    for _ in range(5):
        torch.accelerator.reset_peak_memory_stats()
        for _ in range(engine.gradient_accumulation_steps()):
            engine.backward(engine(values).float().sum())
            engine.step()
        peak = torch.accelerator.max_memory_allocated() - before
    engine.destroy()
    return int(peak)


@pytest.mark.fast_cells("0-1-bf16-None", "1-2-fp32-None", "2-2-bf16-None", "3-1-bf16-None")
@pytest.mark.parametrize(
    ("stage", "accumulation", "dtype", "wire"),
    [
        *((s, a, d, None) for s in range(4) for a, d in ((1, "bf16"), (2, "bf16"), (2, "fp32"))),
        (0, 1, "fp32", None),
        (2, 1, "bf16", "bf16"),
    ],
)
def test_the_peak_of_an_update_is_known_before(
    stage: int, accumulation: int, dtype: str, wire: str | None, npus: RankPools
) -> None:
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": accumulation,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": stage, **LIMITS},
        "bf16": {"enabled": dtype == "bf16"},
        "communication_data_type": wire,
    }
    with torch.device("meta"):
        model, batch = Tower(), torch.ones(ROWS, WIDTH)
    batch = batch.bfloat16() if dtype == "bf16" else batch
    found = hadal.plan(model, config, batch, cluster="h100x2")
    others = ("communicators", "context", "fragments")
    said = sum(need.held.device for need in found.kinds if need.kind not in others)
    for peak in npus(2).run(peak_of_an_update, config):
        assert 0.99 * peak <= said <= 1.05 * peak


def cases() -> Any:
    """Return `benchmarks/foresight.py`, whose cases the ranks here train too."""
    if "foresight" not in sys.modules:
        file = Path(__file__).parents[2] / "benchmarks/foresight.py"
        spec = importlib.util.spec_from_file_location("foresight", file)
        assert spec is not None and spec.loader is not None
        sys.modules["foresight"] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules["foresight"])
    return sys.modules["foresight"]


def peak_of_case(name: str) -> int:
    return int(cases().measured(cases().CASES[name]))


@pytest.mark.skipif(find_spec("transformers") is None, reason="transformers is not installed")
@pytest.mark.parametrize("name", PARTS)
def test_the_peak_of_a_part_of_a_model_is_known_before(name: str, npus: RankPools) -> None:
    kinds = cases().planned(cases().CASES[name])
    del kinds["moment"]
    said = sum(nbytes for kind, nbytes in kinds.items() if kind not in cases()._LIBRARIES)
    peak = max(npus(2).run(peak_of_case, name))
    assert 0.97 * peak <= said <= 1.05 * peak


# ---- while it trains -----------------------------------------------------------------------------


class Scattered(Tower):
    """Its shapes depend on values."""

    def forward(self, values: Tensor) -> Tensor:
        return super().forward(values[values.sum(1).nonzero()[:, 0]])


def ended(stage: int) -> tuple[int, int, int]:
    """Return the bytes of the weights, and those that an engine's end takes in it and after it."""
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": stage, **LIMITS},
        "bf16": {"enabled": True},
    }
    engine, *_ = hadal.initialize(model=Tower(), config=config)
    train(engine, 2)
    weights = {name: weight.clone() for name, weight in engine.module_state_dict().items()}
    assert isinstance(engine.optimizer, torch.optim.Optimizer)
    master = engine.optimizer.param_groups[0]["params"][0].clone()
    gc.collect()
    torch.accelerator.reset_peak_memory_stats()
    before = torch.accelerator.memory_allocated()
    engine.destroy()
    peak = torch.accelerator.max_memory_allocated() - before
    after = torch.accelerator.memory_allocated() - before
    for name, weight in engine.module.state_dict().items():
        assert torch.equal(weight.cpu(), weights[name].cpu())
    assert torch.equal(engine.optimizer.param_groups[0]["params"][0], master)
    return sum(weight.nbytes for weight in weights.values()), peak, after


@pytest.mark.parametrize("stage", range(4))
def test_an_end_takes_one_bucket_beside_the_weights(stage: int, npus: RankPools) -> None:
    for weights, peak, after in npus(2).run(ended, stage):
        new = weights if stage == 3 else 0  # half of them were there, as shards
        assert after <= 1.05 * new
        assert peak <= new + 0.5 * weights


def train(engine: Any, updates: int) -> None:
    dtype = next(engine.module.parameters()).dtype
    values = torch.ones(ROWS, WIDTH, device=engine.device, dtype=dtype)
    for _ in range(updates):
        engine.backward(engine(values).float().sum())
        engine.step()


def out_of_memory(config: dict[str, Any], kind: type[Tower], share: float) -> tuple[int, str]:
    """Return the peak of an update, and the error with `share` of that.

    The changes that the error tells are made, and the model trains in the same memory.
    """
    peak = peak_of_an_update(config)
    gc.collect()
    room = torch.accelerator.memory_allocated() + int(share * peak)
    with npu.with_memory(room):
        engine = hadal.initialize(model=kind(), config=config)[0]
        try:
            train(engine, 3)
        except torch.OutOfMemoryError as error:
            said = "\n".join([str(error), *getattr(error, "__notes__", ())])
            assert not isinstance(error.__context__, torch.OutOfMemoryError)  # the first is told
        if config.get("zero_optimization", {}).get("stage") != 3:  # it makes no weight whole
            engine.destroy()
    engine.destroy()
    del engine
    gc.collect()
    patches = [json.loads(patch) for patch in re.findall(r": (\{.*\}) saves", said)]
    if patches:
        with npu.with_memory(room):
            engine = hadal.initialize(model=kind(), config=reduce(merged, patches, config))[0]
            train(engine, 3)
        engine.destroy()
    return peak, said


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_out_of_memory_tells_the_plan_and_what_would_fit(stage: int, npus: RankPools) -> None:
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": stage, **LIMITS},
        "bf16": {"enabled": True},
    }
    for rank, (peak, said) in enumerate(npus(2).run(out_of_memory, config, Tower, 0.9)):
        first, needs, remedy, *changes = said.splitlines()
        assert re.fullmatch(r"npu out of memory: tried to allocate \d+ bytes beside \d+", first)
        found = re.fullmatch(
            rf"rank {rank}: the plan of this batch needs (\S+) MB of the device at its peak, in"
            r" (step|backward of blocks\.\d\.\d): (.*)\. Of its (\S+) MB, (\S+) MB are for"
            r" tensors, which held \S+ MB when the error was caught",
            needs,
        )
        assert found is not None
        assert 0.99 * peak <= 1e6 * float(found[1]) <= 1.05 * peak
        kinds = re.findall(r"(\w+) ([\d.]+) ([kM])B", found[3])
        assert {kind for kind, *_ in kinds} >= {"weights", "gradients", "optimizer"}
        said_of_each = sum(float(number) * {"k": 1e3, "M": 1e6}[unit] for _, number, unit in kinds)
        assert said_of_each == pytest.approx(1e6 * float(found[1]), rel=0.01)
        assert found[4] == found[5]
        assert remedy.endswith("each on top of those before, it fits:")
        assert 1 <= len(changes) <= 2


def test_a_plan_that_fails_leaves_the_error_alone(npus: RankPools) -> None:
    config = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "AdamW"}}
    for _, said in npus(2).run(out_of_memory, config, Scattered, 0.9):
        assert re.fullmatch(r"npu out of memory: tried to allocate \d+ bytes beside \d+", said)


def compared(kept: int, rests: bool = False) -> list[str]:
    """Return what is logged of the plan, where the program keeps bytes of its own.

    `rests`: the optimizer's state is off the device in forward and backward.
    """
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": 2},
        "memory_breakdown": True,
        "compile": {"deepcompile": rests, "offload_opt_states": rests},
    }
    gc.collect()
    left = torch.accelerator.memory_allocated()
    assert left < 100_000, f"{left} bytes of earlier tests"  # far less than what differs
    with logged(logging.INFO) as lines:
        engine = hadal.initialize(model=Tower(), config=config)[0]
        mine = torch.zeros(kept, dtype=torch.uint8, device=engine.device)
        train(engine, 3)
        engine.destroy()
    del mine
    return [line for line in lines if "planned" in line]


@pytest.mark.claims("memory_breakdown")
def test_memory_that_is_not_as_planned_is_told_once(npus: RankPools) -> None:
    assert npus(2).run(compared, 0) == [[], []]
    assert npus(2).run(compared, 0, True) == [[], []]
    (line,), silent = npus(2).run(compared, 10_000_000)
    assert silent == []
    assert line.count(", planned ") == 4
    assert line.startswith("memory of update 2 is not as planned: before forward ")


ACCUMULATED = {"gradient_accumulation_steps": 2}


class Answers(Tower):
    """Its outputs are larger than its states, and it has a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", torch.ones(1_000_000))

    def forward(self, values: Tensor) -> Any:
        output = super().forward(values)
        return {"loss": output.float().sum(), "outputs": output.repeat(4, 4)}


def at_rest(keys: dict[str, Any], brought: bool, kept: int) -> list[str]:
    """Return what is logged of the states where the program keeps `kept` bytes and its outputs."""
    gc.collect()
    optimizer = {} if brought else {"optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}}
    config = {"train_micro_batch_size_per_gpu": 1, "log_level": "info", **optimizer, **keys}
    model = Answers()
    mine = torch.optim.AdamW(model.parameters(), amsgrad=True) if brought else None
    with mock.patch.object(planned_memory, "_SMALL", 100_000), logged(logging.INFO) as lines:
        engine = hadal.initialize(model=model, optimizer=mine, config=config)[0]
        more = torch.zeros(kept, dtype=torch.uint8, device=engine.device)
        dtype = next(engine.module.parameters()).dtype
        values = torch.ones(ROWS, WIDTH, device=engine.device, dtype=dtype)
        for _ in range(3 * engine.gradient_accumulation_steps()):
            found = engine(values)
            engine.backward(found["loss"])
            engine.step()
        engine.destroy()
    del more
    return [line for line in lines if "planned" in line]


@pytest.mark.fast_cells("keys3-False", "keys4-True", "keys5-False")
@pytest.mark.parametrize(
    ("keys", "brought"),
    [
        *(({"zero_optimization": {"stage": stage}}, False) for stage in range(4)),
        ({"bf16": {"enabled": True}, "zero_optimization": {"stage": 2}}, True),
        ({"fp16": {"enabled": True, "initial_scale_power": 4}, **ACCUMULATED}, False),
        ({"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}, False),
    ],
)
def test_states_that_are_not_as_planned_are_told_once(
    keys: dict[str, Any], brought: bool, npus: RankPools
) -> None:
    assert npus(2).run(at_rest, keys, brought, 0) == [[], []]
    (line,), silent = npus(2).run(at_rest, keys, brought, 10_000_000)
    assert silent == [] and ", planned " in line
    assert re.match(r"memory after update \d is not as planned: [\d.]+ MB of the device", line)


# ---- communicators -------------------------------------------------------------------------------

FOUR: dict[str, tuple[Callable[[], Any], dict[str, Any], tuple[int, ...]]] = {
    "data": (partial(keys, 1), {}, ()),
    "stage 3": (partial(keys, 3), {"zero_optimization": {"stage": 3}}, ()),
    **{
        name: (
            partial(keys, 3, zero={name: 2}),
            {"zero_optimization": {"stage": 3, name: 2}},
            (),
        )
        for name in ("mics_shard_size", "zero_hpz_partition_size")
    },
    "slices of layers": (
        partial(of_transformers, tensor_parallel={"autotp_size": 2}),
        {"tensor_parallel": {"autotp_size": 2}},
        (),
    ),
    "slices of sequences": (
        partial(of_transformers, sequence_parallel_size=2),
        {"sequence_parallel_size": 2},
        (),
    ),
    "experts": (partial(experts, ep_size=2, k=2), {}, (2,)),
    "experts on all ranks": (partial(experts, ep_size=4, k=2), {}, (4,)),
    "stages": (partial(in_stages, "1f1b", 1), {"pipeline": {"auto": True, "stages": 2}}, ()),
    "interleaved stages": (
        partial(in_stages, "interleaved", 2),
        {"pipeline": {"auto": True, "stages": 2, "chunks": 2, "schedule": "interleaved"}},
        (),
    ),
}


def connected(name: str) -> list[tuple[int, bool]]:
    """Return the groups with device tensors: their sizes, and whether any pair has messages."""
    found: dict[str, set[str]] = {dist.group.WORLD.group_name: set()}  # type: ignore[union-attr]
    sizes = {dist.group.WORLD.group_name: 4}  # type: ignore[union-attr]
    plain = functions.Call.run

    def run(call: Any, *args: Any, **kwargs: Any) -> Any:
        tensors = [call.tensors] if isinstance(call.tensors, Tensor) else call.tensors
        if any(tensor.device.type == "npu" for tensor in tensors):
            group = dist.group.WORLD if call.group is None else call.group
            sizes[group.group_name] = len(numbers_of(group))
            found.setdefault(group.group_name, set()).add(call.operation)
        return plain(call, *args, **kwargs)

    functions.Call.run = run  # type: ignore[method-assign]
    try:
        with npu.asynchronous(), npu.with_float64():
            engine, update = FOUR[name][0]()
            for _ in range(3):
                update()
            engine.destroy()
    finally:
        functions.Call.run = plain  # type: ignore[method-assign]
    to_each = {"all_to_all", "send", "recv"}
    return sorted((sizes[group], not kinds.isdisjoint(to_each)) for group, kinds in found.items())


@pytest.mark.fast_cells("mics_shard_size", "experts", "stages")
@pytest.mark.parametrize("name", FOUR)
def test_the_communicators_of_a_rank_are_known_before(name: str, npus: RankPools) -> None:
    _, sections, sizes = FOUR[name]
    raw = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 2}, **sections}
    made = communicators_of(load_config(raw, world_size=4), 4, 4, sizes)
    expected = sorted((one.ranks, one.is_to_each) for one in made)
    for found in npus(4).run(connected, name):
        assert found == expected
