"""Optimizers that are not elementwise, with their state on the disk."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from engine.toys import ByNorm
from ranks import RankPools, on_ranks
from torch import Tensor

import hadal
from hadal import comm, utils
from hadal.errors import OffloadError
from hadal.offload.tensors import DiskTensor

from .test_tiers import config_of, model_of, small_blocks, train

KINDS = ["Lamb", "Muon", "Adafactor", "ByNorm", "foreach", "hooked"]


def engine_of(
    kind: str, stage: int, dtype: str, optimizer: str | None, weights: str | None, path: str
) -> Any:
    config, model = config_of(stage, dtype, optimizer, weights, path), model_of()
    given: dict[str, Any] = {}
    if kind == "ByNorm":
        given["optimizer"] = ByNorm(model.parameters(), lr=0.25)
    elif kind in ("foreach", "hooked"):
        adam = torch.optim.AdamW(model.parameters(), lr=0.01, foreach=kind == "foreach" or None)
        if kind == "hooked":
            adam.register_step_pre_hook(no_values_of_nan)
        given["optimizer"] = adam
    else:
        config["optimizer"] = {"type": kind, "params": {"lr": 0.01, "weight_decay": 0.1}}
    if given:
        del config["optimizer"]
    return hadal.initialize(model=model, config=config, **given)[0]


def no_values_of_nan(optimizer: Any, *_: Any) -> None:
    """A hook sees all values that the optimizer works on."""
    for group in optimizer.param_groups:
        for values in group["params"]:
            assert bool(values.isfinite().all()) and bool(values.grad.isfinite().all())


def remembered(engine: Any) -> list[Any]:
    """Return the optimizer's state on this rank, tensor by tensor, and the weights and masters."""
    saved = engine.optimizer.state_dict()["state"]
    found = [value for number in sorted(saved) for _, value in sorted(saved[number].items())]
    found += [utils.safe_get_full_fp32_param(p) for p in engine.module.parameters()]
    # Counts of steps are the optimizer's own, which go on.
    return copy.deepcopy([*found, *engine.state_dict().values()])


def assert_alike(found: list[Any], wanted: list[Any]) -> None:
    for mine, theirs in zip(found, wanted, strict=True):
        if isinstance(mine, Tensor):
            assert mine.dtype == theirs.dtype and torch.equal(mine, theirs)
        else:
            assert mine == theirs


def trained(kind: str, updates: int, *where: Any) -> tuple[list[float], list[Any]]:
    engine = engine_of(kind, *where)
    losses = train(engine, updates)
    state = remembered(engine)
    engine.destroy()
    return losses, state


def compare_places(kind: str, stage: int, dtype: str, path: str, updates: int) -> None:
    with small_blocks():
        losses, state = trained(kind, updates, stage, dtype, None, None, path)
        for optimizer, weights in (("cpu", None), ("nvme", None), ("nvme", "nvme")):
            if weights is None or stage == 3:
                found, other = trained(kind, updates, stage, dtype, optimizer, weights, path)
                assert found == losses, (optimizer, weights)
                assert_alike(other, state)
    assert len(set(losses)) == len(losses)
    comm.barrier()
    assert not list(Path(path).iterdir())


@pytest.mark.fast_cells("Adafactor-3-fp32")
@pytest.mark.parametrize(
    ("kind", "stage", "dtype"),
    [
        ("Lamb", 3, "bf16"),
        ("Lamb", 1, "fp32"),
        ("Muon", 3, "bf16"),
        ("Muon", 2, "fp32"),
        ("Adafactor", 3, "fp32"),
        ("Adafactor", 1, "fp16"),
        ("ByNorm", 2, "bf16"),
        ("foreach", 3, "fp32"),
        ("hooked", 2, "bf16"),
    ],
)
def test_device_host_and_disk_give_the_same_bits(
    kind: str, stage: int, dtype: str, ranks: RankPools, tmp_path: Path
) -> None:
    ranks(2).run(compare_places, kind, stage, dtype, str(tmp_path), 3)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_twenty_updates_give_the_same_bits(
    kind: str, stage: int, dtype: str, ranks: RankPools, tmp_path: Path
) -> None:
    ranks(2).run(compare_places, kind, stage, dtype, str(tmp_path), 20, timeout=300)


# ---- saved and loaded ----------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "stage", "dtype"),
    [
        ("Lamb", 2, "fp32"),
        ("Muon", 3, "bf16"),
        ("Adafactor", 2, "bf16"),
        ("ByNorm", 3, "fp32"),
        ("AdamW", 3, "bf16"),
    ],
)
@on_ranks(2)
def test_training_goes_on_bit_for_bit(kind: str, stage: int, dtype: str, tmp_path: Path) -> None:
    """Resume from device and disk on device and disk, by a checkpoint and by `state_dict`."""
    places: list[Any] = [(None, None), ("nvme", "nvme" if stage == 3 else None)]
    with small_blocks():
        for before, after in itertools.product(places, places):
            engine = engine_of(kind, stage, dtype, *before, tmp_path)
            train(engine, 2)
            engine.save_checkpoint(f"{tmp_path}/saved")
            state = copy.deepcopy(engine.optimizer.state_dict())
            train(engine, 2, 2)
            wanted = remembered(engine)
            engine.destroy()
            other = engine_of(kind, stage, dtype, *after, tmp_path)
            train(other, 1, 7)  # it has been elsewhere
            other.load_checkpoint(f"{tmp_path}/saved")
            train(other, 2, 2)
            assert_alike(remembered(other), wanted)
            other.load_checkpoint(f"{tmp_path}/saved", load_optimizer_states=False)
            other.optimizer.load_state_dict(state)
            train(other, 2, 2)
            assert_alike(remembered(other), wanted)
            other.destroy()


