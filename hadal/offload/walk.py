"""A walk over what rests on the disk: a part is read, worked on in memory, and written."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from hadal.errors import OffloadError
from hadal.offload.requests import Request


class Walked(Protocol):
    """Values that are read a stretch at a time, and may be written."""

    @property
    def numel(self) -> int:
        """How many there are."""

    @property
    def dtype(self) -> torch.dtype:
        """Their dtype."""

    def start_read(self, start: int, out: Tensor) -> Request | None:
        """Begin to fill `out` with those from `start` on; None: it is done."""

    def start_write(self, start: int, values: Tensor) -> Request | None:
        """Begin to write those from `start` on; None: there is nothing to wait for."""


class Buffers(Protocol):
    """Where values are read into."""

    def take_for(self, nbytes: int) -> Tensor:
        """Aligned memory of so many bytes, or more."""

    def give_back(self, buffer: Tensor) -> None:
        """Let others have it."""


class Stop(NamedTuple):
    """One part of the way: the same elements of several runs, those that there are of each."""

    runs: tuple[Walked, ...]
    start: int
    numel: int

    def numel_of(self, run: Walked) -> int:
        """How many of them a run has."""
        return min(self.numel, run.numel - self.start)


@dataclass(frozen=True, slots=True)
class Pace:
    """What goes on while a part is worked on."""

    reads_ahead: bool = True
    """Whether the next part is read meanwhile."""
    writes_behind: bool = True
    """Whether the last part is still written meanwhile."""

    @property
    def parts(self) -> int:
        """How many parts are in memory at a time."""
        return 1 + self.reads_ahead + self.writes_behind


@dataclass(slots=True)
class _Load:
    """The buffers of one part, and what is under way with them."""

    pool: Buffers
    buffers: list[Tensor] = field(default_factory=list)
    values: list[Tensor] = field(default_factory=list)
    requests: list[Request] = field(default_factory=list)

    def wait(self) -> None:
        """Wait for all requests."""
        requests, self.requests = self.requests, []
        while requests:
            try:
                requests.pop().wait()
            except OffloadError:
                # Buffers are given to others: nothing may be under way with them any more.
                for rest in requests:
                    with suppress(OffloadError):
                        rest.wait()
                raise

    def release(self) -> None:
        """Let others have the buffers."""
        for buffer in self.buffers:
            self.pool.give_back(buffer)
        self.buffers.clear()


def walk(
    stops: Sequence[Stop], pool: Buffers, pace: Pace
) -> Iterator[tuple[Stop, Sequence[Tensor]]]:
    """Each stop with its values (one 1-D tensor for each run), which are written when it is left.

    The pool must have a buffer for each run of the stops that are in memory at a time. What is
    written counts when the runs are committed.

    Raises:
        OffloadError: the disk failed; whatever was under way is over.
    """
    here: _Load | None = None
    ahead: _Load | None = None
    behind: _Load | None = None
    try:
        for number, stop in enumerate(stops):
            here, ahead = ahead or _fetch(stop, pool), None
            here.wait()
            if pace.reads_ahead and number + 1 < len(stops):
                ahead = _fetch(stops[number + 1], pool)
            yield stop, here.values
            if behind is not None:
                behind.wait()
                behind.release()
            for run, values in zip(stop.runs, here.values, strict=True):
                request = run.start_write(stop.start, values)
                if request is not None:
                    here.requests.append(request)
            behind, here = here, None
            if not pace.writes_behind:
                behind.wait()
                behind.release()
                behind = None
        if behind is not None:
            behind.wait()
    finally:
        for load in (here, ahead, behind):
            if load is not None:
                with suppress(OffloadError):
                    load.wait()
                load.release()


def _fetch(stop: Stop, pool: Buffers) -> _Load:
    load = _Load(pool)
    try:
        for run in stop.runs:
            nbytes = stop.numel_of(run) * run.dtype.itemsize
            buffer = pool.take_for(nbytes)
            load.buffers.append(buffer)
            values = buffer[:nbytes].view(run.dtype)
            load.values.append(values)
            request = run.start_read(stop.start, values)
            if request is not None:
                load.requests.append(request)
    except BaseException:
        with suppress(OffloadError):
            load.wait()
        load.release()
        raise
    return load
