"""The ranks' slices in the index: even ones are merged, for any number of ranks."""

from __future__ import annotations

import json
import pickle

import torch
from hypothesis import given, strategies as st

from hadal.checkpoint.collecting import Rows
from hadal.checkpoint.contents import ModelPart, SavedSlice, part_as_json, part_of_json


def part_with(ranks: int, slices: list[SavedSlice]) -> ModelPart:
    return ModelPart(tuple(range(ranks)), (), tuple(slices), (), {}, (), {})


def read_again(part: ModelPart) -> tuple[SavedSlice, ...]:
    return part_of_json(json.loads(json.dumps(part_as_json(part)))).slices


@given(st.lists(st.tuples(st.integers(0, 3), st.booleans()), min_size=1, max_size=8), st.data())
def test_every_slice_comes_back(cuts: list[tuple[int, bool]], data: st.DataObject) -> None:
    """Uneven slices, and ranks without one."""
    slices, start = [], 0
    for rank, (numel, has_gap) in enumerate(cuts):
        start += has_gap
        if numel:
            rounds = torch.float32 if data.draw(st.booleans()) else None
            slices.append(SavedSlice(rank, "weight", 2, start, numel, torch.bfloat16, rounds))
        start += numel
    joined = read_again(part_with(len(cuts), slices))
    single = [each for one in joined for each in one.between(0, start)]
    assert sorted(single, key=lambda one: one.rank) == slices
    low = data.draw(st.integers(0, start))
    high = data.draw(st.integers(low, start))
    found = {each for one in joined for each in one.between(low, high)}
    assert found == {one for one in slices if max(one.start, low) < min(one.stop, high)}


def test_the_index_does_not_grow_with_the_ranks() -> None:
    kinds = ("weight", "master", "state.exp_avg", "state.exp_avg_sq")
    lengths = []
    for ranks in (4, 1000):
        slices = [
            SavedSlice(rank, kind, bucket, rank * 64, 64, torch.float32)
            for rank in range(ranks)
            for kind in kinds
            for bucket in range(5)
        ]
        part = part_with(ranks, slices)
        lengths.append(len(json.dumps(part_as_json(part)["stretches"])))
        assert len(read_again(part)) == 5 * len(kinds)
    assert lengths[1] < lengths[0] + 5 * len(kinds) * 3 + 1


def test_rows_are_pickled_compactly() -> None:
    """The pickled size of each rank's rows."""
    state = [(f"layers.{number}.weight", {"step": {"tensor": 3.0}}) for number in range(400)]
    slices = [
        SavedSlice(
            7, kind, bucket, 448, 64, torch.bfloat16, torch.float32 if kind == "weight" else None
        )
        for kind in ("weight", "master", "state.exp_avg", "state.exp_avg_sq")
        for bucket in range(200)
    ]
    rows = Rows(slices, [], state)
    told = pickle.dumps(rows)
    assert len(told) < 40 * (len(slices) + len(state))
    assert pickle.loads(told) == rows
