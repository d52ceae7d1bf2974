"""Checkpoints of state on a disk: saved and loaded like any other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import RankPools, on_ranks
from torch import Tensor

import hadal
from hadal.offload.tensors import DiskTensor, StoredSlice

from .test_tiers import config_of, model_of, small_blocks, state_of, train

DEVICE = (None, None)
DISK = ("nvme", "nvme")


def engine_of(stage: int, dtype: str, places: Any, path: str) -> Any:
    engine, *_ = hadal.initialize(model=model_of(), config=config_of(stage, dtype, *places, path))
    return engine


def assert_alike(found: list[Tensor], wanted: list[Tensor]) -> None:
    for mine, theirs in zip(found, wanted, strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.fast_cells("3-bf16-before1-after1")
@pytest.mark.parametrize(
    ("stage", "dtype", "before", "after"),
    [
        (3, "bf16", DISK, DISK),
        (3, "bf16", DISK, DEVICE),
        (3, "bf16", DEVICE, DISK),
        (3, "fp32", DISK, ("cpu", "nvme")),
        (2, "fp16", ("nvme", None), ("nvme", None)),
        (2, "fp32", DEVICE, ("nvme", None)),
        (1, "bf16", ("nvme", None), ("cpu", None)),
    ],
)
@on_ranks(2)
def test_training_goes_on_bit_for_bit(
    stage: int, dtype: str, before: Any, after: Any, tmp_path: Path
) -> None:
    """Do two updates, a checkpoint and two more; repeat the last two in an engine that loads it."""
    with small_blocks():
        engine = engine_of(stage, dtype, before, tmp_path)
        train(engine, 2)
        engine.save_checkpoint(f"{tmp_path}/saved")
        train(engine, 2, 2)
        wanted = state_of(engine)
        engine.destroy()
        other = engine_of(stage, dtype, after, tmp_path)
        train(other, 1, 7)  # it has been elsewhere
        other.load_checkpoint(f"{tmp_path}/saved")
        train(other, 2, 2)
        assert_alike(state_of(other), wanted)
        other.destroy()


def save(path: str) -> list[Tensor]:
    with small_blocks():
        engine = engine_of(3, "bf16", DISK, path)
        train(engine, 2)
        engine.save_checkpoint(f"{path}/saved")
        state = state_of(engine)
        engine.destroy()
    return state


def load(path: str, stage: int, places: Any) -> list[Tensor]:
    with small_blocks():
        engine = engine_of(stage, "bf16", places, path)
        engine.load_checkpoint(f"{path}/saved")
        state = state_of(engine)
        engine.destroy()
    return state


def test_other_ranks_and_stages_load_the_checkpoint(ranks: RankPools, tmp_path: Path) -> None:
    path = str(tmp_path)
    wanted = ranks(2).run(save, path)[0]
    for world, stage, places in ((1, 2, ("nvme", None)), (2, 1, DEVICE), (1, 3, DISK)):
        assert_alike(ranks(world).run(load, path, stage, places)[0], wanted)


@on_ranks(2)
def test_edits_are_saved(tmp_path: Path) -> None:
    """The user's edits of full weights since the last update are saved too."""
    engine = engine_of(2, "bf16", ("nvme", None), tmp_path)
    train(engine, 1)
    weight = engine.module[0][0].weight
    with torch.no_grad():
        weight[0] = 2.0
    engine.save_checkpoint(f"{tmp_path}/edited")
    wanted = state_of(engine)
    engine.destroy()
    other = engine_of(2, "bf16", ("nvme", None), tmp_path)
    other.load_checkpoint(f"{tmp_path}/edited", load_optimizer_states=False)
    assert bool((other.module[0][0].weight[0] == 2.0).all())
    masters = len(list(other.module.parameters()))
    found = [hadal.utils.safe_get_full_fp32_param(p) for p in other.module.parameters()]
    assert_alike(found, wanted[:masters])
    train(other, 1)  # with new moments
    other.destroy()


def read_cuts(path: str) -> None:
    from hadal.offload import DiskStore

    with DiskStoreOf(DiskStore(path)) as store:
        values = torch.arange(10_001, dtype=torch.float32)
        run = DiskTensor(store, "numbers", values.numel(), values.dtype)
        assert bool((StoredSlice(run)[3:7].numel() == 4) and run.read().eq(0).all())
        run.write(values)
        for start, stop in ((0, 10_001), (5, 4097), (4096, 8192), (9000, 10_001), (7, 7)):
            for nbytes in (1, 40_000, 1 << 20):
                parts = [part.clone() for part in StoredSlice(run)[start:stop].parts(nbytes)]
                joined = torch.cat(parts) if parts else values[:0]
                assert torch.equal(joined, values[start:stop])


class DiskStoreOf:
    """A store that is closed at the end of the context."""

    def __init__(self, store: Any) -> None:
        self.store = store

    def __enter__(self) -> Any:
        return self.store

    def __exit__(self, *_: object) -> None:
        self.store.close()


def test_a_slice_is_read_from_any_start(tmp_path: Path) -> None:
    read_cuts(str(tmp_path))
