"""Measurement of a disk's speed with different `aio` settings, and the search for the best."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from itertools import count, cycle, product
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from hadal.config.offload import Aio
from hadal.offload.buffers import aligned
from hadal.offload.direct import ALIGNMENT
from hadal.offload.requests import IoRequest, Region
from hadal.offload.store import DiskStore
from hadal.units import rounded_up

_REQUEST_NBYTES = 1 << 26
_REQUESTS_UNDER_WAY = 2

_BLOCKS = (1 << 18, 1 << 20, 1 << 22)
_DEPTHS = (4, 8, 16, 32)
_QUEUES = (2, 4)
# A smaller gain counts as noise.
_MARGIN = 1.03


class Speed(NamedTuple):
    """The number of bytes moved, and the time it took."""

    nbytes: int
    seconds: float

    @property
    def gb_per_s(self) -> float:
        """Gigabytes (10^9) per second."""
        return self.nbytes / self.seconds / 1e9


class SpeedTest:
    """A region of a store that is written and read from start to end, repeatedly.

    As in training, a large request is queued while another is under way.
    """

    def __init__(self, store: DiskStore, nbytes: int) -> None:
        self._store = store
        self._region = store.allocate("a test of the disk's speed", rounded_up(nbytes, ALIGNMENT))
        self._step = min(_REQUEST_NBYTES, self._region.nbytes)
        # Random data: some disks do not write zeros.
        self._buffers = [aligned(self._step).random_() for _ in range(_REQUESTS_UNDER_WAY)]
        self._move(store.start_write, 0.0, at_least=-(-self._region.nbytes // self._step))

    def written(self, seconds: float) -> Speed:
        """Write for this many seconds."""
        return self._move(self._store.start_write, seconds)

    def read(self, seconds: float) -> Speed:
        """Read for this many seconds."""
        return self._move(self._store.start_read, seconds)

    def _move(
        self, start: Callable[[Region, int, Tensor], IoRequest], seconds: float, at_least: int = 1
    ) -> Speed:
        """Move the region repeatedly until the time is over, with at least that many requests."""
        begun, nbytes = time.perf_counter(), 0
        under_way: deque[IoRequest] = deque()
        places = range(0, self._region.nbytes, self._step)
        for number, place, buffer in zip(count(), cycle(places), cycle(self._buffers)):
            is_over = number >= at_least and time.perf_counter() - begun >= seconds
            while len(under_way) == len(self._buffers) or (is_over and under_way):
                request = under_way.popleft()
                request.wait()
                nbytes += request.extent.nbytes
            if is_over:
                break
            under_way.append(start(self._region, place, buffer[: self._region.nbytes - place]))
        return Speed(nbytes, time.perf_counter() - begun)


class MeasuredSettings(NamedTuple):
    """A disk's speed with given settings."""

    settings: Aio
    write: Speed
    read: Speed

    @property
    def seconds_per_gb(self) -> float:
        """The time to write and read a gigabyte, as a step does with its state."""
        return 1 / self.write.gb_per_s + 1 / self.read.gb_per_s


def keys_of(settings: Aio) -> dict[str, Any]:
    """Return the keys of the section that affect speed."""
    return settings.model_dump(exclude={"verify_checksums", "use_gds"})


class Search:
    """A search that measures one setting after another and keeps the best.

    It starts with the defaults, continues with all block sizes and depths, and then varies each of
    the other keys of the best setting. At the end it measures the defaults and the best once more:
    the difference between two measurements of the same setting is noise.
    """

    count = len(_BLOCKS) * len(_DEPTHS) + len(_QUEUES) + 2
    """The number of settings measured."""
    turns = count + 2
    """The number of measurements."""

    def __init__(self, measure: Callable[[Aio], MeasuredSettings]) -> None:
        self._measure = measure
        self.best: MeasuredSettings | None = None
        self.noise = _MARGIN - 1
        """The relative difference between two measurements of a setting that counts as noise."""

    def run(self) -> Iterator[MeasuredSettings]:
        """Yield each setting as it is measured."""
        default = Aio()
        first = self._next(default)
        yield first
        for nbytes, depth in product(_BLOCKS, _DEPTHS):
            settings = default.model_copy(update={"block_size": nbytes, "queue_depth": depth})
            if settings != default:
                yield self._next(settings)
        others = [("intra_op_parallelism", queues) for queues in _QUEUES]
        assert self.best is not None  # the defaults are always measured
        for key, value in (*others, ("single_submit", True), ("overlap_events", False)):
            yield self._next(self.best.settings.model_copy(update={key: value}))
        for found in (first, self.best):
            times = (found.seconds_per_gb, self._measure(found.settings).seconds_per_gb)
            self.noise = max(self.noise, max(times) / min(times) - 1)
        if self.is_as_good(first):
            self.best = first  # nothing is gained by other settings than the defaults

    def is_as_good(self, found: MeasuredSettings) -> bool:
        """Return whether a setting is as fast as the best one within the noise."""
        assert self.best is not None
        return found.seconds_per_gb <= self.best.seconds_per_gb * (1 + self.noise)

    def _next(self, settings: Aio) -> MeasuredSettings:
        found = self._measure(settings)
        if self.best is None or self.best.seconds_per_gb > found.seconds_per_gb * _MARGIN:
            self.best = found
        return found


class TimeBudget:
    """A time budget, divided evenly over the remaining turns."""

    def __init__(self, seconds: float, turns: int) -> None:
        self._end = time.monotonic() + seconds
        self._turns = turns

    def turn(self) -> float:
        """Return the seconds for the next turn, with a small minimum."""
        share = (self._end - time.monotonic()) / max(1, self._turns)
        self._turns -= 1
        return max(share, 0.02)


def measurer(
    folder: Path, nbytes: int, seconds: float, turns: int
) -> Callable[[Aio], MeasuredSettings]:
    """Return a function that measures a setting on a file in `folder` within its part of the time.

    Raises:
        OffloadError: when the function is called: the disk is full or has a fault.
    """
    clock = TimeBudget(seconds, turns)

    def measure(settings: Aio) -> MeasuredSettings:
        own = TimeBudget(clock.turn(), 2)
        store = DiskStore(folder, settings)
        try:
            track = SpeedTest(store, nbytes)
            return MeasuredSettings(settings, track.written(own.turn()), track.read(own.turn()))
        finally:
            store.close()

    return measure
