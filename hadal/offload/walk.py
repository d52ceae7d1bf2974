"""A walk over what rests on the disk: a part is read, worked on in memory, and written."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor

from hadal.errors import OffloadError
from hadal.offload.buffers import BufferPool
from hadal.offload.requests import Request
from hadal.offload.runs import DiskRun


class Stop(NamedTuple):
    """One part of the way: the same elements of several runs."""

    runs: tuple[DiskRun, ...]
    start: int
    numel: int


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

    pool: BufferPool
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
    stops: Sequence[Stop], pool: BufferPool, pace: Pace
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
                here.requests.append(run.start_write(stop.start, values))
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


def _fetch(stop: Stop, pool: BufferPool) -> _Load:
    load = _Load(pool)
    try:
        for run in stop.runs:
            buffer = pool.take()
            load.buffers.append(buffer)
            values = buffer[: stop.numel * run.dtype.itemsize].view(run.dtype)
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
