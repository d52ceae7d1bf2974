"""Layers are cut into stages as DeepSpeed cuts them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, strategies as st

from hadal.errors import UsageError
from hadal.plugins.pipeline.partition import partition_balanced, partition_uniform

PARTITIONS = json.loads((Path(__file__).parents[1] / "data/pipeline.json").read_text())[
    "partitions"
]


@pytest.mark.parametrize("case", PARTITIONS["uniform"])
def test_equal_lengths(case: str) -> None:
    items, parts = map(int, case.split("/"))
    assert partition_uniform(items, parts) == PARTITIONS["uniform"][case]


@pytest.mark.parametrize("case", PARTITIONS["balanced"], ids=str)
def test_equal_weights(case: dict[str, Any]) -> None:
    assert partition_balanced(case["weights"], case["parts"]) == case["bounds"]


@given(st.lists(st.integers(0, 100), max_size=20), st.integers(1, 8))
def test_every_layer_is_in_one_stage(weights: list[int], parts: int) -> None:
    for bounds in (partition_balanced(weights, parts), partition_uniform(len(weights), parts)):
        assert len(bounds) == parts + 1
        assert bounds[0] == 0 and bounds[-1] == len(weights)
        assert bounds == sorted(bounds)
        assert len(set(bounds)) == min(parts, len(weights)) + 1  # none is empty without need


@pytest.mark.parametrize("parts", [0, -1])
def test_no_stages_are_refused(parts: int) -> None:
    with pytest.raises(UsageError, match="at least one stage"):
        partition_balanced([1, 2], parts)
