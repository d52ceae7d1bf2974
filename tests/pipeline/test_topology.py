"""Ranks have DeepSpeed's coordinates."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hadal.errors import UsageError
from hadal.plugins.pipeline.topology import (
    PipeDataParallelTopology,
    PipeModelDataParallelTopology,
    ProcessTopology,
)

GIVEN = json.loads((Path(__file__).parents[1] / "data/pipeline.json").read_text())["topologies"]
BY_NAME = {
    "pipe2_data2": PipeDataParallelTopology(2, 2),
    "pipe2_data2_model2": PipeModelDataParallelTopology(2, 2, 2),
    "pipe4_data1_model2": PipeModelDataParallelTopology(4, 2, 1),
    "x2y3": ProcessTopology(["x", "y"], [2, 3]),
}


@pytest.mark.parametrize("name", GIVEN)
def test_places_and_lists(name: str) -> None:
    grid: Any = BY_NAME[name]
    given = GIVEN[name]
    ranks = range(given["world"])
    assert (grid.get_axis_names(), grid.dims) == (given["axes"], given["dims"])
    assert grid.world_size() == given["world"]
    assert [list(grid.get_coord(rank)) for rank in ranks] == given["coords"]
    assert [grid.get_rank(**grid.get_coord(rank)._asdict()) for rank in ranks] == list(ranks)
    for axis, size in zip(given["axes"], given["dims"], strict=True):
        assert grid.get_dim(axis) == size
        assert grid.get_axis_comm_lists(axis) == given["comm_lists"][axis]
        assert [grid.get_axis_list(axis, at) for at in range(size)] == given["axis_list"][axis]
    assert [grid.get_rank_repr(rank) for rank in ranks] == given["rank_repr"]
    assert [grid.get_rank_repr(rank, omit_axes=[]) for rank in ranks] == given["rank_repr_all"]
    assert [grid.get_dim("missing"), grid.get_axis_comm_lists("missing")] == given["missing_axis"]


def test_places_are_found_by_some_of_their_axes() -> None:
    grid, given = BY_NAME["pipe2_data2_model2"], GIVEN["pipe2_data2_model2"]
    assert grid.filter_match(pipe=0, data=1) == given["filter_pipe0_data1"]


def test_missing_items_are_an_error() -> None:
    grid = PipeDataParallelTopology(2, 3)
    with pytest.raises(ValueError, match=r"each of the axes \['pipe', 'data'\]"):
        grid.get_rank(pipe=0)
    with pytest.raises(ValueError, match="outside"):
        grid.get_rank(pipe=2, data=0)
    with pytest.raises(ValueError, match="rank 6 is not in a topology of 6 ranks"):
        grid.get_coord(6)
    with pytest.raises(UsageError, match="at least 1"):
        PipeDataParallelTopology(2, 0)
    with pytest.raises(UsageError, match="distinct names"):
        ProcessTopology(["x", "x"], [2, 2])
