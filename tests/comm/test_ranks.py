"""A group of ranks as one value."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
import torch.distributed as dist
from ranks import RankPools

from hadal import comm
from hadal.comm import Ranks


def describe() -> tuple[int, int, tuple[int, ...], int]:
    ranks = Ranks.world()
    assert comm.is_initialized()
    assert (comm.get_rank(), comm.get_world_size()) == (ranks.rank, ranks.size)
    assert ranks.exchanges_in_pairs(torch.device("cpu"))
    assert not ranks.exchanges_in_pairs(torch.device("cuda"))
    return ranks.rank, ranks.size, ranks.others, comm.get_local_rank()


def test_each_rank_calls_on_the_others_in_its_own_order(ranks: RankPools) -> None:
    assert ranks(3).run(describe) == [(0, 3, (1, 2), 0), (1, 3, (2, 0), 1), (2, 3, (0, 1), 2)]
    assert ranks(1).run(describe) == [(0, 1, (), 0)]


def use_and_end() -> list[bool]:
    """True if the groups are gone after they were used and destroyed."""
    group = dist.new_group([0, 1])
    assert isinstance(group, dist.ProcessGroup)
    block, row = (one.group for one in Ranks.of(group).in_blocks(2))
    seen = [weakref.ref(one) for one in (group, block, row)]
    for one in (block, row, group):
        dist.destroy_process_group(one)
    del one, block, row, group
    gc.collect()
    return [ref() is None for ref in seen]


def test_a_group_that_was_destroyed_is_gone(ranks: RankPools) -> None:
    for gone in ranks(2).run(use_and_end):
        assert all(gone)


def make_apart_again() -> list[str]:
    """The names of groups of all ranks, each created after the previous one was destroyed."""
    names = []
    for _ in range(3):
        group = Ranks.world().apart().group
        names.append(group.group_name)
        dist.destroy_process_group(group)
    return names


def test_no_group_finds_where_the_ranks_of_another_were(ranks: RankPools) -> None:
    first, second = ranks(2).run(make_apart_again)
    assert first == second
    assert len(set(first)) == 3


def make_more_on_the_ends() -> list[int]:
    """Groups of some ranks, while the first and the last rank are in one more than the others."""
    world, found = Ranks.world(), []
    for _ in range(2):
        if world.rank in (0, 3):
            world.some([0, 3])
        for size in (2, 1):
            start = world.rank // size * size
            found.append(world.some(range(start, start + size)).size)
    return found


def test_some_ranks_may_be_in_more_groups_than_others(ranks: RankPools) -> None:
    assert ranks(4).run(make_more_on_the_ends, timeout=60) == [[2, 1, 2, 1]] * 4


def test_without_a_process_group_there_is_no_world() -> None:
    assert not comm.is_initialized()
    assert (comm.get_rank(), comm.get_world_size()) == (0, 1)
    with pytest.raises(RuntimeError, match="init_distributed"):
        Ranks.world()
