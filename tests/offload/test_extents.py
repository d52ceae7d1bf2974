"""The arithmetic of a file: allocation, and division into blocks."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given, strategies as some

from hadal.offload.direct import ALIGNMENT, Extent, Room, cut, dealt, grouped
from hadal.units import rounded_up

places = some.integers(0, 1 << 20)


@given(places)
def test_whole_pages_hold_the_bytes(nbytes: int) -> None:
    assert rounded_up(nbytes, ALIGNMENT) % ALIGNMENT == 0
    assert 0 <= rounded_up(nbytes, ALIGNMENT) - nbytes < ALIGNMENT


@given(places, some.integers(0, 1 << 12), some.integers(1, 1 << 13))
def test_blocks_are_contiguous_on_one_grid(start: int, nbytes: int, step: int) -> None:
    blocks = cut(start, start + nbytes, step)
    assert sum(block.nbytes for block in blocks) == nbytes
    assert all(0 < block.nbytes <= step for block in blocks)
    if blocks:
        assert (blocks[0].start, blocks[-1].stop) == (start, start + nbytes)
    for before, after in pairwise(blocks):
        assert before.stop == after.start
        assert after.start % step == 0


@given(some.integers(0, 100), some.integers(1, 12), some.integers(1, 9))
def test_every_block_is_dealt_once_and_evenly(count: int, shares: int, most: int) -> None:
    blocks = [Extent(place, place + 1) for place in range(count)]
    deal = dealt(blocks, shares)
    assert [block for share in deal for block in share] == blocks
    assert max(map(len, deal)) - min(map(len, deal)) <= 1
    groups = grouped(blocks, most)
    assert [block for group in groups for block in group] == blocks
    assert all(len(group) == most for group in groups[:-1])


@given(some.lists(some.tuples(some.integers(0, 5 * ALIGNMENT), some.integers(0, 9)), max_size=60))
def test_extents_never_overlap_and_none_is_lost(steps: list[tuple[int, int]]) -> None:
    """Take so many bytes, then free the n-th taken extent, if there are as many."""
    room, taken = Room(), []
    for nbytes, victim in steps:
        extent = room.take(nbytes)
        assert extent.start % ALIGNMENT == 0
        assert extent.nbytes == rounded_up(nbytes, ALIGNMENT)
        assert extent.stop <= room.end
        taken.append(extent)
        used = sorted(one for one in taken if one.nbytes)
        assert all(before.stop <= after.start for before, after in pairwise(used))
        if victim < len(taken):
            room.give_back(taken.pop(victim))
            assert room.end == max((one.stop for one in taken if one.nbytes), default=0)
    for extent in taken:
        room.give_back(extent)
    assert room.end == 0


def test_freed_extents_are_reused() -> None:
    room = Room()
    first, second, third = (room.take(nbytes) for nbytes in (3 * ALIGNMENT, 1, ALIGNMENT))
    room.give_back(first)
    assert room.take(2 * ALIGNMENT) == Extent(0, 2 * ALIGNMENT)
    assert room.take(ALIGNMENT) == Extent(2 * ALIGNMENT, 3 * ALIGNMENT)
    room.give_back(second)
    room.give_back(third)
    assert room.end == 3 * ALIGNMENT
