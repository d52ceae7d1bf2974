"""A walk over tensors on a disk: each part is read, processed in memory and written."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

from torch import Tensor

from hadal.errors import OffloadError
from hadal.offload.buffers import BufferPool, LooseBuffers
from hadal.offload.requests import IoRequest
from hadal.offload.tensors import DiskTensor

Buffers: TypeAlias = BufferPool | LooseBuffers


class Stop(NamedTuple):
    """One part of a walk: the same elements of several tensors, some of which may end earlier."""

    tensors: tuple[DiskTensor, ...]
    start: int
    numel: int
    written: tuple[DiskTensor, ...]
    """The tensors that are written afterwards. The others are read as last written, committed or
    not."""


@dataclass(frozen=True, slots=True)
class DiskOverlap:
    """The disk's work while a part is processed."""

    reads_ahead: bool = True
    """True if the next part is read meanwhile."""
    writes_behind: bool = True
    """True if the last part is written meanwhile."""

    @property
    def parts(self) -> int:
        """The number of parts in memory at a time."""
        return 1 + self.reads_ahead + self.writes_behind


@dataclass(slots=True)
class _Load:
    """The buffers of one part, and the requests that use them."""

    pool: Buffers
    buffers: list[Tensor] = field(default_factory=list)
    values: list[Tensor] = field(default_factory=list)
    requests: list[IoRequest] = field(default_factory=list)

    def wait(self) -> None:
        """Wait for all requests."""
        requests, self.requests = self.requests, []
        while requests:
            try:
                requests.pop().wait()
            except OffloadError:
                # The buffers will be reused, so no request may be using them.
                for rest in requests:
                    with suppress(OffloadError):
                        rest.wait()
                raise

    def release(self) -> None:
        """Return the buffers to the pool."""
        for buffer in self.buffers:
            self.pool.give_back(buffer)
        self.buffers.clear()


def walk(
    stops: Sequence[Stop], pool: Buffers, overlap: DiskOverlap
) -> Iterator[tuple[Stop, Sequence[Tensor]]]:
    """Yield each stop with its values (1-D, one per tensor), and write them afterwards.

    The pool must have a buffer for each tensor of all stops in memory at a time. Writes take effect
    when the tensors are committed.

    Raises:
        OffloadError: the disk failed; no request is under way any more.
    """
    here: _Load | None = None
    ahead: _Load | None = None
    behind: _Load | None = None
    try:
        for number, stop in enumerate(stops):
            here, ahead = ahead or _fetch(stop, pool), None
            here.wait()
            if overlap.reads_ahead and number + 1 < len(stops):
                ahead = _fetch(stops[number + 1], pool)
            yield stop, here.values
            if behind is not None:
                behind.wait()
                behind.release()
            for tensor, values in zip(stop.tensors, here.values, strict=True):
                if tensor in stop.written:
                    here.requests.append(tensor.start_write(stop.start, values))
            behind, here = here, None
            if not overlap.writes_behind:
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
        for tensor in stop.tensors:
            nbytes = min(stop.numel, tensor.numel - stop.start) * tensor.dtype.itemsize
            buffer = pool.take(nbytes)
            load.buffers.append(buffer)
            values = buffer[:nbytes].view(tensor.dtype)
            load.values.append(values)
            request = tensor.start_read(stop.start, values, latest=tensor not in stop.written)
            if request is not None:
                load.requests.append(request)
    except BaseException:
        with suppress(OffloadError):
            load.wait()
        load.release()
        raise
    return load
