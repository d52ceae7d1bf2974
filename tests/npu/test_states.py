"""States that leave the device and come back, and checkpoints between devices."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from cases import every
from ranks import RankPools
from torch import Tensor
from torch.nn import functional as F

import hadal
import npu
from hadal.checkpoint.collecting import is_rounding
from hadal.device import current_device
from hadal.offload import crossing
from hadal.offload.crossing import Crossing
from hadal.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

from . import runs
from .test_training import on_disk, same


def _late() -> Any:
    return npu.asynchronous() if current_device().type == "npu" else contextlib.nullcontext()


# ---- gradients -----------------------------------------------------------------------------------


def _around_an_update(config: dict[str, Any]) -> tuple[int, int, int]:
    """Bytes of the device in use before a backward, behind it and behind the update."""
    engine = runs.built(config)
    runs.advanced(engine, 2)
    tokens = runs.batches(0, 1)[0].to(engine.device)
    outputs = engine(tokens[:, :-1])
    loss = F.cross_entropy(outputs.float().flatten(0, 1), tokens[:, 1:].flatten())
    del outputs
    engine.set_gradient_accumulation_boundary(True)
    before = _allocated()
    engine.backward(loss)
    del loss
    behind = _allocated()
    engine.step()
    after = _allocated()
    engine.destroy()
    return before, behind, after


@pytest.mark.fast_cells("1")
@pytest.mark.parametrize("stage", [0, 1])
def test_gradients_take_no_memory_between_updates(stage: int, npus: RankPools) -> None:
    numel = sum(parameter.numel() for parameter in runs.Model().parameters())
    for before, behind, after in npus(2).run(_around_an_update, runs.config(stage, "bf16")):
        assert behind - after >= 2 * numel  # bf16
        assert after < before  # that held the activations


# ---- away and back -------------------------------------------------------------------------------


def _moved(config: dict[str, Any], pinned: bool, waits: bool) -> dict[str, Any]:
    is_here = current_device().type == "npu"
    with _late():
        # What others of this process hold is not the engine's.
        already = _allocated()
        engine = runs.built(config)
        told = runs.advanced(engine, 2)
        host: set[int] = set()
        for first in (2, 4):
            before = _allocated() - already
            with _no_waits() if is_here and pinned and not waits else contextlib.nullcontext():
                engine.offload_states(pin_memory=pinned, non_blocking=not waits)
                host |= {one.contents.data_ptr() for one in engine._state.moved}
                torch.ones(400, device=engine.device).mul_(2)  # may get memory that has been left
                if waits and is_here:
                    assert all(one.event.is_over for one in engine._state.moved)
                    assert _allocated() - already < before / 2
                engine.reload_states(non_blocking=not waits)
            more = runs.advanced(engine, 1, first)
            told = {key: told[key] + more[key] for key in told}
        if is_here and pinned:
            assert len(host) == len(engine._state.host_memory)  # taken once
        told["weights"] = runs.weights(engine)
        told["device"] = engine.device.type
        engine.destroy()
        assert not engine._state.host_memory
    return told


@contextlib.contextmanager
def _no_waits() -> Iterator[None]:
    with npu.waits() as found:
        yield
    assert not found


def _allocated() -> int:
    gc.collect()
    if current_device().type == "cpu":
        return 0
    return int(torch.accelerator.memory_allocated())


@pytest.mark.fast_cells("3-how4")
@every(stage=[1, 3], how=[(True, True), (True, False), (False, True)])
def test_states_move_out_and_in(
    stage: int, how: tuple[bool, bool], npus: RankPools, ranks: RankPools
) -> None:
    pinned, waits = how
    config = runs.config(stage, "bf16")
    wanted = ranks(2).run(_moved, config, pinned, waits)
    same(npus(2).run(_moved, config, pinned, waits), wanted)


def _resting(config: dict[str, Any], schedule: Any) -> dict[str, Any]:
    is_here = current_device().type == "npu"
    with _late(), warnings.catch_warnings():
        # torch's compiler looks at what a graph break hands over.
        warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf")
        engine = runs.built(config)
        if schedule != "none":
            engine.compile(backend="eager", schedule=schedule)
        told: dict[str, Any] = {"losses": [], "norms": [], "device": engine.device.type}
        seen, held = list[bool](), list[int]()
        weight = engine.module.blocks[0].wide.weight
        for update in range(4):
            for tokens in runs.batches(torch.distributed.get_rank(), 1, update):
                tokens = tokens.to(engine.device)
                outputs = engine(tokens[:, :-1])
                loss = F.cross_entropy(outputs.float().flatten(0, 1), tokens[:, 1:].flatten())
                engine.backward(loss)
                told["losses"].append(loss.item())
                seen.append(bool(engine._state.moved))
                held.append(_state_nbytes(engine))
                if update == 2 and engine.is_gradient_accumulation_boundary():
                    told["looked"] = safe_get_full_optimizer_state(weight, "exp_avg").tolist()
                    assert not engine._state.moved  # a look brings it back
                with npu.waits() if is_here else contextlib.nullcontext([]) as found:
                    engine.step()
                assert all(wait.where.startswith("optim/norm.py") for wait in found), found
            assert not engine._state.moved
        told["weights"] = runs.weights(engine)
        if is_here:
            told["seen"], told["held"] = seen, held
        engine.destroy()
    return told


def _state_nbytes(engine: Any) -> int:
    states = [v for one in engine.optimizer.state.values() for v in one.values()]
    storages = {v.untyped_storage() for v in states if isinstance(v, Tensor) and v.dim()}
    return sum(storage.nbytes() for storage in storages)


@pytest.mark.fast_cells("3-schedule")
@every(stage=[0, 1, 2, 3], how=["section", "schedule"])
def test_optimizer_states_leave_for_forward_and_backward(
    stage: int, how: str, npus: RankPools, ranks: RankPools
) -> None:
    plain = runs.config(stage, "bf16")
    wanted = ranks(2).run(_resting, plain, "none")
    if how == "section":
        section = {"deepcompile": True, "offload_opt_states": True}
        found = npus(2).run(_resting, {**plain, "compile": section}, None)
        away = [False] * 2 + [True] * 6  # no state before the first update
    else:
        passes = [(0, ["prefetch"] if stage == 3 else []), (2, ["offload_adam_states"])]
        found = npus(2).run(_resting, plain, passes)
        away = [False] * 4 + [True] * 4
    for one in found:
        assert one.pop("seen") == away
        assert [nbytes == 0 for nbytes in one.pop("held")] == [True] * 2 + away[2:]
    same(found, wanted)


def _by_short_stages(config: dict[str, Any]) -> dict[str, Any]:
    plain, crossing._STAGED_NBYTES = crossing._STAGED_NBYTES, 64
    try:
        return runs.wherever(config)
    finally:
        crossing._STAGED_NBYTES = plain


def test_buffers_on_the_way_to_the_device_are_used_again(npus: RankPools, ranks: RankPools) -> None:
    large = {"reduce_bucket_size": 100_000, "offload_optimizer": {"device": "cpu"}}
    config = runs.config(2, "bf16", large)
    wanted = ranks(2).run(_by_short_stages, config)
    same(npus(2).run(_by_short_stages, config), wanted)


# ---- checkpoints ---------------------------------------------------------------------------------


def _draw(engine: Any) -> list[float]:
    drawn: list[float] = torch.rand(3, device=engine.device).tolist()
    return drawn


def _saved(config: dict[str, Any], folder: str) -> list[float]:
    """Two updates, a checkpoint, and what the device's generator gives next."""
    with _late():
        engine = runs.built(config)
        runs.advanced(engine, 2)
        torch.manual_seed(11 + torch.distributed.get_rank())
        _draw(engine)
        engine.save_checkpoint(folder)
        drawn = _draw(engine)
        runs.advanced(engine, 1, 7)  # while an asynchronous save may still go on
        engine.wait_for_checkpoint()
        engine.destroy()
    return drawn


