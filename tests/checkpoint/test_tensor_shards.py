"""Shards say which parts of the whole tensors they are, and load again where they came from."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st
from ranks import RankPools, on_ranks
from torch import Tensor

from checkpoint.test_dcp import engine_of, train
from hadal import comm
from hadal.checkpoint import consolidated
from hadal.checkpoint.consolidated import FIELDS, cut_out
from hadal.errors import CheckpointError
from hadal.utils import safe_get_full_fp32_param

HAS_PROTOCOL = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 14)


def joined(shards: list[Tensor]) -> Tensor:
    """Put shards together as their attributes say; elements that none has are NaN."""
    whole = torch.full(shards[0].global_shape, torch.nan)
    for shard in shards:
        offsets, local, sizes = (getattr(shard, field) for field in FIELDS[1:])
        for to, of, size in zip(offsets, local, sizes, strict=True):
            there = tuple(slice(o, o + n) for o, n in zip(to, size, strict=True))
            here = tuple(slice(o, o + n) for o, n in zip(of, size, strict=True))
            assert whole[there].isnan().all(), "two shards have the same elements"
            whole[there] = shard[here].float()
    return whole


@given(st.lists(st.integers(1, 5), max_size=4), st.lists(st.integers(0, 625), max_size=4))
def test_slices_put_together_are_the_whole(shape: list[int], cuts: list[int]) -> None:
    whole = torch.arange(torch.Size(shape).numel(), dtype=torch.float32)
    bounds = sorted({0, whole.numel(), *(cut for cut in cuts if cut < whole.numel())})
    shards = [cut_out("w", tuple(shape), low, whole[low:high]) for low, high in pairwise(bounds)]
    assert torch.equal(joined(shards), whole.view(shape))


def test_a_slice_of_nothing_has_no_boxes() -> None:
    empty = cut_out("w", (4, 3), 0, torch.ones(0))
    assert (empty.shape, empty.global_shape, empty.global_offsets) == ((0, 3), (4, 3), ())


def sharded(engine: Any) -> dict[str, Tensor]:
    """Return the shards with any torch: the attributes do not depend on it."""
    since, consolidated._SINCE = consolidated._SINCE, (2, 0)
    try:
        return engine.sharded_state_dict()
    finally:
        consolidated._SINCE = since


def masters_of(engine: Any) -> dict[str, Tensor]:
    trained = [(n, p) for n, p in engine.module.named_parameters() if p.requires_grad]
    return {name: safe_get_full_fp32_param(p).clone() for name, p in trained}


@pytest.mark.slow_cells("2-fp16")
@pytest.mark.parametrize(("stage", "dtype"), [(0, "fp32"), (1, "bf16"), (2, "fp16"), (3, "bf16")])
@on_ranks(2)
def test_shards_load_where_they_came_from(stage: int, dtype: str) -> None:
    engine = engine_of(stage, dtype)
    train(engine, range(2))
    shards, expected, whole = sharded(engine), masters_of(engine), engine.state_dict()
    ranks: list[Any] = [None] * comm.get_world_size()
    parts = {name: (value, vars(value)) for name, value in shards.items()}
    comm.all_gather_object(ranks, parts)
    for name, value in expected.items():
        pieces = []
        for found in ranks if stage else ranks[:1]:
            piece, attributes = found[name]
            vars(piece).update(attributes)
            pieces.append(piece)
        assert torch.equal(joined(pieces), value), name
    held = sum(value.numel() for name, value in shards.items() if name in expected)
    total = sum(value.numel() for value in expected.values())
    if stage:
        rows = max(value.shape[-1] for value in expected.values())
        assert held <= total / len(ranks) + 2 * rows * len(shards), "more than its part"
    train(engine, range(2, 3))
    engine.load_sharded_state_dict(shards)
    again = engine.state_dict()
    assert all(torch.equal(again[name], value) for name, value in whole.items())
    assert all(torch.equal(masters_of(engine)[name], one) for name, one in expected.items())
    foreign = dict(shards)
    name = next(iter(expected))
    foreign[name] = cut_out(name, tuple(expected[name].shape), 0, torch.ones(0))
    with pytest.raises(CheckpointError, match=f"shard of {name} does not hold its elements"):
        engine.load_sharded_state_dict(foreign)
    del foreign[name]
    with pytest.raises(CheckpointError, match=f"lacks {name}"):
        engine.load_sharded_state_dict(foreign)
    engine.destroy()


@on_ranks(1)
def test_an_older_torch_is_an_error() -> None:
    engine = engine_of(3, "fp32")
    consolidated._SINCE = (99, 0)
    try:
        with pytest.raises(CheckpointError, match=r"torch .* from 99\.0 on; use .*--format dcp"):
            engine.sharded_state_dict()
    finally:
        consolidated._SINCE = (2, 14)
        engine.destroy()


def save_by_torch(folder: str, stage: int) -> dict[str, Tensor]:
    import torch.distributed.checkpoint as dcp

    engine = engine_of(stage, "bf16")
    train(engine, range(2))
    dcp.save({"model": engine.sharded_state_dict()}, checkpoint_id=folder)
    found = masters_of(engine)
    engine.destroy()
    return found


def load_by_both(folder: str, stage: int, expected: dict[str, Tensor]) -> None:
    import torch.distributed.checkpoint as dcp

    engine = engine_of(stage, "bf16")
    state = {"model": engine.sharded_state_dict()}
    dcp.load(state, checkpoint_id=folder)
    engine.load_sharded_state_dict(state["model"])
    assert all(torch.equal(masters_of(engine)[name], one) for name, one in expected.items())
    train(engine, range(1))
    engine.load_checkpoint(folder, load_module_only=True)
    assert all(torch.equal(masters_of(engine)[name], one) for name, one in expected.items())
    engine.destroy()
    plain = {"model": {name: torch.empty_like(value) for name, value in expected.items()}}
    dcp.load(plain, checkpoint_id=folder)
    assert all(torch.equal(plain["model"][name], one) for name, one in expected.items())


@pytest.mark.skipif(not HAS_PROTOCOL, reason="torch has CheckpointableTensor from 2.14 on")
@pytest.mark.parametrize("stage", [1, 3])
def test_torch_saves_and_loads_them(stage: int, ranks: RankPools, tmp_path: Path) -> None:
    folder = str(tmp_path / "saved")
    expected = ranks(2).run(save_by_torch, folder, stage)[0]
    ranks(3).run(load_by_both, folder, 4 - stage, expected)
