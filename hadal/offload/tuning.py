"""Which settings suit a disk: a search over the keys of `aio`, key by key."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import NamedTuple

from hadal.offload.settings import IoSettings
from hadal.offload.speed import Speed, Track
from hadal.offload.store import DiskStore

_BLOCKS = (1 << 18, 1 << 20, 1 << 22)
_DEPTHS = (4, 8, 16, 32)
_THREADS = (2, 4)
# What is faster by less is taken for chance.
_MARGIN = 1.03


class Measured(NamedTuple):
    """How fast a disk is with given settings."""

    settings: IoSettings
    write: Speed
    read: Speed

    @property
    def seconds_per_gb(self) -> float:
        """To write and read a gigabyte, as a step does with its state."""
        return 1 / self.write.gb_per_s + 1 / self.read.gb_per_s


class Search:
    """Measures one setting after the other, and keeps the best.

    The defaults come first; then all block sizes and depths; then, with the best of them, each of
    the other keys.
    """

    count = 1 + len(_BLOCKS) * len(_DEPTHS) - 1 + len(_THREADS) + 2
    """How many settings are measured."""

    def __init__(self, measure: Callable[[IoSettings], Measured]) -> None:
        self._measure = measure
        self.best: Measured | None = None

    def run(self) -> Iterator[Measured]:
        """Each setting as it is measured."""
        default = IoSettings()
        yield self._next(default)
        for nbytes, depth in product(_BLOCKS, _DEPTHS):
            settings = replace(default, block_nbytes=nbytes, queue_depth=depth)
            if settings != default:
                yield self._next(settings)
        for threads in _THREADS:
            yield self._next(replace(self._base, threads=threads))
        yield self._next(replace(self._base, submits_singly=True))
        yield self._next(replace(self._base, overlaps=False))

    @property
    def _base(self) -> IoSettings:
        return IoSettings() if self.best is None else self.best.settings

    def _next(self, settings: IoSettings) -> Measured:
        found = self._measure(settings)
        if self.best is None or self.best.seconds_per_gb > found.seconds_per_gb * _MARGIN:
            self.best = found
        return found


class Clock:
    """Shares out a time evenly over what is left to do."""

    def __init__(self, seconds: float, turns: int) -> None:
        self._end = time.monotonic() + seconds
        self._turns = turns

    def turn(self) -> float:
        """Seconds for the next turn; at least a little."""
        share = (self._end - time.monotonic()) / max(1, self._turns)
        self._turns -= 1
        return max(share, 0.02)


def measurer(
    folder: Path, nbytes: int, seconds: float, turns: int
) -> Callable[[IoSettings], Measured]:
    """What measures a setting in so many turns, on a file of so many bytes in a folder.

    Raises:
        OffloadError: when it is called: there is no room, or the disk has a fault.
    """
    clock = Clock(seconds, turns)

    def measure(settings: IoSettings) -> Measured:
        own = Clock(clock.turn(), 2)
        store = DiskStore(folder, settings)
        try:
            track = Track(store, nbytes)
            return Measured(settings, track.written(own.turn()), track.read(own.turn()))
        finally:
            store.close()

    return measure