@on_ranks(2)
def test_state_that_cannot_be_loaded_changes_nothing(tmp_path: Path) -> None:
    """State that the disk rejects leaves the old state in place; only that rank raises."""
    engine = engine_of("AdamW", 2, "bf16", "nvme", None, tmp_path)
    train(engine, 1)
    state = engine.optimizer.state_dict()
    assert all(one["exp_avg"].device.type == "cpu" for one in state["state"].values())
    changed = copy.deepcopy(state)
    for one in changed["state"].values():
        one["exp_avg"] += 1.0
        one["step"] += 5
    changed["param_groups"][0]["lr"] = 0.5
    before = remembered(engine)
    if comm.get_rank() == 1:
        with (
            failing_write(2, OffloadError("the disk is gone")),
            pytest.raises(OffloadError, match="the disk is gone"),
        ):
            engine.optimizer.load_state_dict(changed)
    comm.barrier()
    assert_alike(remembered(engine), before)
    assert engine.optimizer.param_groups[0]["lr"] == 0.01
    state["state"][0]["exp_avg"].fill_(7.0)  # a copy, which nobody reads
    train(engine, 1, 1)
    found = remembered(engine)
    engine.destroy()
    _, wanted = trained("AdamW", 2, 2, "bf16", None, None, tmp_path)
    assert_alike(found, wanted)


@pytest.mark.fast_cells("Lamb-3")
@pytest.mark.parametrize(("kind", "stage"), [("Lamb", 3), ("Muon", 2), ("Adafactor", 2)])
@on_ranks(2)
def test_later_groups_are_offloaded_to_the_disk_too(kind: str, stage: int, tmp_path: Path) -> None:
    """Parameters frozen at first are offloaded like the others once they are trained."""
    found = []
    for optimizer in (None, "nvme"):
        model = model_of()
        model[1].requires_grad_(False)
        config = config_of(stage, "bf16", optimizer, None, tmp_path)
        config["optimizer"] = {"type": kind, "params": {"lr": 0.01}}
        engine, torch_optimizer, *_ = hadal.initialize(model=model, config=config)
        train(engine, 2)
        model[1].requires_grad_(True)
        group: dict[str, Any] = {"params": list(model[1].parameters())}
        if kind == "Muon":
            group = {"params": [p for p in group["params"] if p.dim() > 1], "use_muon": True}
        torch_optimizer.add_param_group(group)
        train(engine, 2, 2)
        buckets = [one.bucket for one in engine._parts.runtime.gradients]
        assert {b.offload.disk_of_state is None for b in buckets} == {optimizer is None}
        found.append(remembered(engine))
        engine.destroy()
    assert_alike(*found)


# ---- faults --------------------------------------------------------------------------------------


@contextmanager
def failing_write(number: int, error: BaseException) -> Iterator[None]:
    """Make this write of an update fail on the last rank."""
    plain, calls = DiskTensor.start_write, [0]

    def write(run: DiskTensor, start: int, values: Tensor) -> Any:
        request = plain(run, start, values)
        calls[0] += 1
        if calls[0] == number:
            request.wait()
            raise error
        return request

    if comm.get_rank() == comm.get_world_size() - 1:
        DiskTensor.start_write = write  # type: ignore[method-assign]
    try:
        yield
    finally:
        DiskTensor.start_write = plain  # type: ignore[method-assign]


@pytest.mark.fast_cells("Lamb-3-bf16")
@pytest.mark.parametrize(
    ("kind", "stage", "dtype"),
    [("Lamb", 3, "bf16"), ("Muon", 2, "fp32"), ("Adafactor", 3, "bf16"), ("hooked", 2, "fp32")],
)
@on_ranks(2)
def test_an_update_with_one_failed_disk_changes_nothing(
    kind: str, stage: int, dtype: str, tmp_path: Path
) -> None:
    """Nothing has changed on any rank, whichever write of the update fails."""
    weights = "nvme" if stage == 3 else None
    with small_blocks():
        engine = engine_of(kind, stage, dtype, "nvme", weights, tmp_path)
        for update, number in enumerate((3, 1, 6)):
            before = remembered(engine)
            with (
                failing_write(number, OffloadError(f"{tmp_path}: the disk is gone")),
                pytest.raises(OffloadError, match="the disk is gone"),
            ):
                train(engine, 1, update)
            assert_alike(remembered(engine), before)
            train(engine, 1, update)
        found = remembered(engine)
        engine.destroy()
        _, wanted = trained(kind, 3, stage, dtype, None, None, tmp_path)
        assert_alike(found, wanted)


def interrupt(kind: str, stage: int, dtype: str, path: str) -> None:
    """An interrupt by the user changes nothing either, and leaves no gradients behind."""
    with small_blocks():
        engine = engine_of(kind, stage, dtype, "nvme", None, path)
        train(engine, 1)
        for number in (1, 4):
            before = remembered(engine)
            with failing_write(number, KeyboardInterrupt()), pytest.raises(KeyboardInterrupt):
                train(engine, 1, 1)
            assert_alike(remembered(engine), before)
        train(engine, 2, 1)
        found = remembered(engine)
        engine.destroy()
        _, wanted = trained(kind, 3, stage, dtype, None, None, path)
        assert_alike(found, wanted)


@pytest.mark.fast_cells("Lamb-2")
@pytest.mark.parametrize(("kind", "stage"), [("Lamb", 2), ("Muon", 3), ("Adafactor", 2)])
def test_an_interrupted_update_changes_nothing(
    kind: str, stage: int, ranks: RankPools, tmp_path: Path
) -> None:
    ranks(1).run(interrupt, kind, stage, "bf16", str(tmp_path))
