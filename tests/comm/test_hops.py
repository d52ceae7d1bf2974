"""Blocks of ranks, and gathers in two hops: first between the blocks, then inside each."""

from __future__ import annotations

import random
import time
from unittest.mock import patch

import pytest
import torch
from ranks import RankPools, on_ranks

from hadal.comm import Ranks
from hadal.comm.collectives import gather_codes, slice_of, start_all_gather, start_gather_in_hops
from hadal.comm.pending import Pending

BLOCK = 2


def blocks_of_blocks() -> tuple[tuple[int, ...], ...]:
    ranks = Ranks.world()
    half, across = ranks.in_blocks(BLOCK)
    one, row = half.in_blocks(1)
    assert (one.size, one.rank, row.numbers) == (1, 0, half.numbers)
    assert ranks.in_blocks(BLOCK)[0].group is half.group
    return half.numbers, across.numbers


def test_blocks_and_rows(ranks: RankPools) -> None:
    assert ranks(4).run(blocks_of_blocks) == [
        ((0, 1), (0, 2)),
        ((0, 1), (1, 3)),
        ((2, 3), (0, 2)),
        ((2, 3), (1, 3)),
    ]


def started(number: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, Pending]:
    """Buffers of gathers, their expected values, and the gathers, in hops or only inside."""
    world = Ranks.world()
    inside, across = world.in_blocks(BLOCK)
    is_wide = number % 3 != 0
    group = world if is_wide else inside
    expected = (torch.arange(8 * group.size) + 100 * number).to(dtype)
    if not is_wide:
        expected += across.rank
    full = torch.full_like(expected, -1)
    slice_of(full, group.rank, group).copy_(slice_of(expected, group.rank, group))
    if is_wide:
        return full, expected, start_gather_in_hops(full, across, inside, "a gather in hops")
    return full, expected, start_all_gather(full, inside, "a gather inside")


@on_ranks(4)
def test_gathers_may_be_waited_for_in_any_order() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        gathers = [started(number, dtype) for number in range(12)]
        random.Random(Ranks.world().rank).shuffle(gathers)
        for full, expected, pending in gathers:
            pending.wait()
            assert torch.equal(full, expected)


@on_ranks(4)
def test_a_second_hop_may_be_overtaken() -> None:
    rank = Ranks.world().rank
    if rank >= BLOCK:
        time.sleep(0.2)  # until then the first hop is under way
    wide = started(1, torch.float32)
    if rank == 1:
        time.sleep(0.5)  # until the second hop is under way
    near = started(0, torch.float32)
    for full, expected, pending in (near, wide):
        pending.wait()
        assert torch.equal(full, expected)


@on_ranks(4)
def test_collectives_do_the_same() -> None:
    with patch.object(Ranks, "exchanges_in_pairs", lambda *_: False):
        for number in range(4):
            full, expected, pending = started(number, torch.float32)
            pending.wait()
            assert torch.equal(full, expected)


@pytest.mark.parametrize("late", range(2))
@on_ranks(4)
def test_the_second_hop_starts_without_a_waiting_rank(late: int) -> None:
    """A rank that meets the others first, and waits then, holds up none of them."""
    full, expected, pending = started(1, torch.float32)
    ranks = Ranks.world()
    if ranks.rank != late:
        pending.wait()
    gather_codes(ranks.rank, ranks)
    pending.wait()
    assert torch.equal(full, expected)
