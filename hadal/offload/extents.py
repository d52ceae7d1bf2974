"""Where things lie in a file, and in which portions they travel: pure arithmetic on bytes."""

from __future__ import annotations

from bisect import bisect_left, insort
from itertools import pairwise
from typing import NamedTuple

ALIGNMENT = 4096
"""Offsets, lengths and addresses of what goes past the system's cache are multiples of this."""


class Extent(NamedTuple):
    """Bytes [start, stop)."""

    start: int
    stop: int

    @property
    def nbytes(self) -> int:
        """How many they are."""
        return self.stop - self.start


def rounded(nbytes: int, step: int = ALIGNMENT) -> int:
    """The least multiple of `step` that holds so many bytes."""
    return -(-nbytes // step) * step


def cut(start: int, stop: int, step: int) -> list[Extent]:
    """Cut [start, stop) at the multiples of `step`."""
    borders = [start, *range((start // step + 1) * step, stop, step), stop]
    return [Extent(*pair) for pair in pairwise(borders) if pair[0] < pair[1]]


def grouped(blocks: list[Extent], most: int) -> list[list[Extent]]:
    """Consecutive blocks, at most so many together."""
    return [blocks[first : first + most] for first in range(0, len(blocks), most)]


def dealt(blocks: list[Extent], shares: int) -> list[list[Extent]]:
    """Consecutive blocks for each share, about as many each; the first ones have more."""
    count, more = divmod(len(blocks), shares)
    stops = [share * count + min(share, more) for share in range(shares + 1)]
    return [blocks[first:stop] for first, stop in pairwise(stops)]


class Room:
    """Which bytes of a file are taken; the file grows where none that are free suffice."""

    def __init__(self) -> None:
        self.end = 0
        """Where the last taken extent ends."""
        # In order, none beside another, none at the end.
        self._free: list[Extent] = []

    def take(self, nbytes: int) -> Extent:
        """Take whole pages for so many bytes: of the free extents the smallest that suffices."""
        wanted = rounded(nbytes)
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
        """Free what was taken; the end moves down where nothing is taken before it."""
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
