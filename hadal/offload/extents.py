"""Allocation of a file's bytes and division of transfers into blocks: pure arithmetic."""

from __future__ import annotations

from bisect import bisect_left, insort
from itertools import pairwise
from typing import NamedTuple

from hadal.units import rounded_up

ALIGNMENT = 4096
"""Direct I/O requires offsets, lengths and addresses that are multiples of this."""


class Extent(NamedTuple):
    """Bytes [start, stop)."""

    start: int
    stop: int

    @property
    def nbytes(self) -> int:
        """The number of bytes."""
        return self.stop - self.start


def cut(start: int, stop: int, step: int) -> list[Extent]:
    """Split [start, stop) at multiples of `step`."""
    borders = [start, *range((start // step + 1) * step, stop, step), stop]
    return [Extent(*pair) for pair in pairwise(borders) if pair[0] < pair[1]]


def grouped(blocks: list[Extent], most: int) -> list[list[Extent]]:
    """Group consecutive blocks, with at most `most` in each group."""
    return [blocks[first : first + most] for first in range(0, len(blocks), most)]


def dealt(blocks: list[Extent], shares: int) -> list[list[Extent]]:
    """Divide consecutive blocks evenly over shares; the first ones get the remainder."""
    count, more = divmod(len(blocks), shares)
    stops = [share * count + min(share, more) for share in range(shares + 1)]
    return [blocks[first:stop] for first, stop in pairwise(stops)]


class Room:
    """An allocator of a file's bytes; the file grows if no free extent suffices."""

    def __init__(self) -> None:
        self.end = 0
        """The end of the last taken extent."""
        # In order, never adjacent, never at the end.
        self._free: list[Extent] = []

    def take(self, nbytes: int) -> Extent:
        """Take whole pages for `nbytes` bytes: the smallest free extent that suffices."""
        wanted = rounded_up(nbytes, ALIGNMENT)
        fitting = [free for free in self._free if free.nbytes >= wanted]
        if not wanted or not fitting:
            self.end += wanted
            return Extent(self.end - wanted, self.end)
        free = min(fitting, key=lambda extent: extent.nbytes)
        self._free.remove(free)
        taken = Extent(free.start, free.start + wanted)
        if taken.stop < free.stop:
            insort(self._free, Extent(taken.stop, free.stop))
        return taken

    def give_back(self, extent: Extent) -> None:
        """Free an extent; the end moves down if nothing below it is taken."""
        if not extent.nbytes:
            return
        place = bisect_left(self._free, extent)
        start, stop = extent
        if place < len(self._free) and self._free[place].start == stop:
            stop = self._free.pop(place).stop
        if place and self._free[place - 1].stop == start:
            start = self._free.pop(place - 1).start
        if stop == self.end:
            self.end = start
        else:
            insort(self._free, Extent(start, stop))