def _loaded(config: dict[str, Any], folder: str) -> dict[str, Any]:
    """The next steps."""
    with _late():
        engine = runs.built(config)
        torch.manual_seed(77)
        path, _ = engine.load_checkpoint(folder)
        assert path is not None
        drawn = _draw(engine)
        told = runs.advanced(engine, 2, 20)
        parameter = engine.module.blocks[1].wide.weight
        moment = safe_get_full_optimizer_state(parameter, "exp_avg")
        told["weights"] = {
            **runs.weights(engine),
            "master": safe_get_full_fp32_param(parameter).cpu(),
            "moment": moment.cpu(),
        }
        told["device"] = engine.device.type
        told["drawn"] = drawn
        engine.destroy()
    return told


SAVED = {
    "stage 0": runs.config(0),
    "stage 1": runs.config(1, "bf16"),
    "stage 2 async": runs.config(2, "fp16", checkpoint={"async_save": True}),
    "stage 3 async": runs.config(3, "bf16", checkpoint={"async_save": True}),
    "on the host": runs.config(3, "bf16", {"offload_optimizer": {"device": "cpu"}}),
    "on the disk": runs.config(
        3, "bf16", {"offload_optimizer": {"device": "nvme"}, "offload_param": {"device": "cpu"}}
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SAVED)
def test_checkpoints_pass_between_devices(
    name: str, npus: RankPools, ranks: RankPools, tmp_path: Path
) -> None:
    config = on_disk(SAVED[name], tmp_path)
    here, there = str(tmp_path / "npu"), str(tmp_path / "cpu")
    drawn = npus(2).run(_saved, config, here)
    ranks(2).run(_saved, config, there)
    wanted = ranks(2).run(_loaded, config, there)
    same(npus(2).run(_loaded, config, there), wanted)  # from a CPU
    found = npus(2).run(_loaded, config, here)
    same(found, wanted)
    assert [one["drawn"] for one in found] == drawn
    from_npu = ranks(2).run(_loaded, config, here)
    same(found, from_npu)


# ---- weights -------------------------------------------------------------------------------------


def _edited(config: dict[str, Any], folder: str) -> dict[str, Any]:
    with _late():
        engine = runs.built(config)
        parameter = engine.module.blocks[0].wide.weight
        with hadal.zero.GatheredParameters([parameter], modifier_rank=0), torch.no_grad():
            if torch.distributed.get_rank() == 0:
                parameter.mul_(0.5)
        told = runs.advanced(engine, 2)
        engine.eval()
        with torch.no_grad():
            tokens = torch.arange(12).view(2, 6).to(engine.device)
            told["losses"].append(F.softmax(engine(tokens).float(), -1).sum().item())
        engine.train()
        engine.save_16bit_model(folder)
        told["weights"] = runs.weights(engine)
        told["device"] = engine.device.type
        engine.destroy()
    return told


@pytest.mark.fast_cells("3")
@pytest.mark.parametrize("stage", [2, 3])
def test_weights_are_edited_and_exported(
    stage: int, npus: RankPools, ranks: RankPools, tmp_path: Path
) -> None:
    from safetensors.torch import load_file

    config = runs.config(
        stage, "bf16", {"stage3_gather_16bit_weights_on_model_save": True} if stage == 3 else {}
    )
    here, there = tmp_path / "npu", tmp_path / "cpu"
    wanted = ranks(2).run(_edited, config, str(there))
    same(npus(2).run(_edited, config, str(here)), wanted)
    files = sorted(path.name for path in there.iterdir())
    assert files == sorted(path.name for path in here.iterdir())
    for name in files:
        if name.endswith(".safetensors"):
            found = load_file(here / name)
            for key, values in load_file(there / name).items():
                assert torch.equal(found[key], values), key


# ---- on the host ---------------------------------------------------------------------------------


def _compared() -> int:
    numel = 1 << 23
    masters = torch.randn(numel)
    weights = masters.bfloat16().to(current_device())
    before = _allocated()
    torch.accelerator.reset_peak_memory_stats()
    assert is_rounding(weights, masters)
    masters[-1] += 1
    assert not is_rounding(weights, masters)
    return torch.accelerator.max_memory_allocated() - before


def test_a_save_finds_room_for_a_part_of_the_masters_on_a_full_device(npus: RankPools) -> None:
    (taken,) = npus(1).run(_compared)
    assert taken <= 12 << 20  # of 48 MiB, all at once


def _warned(config: dict[str, Any]) -> list[str]:
    told: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("hadal").addHandler(handler)
    cores, os.sched_getaffinity = os.sched_getaffinity, lambda _: set(range(64))
    try:
        runs.built(config).destroy()
        torch.set_num_threads(2)
        runs.built(config).destroy()
    finally:
        os.sched_getaffinity = cores
        torch.set_num_threads(1)
        logging.getLogger("hadal").removeHandler(handler)
    return [line for line in told if "OMP_NUM_THREADS" in line]


def test_one_thread_for_updates_on_the_host_is_warned_of(npus: RankPools) -> None:
    """Once, by one rank: 64 cores for two ranks, of which torchrun lets each use one."""
    host = runs.config(2, "bf16", {"offload_optimizer": {"device": "cpu"}})
    first, second = npus(2).run(_warned, host)
    assert len(first) == 1 and "OMP_NUM_THREADS=32" in first[0]
    assert not second
    assert npus(2).run(_warned, runs.config(2, "bf16")) == [[], []]


def _crossed(config: dict[str, Any]) -> dict[str, Any]:
    """The results of training, and the bytes of gradients in each direction."""
    crossed = {"land": 0, "bring": 0}

    def counted(name: str) -> Any:
        plain = getattr(Crossing, name)

        def act(self: Crossing, values: Tensor, out: Tensor, **more: Any) -> Any:
            crossed[name] += values.nbytes
            return plain(self, values, out, **more)

        return patch.object(Crossing, name, act)

    with counted("land"), counted("bring"):
        told = runs.wherever(config, updates=6)  # of two micro-steps each
    return {**told, **crossed}


@pytest.mark.slow
@pytest.mark.claims("zero_optimization.offload_optimizer.accumulate_on")
@pytest.mark.parametrize("stage", [2, 3])
def test_sums_of_gradients_stay_on_the_device_while_they_fit(
    stage: int, npus: RankPools, ranks: RankPools, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three updates of four micro-steps: one way out each, or four and three back."""

    def config(place: str) -> dict[str, Any]:
        offload = {"offload_optimizer": {"device": "cpu", "accumulate_on": place}}
        made = runs.config(stage, "bf16", offload, gradient_accumulation_steps=4)
        made["data_types"] = {"grad_accum_dtype": "bf16"}
        return made

    wanted = ranks(2).run(_crossed, config("auto"))
    found = {place: npus(2).run(_crossed, config(place)) for place in ("auto", "device", "host")}
    for told in found.values():
        same(told, wanted)
    for auto, device, host in zip(*found.values(), strict=True):
        assert auto["land"] == device["land"] > 0
        assert auto["bring"] == device["bring"] == 0
        assert host["land"] == 4 * device["land"]
        assert host["bring"] == 3 * device["land"]


@pytest.mark.slow
def test_a_sum_that_comes_back_is_averaged_over_the_copies(
    npus: RankPools, ranks: RankPools
) -> None:
    def config(**zero: Any) -> dict[str, Any]:
        made = runs.config(3, "bf16", {"mics_shard_size": 2, **zero})
        made["data_types"] = {"grad_accum_dtype": "bf16"}
        return made

    wanted = ranks(4).run(runs.trained, config())
    offload = {"device": "cpu", "accumulate_on": "host"}
    same(npus(4).run(runs.trained_late, config(offload_optimizer=offload)), wanted)
