"""How fast a disk is read and written with given settings."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from itertools import cycle
from typing import NamedTuple

from torch import Tensor

from hadal.offload.buffers import aligned
from hadal.offload.extents import rounded
from hadal.offload.requests import Region, Request
from hadal.offload.store import DiskStore

_REQUEST_NBYTES = 1 << 26
_REQUESTS_UNDER_WAY = 2


class Speed(NamedTuple):
    """What was moved, and how long it took."""

    nbytes: int
    seconds: float

    @property
    def gb_per_s(self) -> float:
        """Gigabytes (10^9) in a second."""
        return self.nbytes / self.seconds / 1e9


class Track:
    """A region of a store that is written and read from end to end, over and over.

    As in training, a large request follows the one that is under way.
    """

    def __init__(self, store: DiskStore, nbytes: int) -> None:
        self._store = store
        self._region = store.allocate("a test of the disk's speed", rounded(nbytes))
        self._step = min(_REQUEST_NBYTES, self._region.nbytes)
        # Not zeros, which some disks do not write.
        self._buffers = [aligned(self._step).random_() for _ in range(_REQUESTS_UNDER_WAY)]
        for _ in self._moved(store.start_write, self._places()):
            pass

    def written(self, seconds: float) -> Speed:
        """Write for so long."""
        return self._timed(self._store.start_write, seconds)

    def read(self, seconds: float) -> Speed:
        """Read for so long."""
        return self._timed(self._store.start_read, seconds)

    def close(self) -> None:
        """Give its region back."""
        self._store.free(self._region)

    def _timed(self, start: Callable[[Region, int, Tensor], Request], seconds: float) -> Speed:
        begun = time.perf_counter()
        nbytes = 0
        for moved in self._moved(start, self._until(begun + seconds)):
            nbytes += moved
        return Speed(nbytes, time.perf_counter() - begun)

    def _places(self) -> Iterator[int]:
        return iter(range(0, self._region.nbytes, self._step))

    def _until(self, end: float) -> Iterator[int]:
        for place in cycle(self._places()):
            yield place
            if time.perf_counter() >= end:
                return

    def _moved(
        self, start: Callable[[Region, int, Tensor], Request], places: Iterable[int]
    ) -> Iterator[int]:
        """Move what is at the places, two at a time; the bytes of each as it is done."""
        under_way: deque[Request] = deque()
        for place, buffer in zip(places, cycle(self._buffers), strict=False):
            if len(under_way) == len(self._buffers):
                yield _waited(under_way)
            part = buffer[: self._region.nbytes - place]
            under_way.append(start(self._region, place, part))
        while under_way:
            yield _waited(under_way)


def _waited(under_way: deque[Request]) -> int:
    request = under_way.popleft()
    request.wait()
    return request.extent.nbytes
