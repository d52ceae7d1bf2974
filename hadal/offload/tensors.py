"""1-D tensors on a disk in two generations: the last committed one and the next."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol, TypeAlias

import torch
from torch import Tensor

from hadal.errors import OffloadError
from hadal.offload.buffers import BufferPool, LooseBuffers, aligned
from hadal.offload.requests import IoRequest
from hadal.offload.store import DiskStore

# Reads and writes of a part begin at a multiple of this many elements, for any dtype: direct
# transfers begin at multiples of 4096 bytes.
UNIT_NUMEL = 4096
_PART_NUMEL = 1 << 24


class DiskTensor:
    """A 1-D tensor in a store.

    Writes take effect at `commit`, and `rollback` drops them, so a failed update changes nothing;
    the cost is twice the disk space. Until the first commit all elements are `fill`, and the disk
    is not read.
    """

    def __init__(
        self, store: DiskStore, name: str, numel: int, dtype: torch.dtype, fill: float = 0.0
    ) -> None:
        self.name = name
        self.numel = numel
        self.dtype = dtype
        self._fill = fill
        self._store = store
        nbytes = numel * dtype.itemsize
        self._regions = [store.allocate(name, nbytes)]
        try:
            self._regions.append(store.allocate(name, nbytes))
        except OffloadError:
            self.free()
            raise
        self._committed: int | None = None
        self._is_dirty = False

    @classmethod
    def of(cls, store: DiskStore, name: str, values: Tensor) -> DiskTensor:
        """Store `values`, from any memory, and commit them."""
        made = cls(store, name, values.numel(), values.dtype)
        made.write(values)
        return made

    @property
    def is_blank(self) -> bool:
        """True if nothing has been committed yet."""
        return self._committed is None

    @property
    def _next(self) -> int:
        return 0 if self._committed is None else 1 - self._committed

    def start_read(self, start: int, out: Tensor, *, latest: bool = False) -> IoRequest | None:
        """Start filling `out` (1-D, aligned memory) with the elements from `start` on.

        The elements are the committed ones, or with `latest` those written since, if any. Returns
        None if `out` is already filled.
        """
        generation = self._next if latest and self._is_dirty else self._committed
        if generation is None or not out.numel():
            out.fill_(self._fill)
            return None
        offset = start * self.dtype.itemsize
        return self._store.start_read(self._regions[generation], offset, out.view(torch.uint8))

    def start_write(self, start: int, values: Tensor) -> IoRequest:
        """Start writing `values` (1-D, aligned memory), which must not change until it is done."""
        self._is_dirty = True
        region = self._regions[self._next]
        return self._store.start_write(
            region, start * self.dtype.itemsize, values.view(torch.uint8)
        )

    def commit(self) -> None:
        """Make the writes take effect; do nothing without writes."""
        if self._is_dirty:
            self._committed, self._is_dirty = self._next, False

    def rollback(self) -> None:
        """Drop the writes since the last commit."""
        self._is_dirty = False

    def read(self) -> Tensor:
        """Return a copy of all elements as last written, in host memory."""
        out = self._memory()
        request = self.start_read(0, out, latest=True)
        if request is not None:
            request.wait()
        return out

    def write(self, values: Tensor) -> None:
        """Write all elements, from any memory, and commit them."""
        self.write_next(values)
        self.commit()

    def write_next(self, values: Tensor) -> None:
        """Write all elements, from any memory."""
        if values.device.type != "cpu" or values.data_ptr() % UNIT_NUMEL:
            values = self._memory().copy_(values)
        if self.numel:
            self.start_write(0, values).wait()
        self._is_dirty = True

    def _memory(self) -> Tensor:
        return aligned(max(self.numel, 1) * self.dtype.itemsize).view(self.dtype)[: self.numel]

    def lay_out(self) -> None:
        """Write and commit the initial values if nothing has been committed."""
        if self.is_blank and self.numel:
            part = aligned(min(self.numel, _PART_NUMEL) * self.dtype.itemsize).view(self.dtype)
            part.fill_(self._fill)
            for start in range(0, self.numel, _PART_NUMEL):
                self.start_write(start, part[: self.numel - start]).wait()
            self.commit()

    def free(self) -> None:
        """Free its space on the disk."""
        for region in self._regions:
            self._store.free(region)


class Readable(Protocol):
    """A 1-D tensor, on a disk or encoded, that can be read in parts."""

    numel: int
    dtype: torch.dtype

    def start_read(self, start: int, out: Tensor, /) -> IoRequest | None:
        """Start filling `out` with the elements from `start` on; None: it is already filled."""


class StoredSlice:
    """A slice, with dtype and shape, of a tensor that is not in memory; it is read in parts."""

    def __init__(self, source: Readable, start: int = 0, stop: int | None = None) -> None:
        self._source = source
        self._start = start
        self._stop = source.numel if stop is None else stop

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the elements."""
        return self._source.dtype

    @property
    def shape(self) -> tuple[int]:
        """The shape as a tensor."""
        return (self.numel(),)

    def numel(self) -> int:
        """Return the number of elements."""
        return self._stop - self._start

    def element_size(self) -> int:
        """Return the bytes of one element."""
        return self._source.dtype.itemsize

    def __getitem__(self, place: slice) -> StoredSlice:
        start, stop, _ = place.indices(self.numel())
        return StoredSlice(self._source, self._start + start, self._start + max(start, stop))

    def parts(self, nbytes: int) -> Iterator[Tensor]:
        """Yield all elements in order, in parts of about `nbytes`; each is valid until the next.

        Raises:
            OffloadError: they cannot be read.
        """
        step = max(1, nbytes // self.element_size() // UNIT_NUMEL) * UNIT_NUMEL
        memory = aligned(step * self.element_size()).view(self.dtype)
        at = self._start
        while at < self._stop:
            # Reads are page-aligned.
            first = at // UNIT_NUMEL * UNIT_NUMEL
            out = memory[: min(step, self._source.numel - first)]
            request = self._source.start_read(first, out)
            if request is not None:
                request.wait()
            stop = min(self._stop, first + out.numel())
            yield out[at - first : stop - first]
            at = stop


@contextmanager
def one_update(tensors: Callable[[], Iterable[DiskTensor]]) -> Iterator[None]:
    """Commit all these tensors at the end of the context, or roll them all back if it raises.

    `tensors` is called at the end, because an update may add some.
    """
    try:
        yield
    except BaseException:
        for tensor in tensors():
            tensor.rollback()
        raise
    for tensor in tensors():
        tensor.commit()


# ---- a walk --------------------------------------------------------------------------------------

Buffers: TypeAlias = BufferPool | LooseBuffers


class Stop(NamedTuple):
    """One part of a walk: the same elements of several tensors, some of which may end earlier."""

    tensors: tuple[DiskTensor, ...]
    start: int
    numel: int
    written: tuple[DiskTensor, ...]
    """The tensors that are written afterwards. The others are read as last written, committed or
    not."""


class DiskOverlap(NamedTuple):
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
