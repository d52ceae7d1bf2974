"""Groups of ranks around distributed experts."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from hypothesis import given, strategies as st
from ranks import RankPools

from hadal.comm import Ranks, init_distributed
from hadal.comm.ranks import (
    expert_group_names,
    expert_groups,
    expert_tables,
    make_expert_groups,
)
from hadal.errors import UsageError

TABLES = json.loads((Path(__file__).parents[1] / "data/experts.json").read_text())["tables"]


def peers(world: int, tensor: int, stages: int) -> list[list[int]]:
    """The ranks that hold the same dense parameters, by pipeline stage and tensor rank."""
    block = world // stages
    return [
        list(range(stage * block + place, (stage + 1) * block, tensor))
        for stage in range(stages)
        for place in range(tensor)
    ]


@pytest.mark.parametrize("case", TABLES)
def test_the_tables_are_deepspeed_s(case: str) -> None:
    form = r"world(\d+) ep(\d+) tp(\d+) pp(\d+) data_before=(True|False)"
    found = re.fullmatch(form, case)
    assert found
    world, size, tensor, stages = map(int, found.groups()[:4])
    made = [
        expert_tables(numbers, size, data_first=found[5] == "True")
        for numbers in peers(world, tensor, stages)
    ]
    tables = [[list(one) for of_part in made for one in of_part[kind]] for kind in (0, 1)]
    assert tables == TABLES[case]


@given(st.integers(1, 6), st.integers(1, 6), st.booleans())
def test_each_rank_is_in_one_group_of_each_kind(size: int, copies: int, data_first: bool) -> None:
    numbers = list(range(3, 3 + size * copies))
    parallel, data = expert_tables(numbers, size, data_first=data_first)
    assert {len(one) for one in parallel} == {size}
    assert {len(one) for one in data} == {copies}
    for table in (parallel, data):
        assert sorted(n for one in table for n in one) == numbers
    # Two ranks meet in one kind of group at most, so each copy is whole.
    assert all(len(set(one) & set(other)) == 1 for one in parallel for other in data)


def make(size: int, data_first: bool) -> tuple[str, tuple[int, ...], tuple[int, ...], bool]:
    world = Ranks.world()
    made = make_expert_groups(size, world, data_first=data_first)
    again = make_expert_groups(size, world, data_first=data_first)
    assert again == made == expert_groups(made.name)
    assert made.name in expert_group_names()
    return made.name, made.parallel.numbers, made.data.numbers, made.data is world


def test_groups_on_ranks_are_those_of_the_tables(ranks: RankPools) -> None:
    for size, data_first in ((2, False), (2, True), (4, False), (1, False), (1, True)):
        parallel, data = expert_tables(range(4), size, data_first=data_first)
        for rank, told in enumerate(ranks(4).run(make, size, data_first)):
            assert told[0] == f"ep_size_{size}"
            assert (told[1],) == tuple(one for one in parallel if rank in one)
            assert (told[2],) == tuple(one for one in data if rank in one)
            # Experts that every rank holds are averaged by the same group as dense parameters.
            assert told[3] == (size == 1)


def test_missing_and_uncreatable_files_are_named() -> None:
    init_distributed()
    with pytest.raises(UsageError, match=r"over 3 ranks.*divide the 1 ranks.*one of \[1\]"):
        make_expert_groups(3, Ranks.world())
    make_expert_groups(1, Ranks.world())
    with pytest.raises(UsageError, match=r"'ep_size_8' \(found: ep_size_1\)"):
        expert_groups("ep_size_8")
