"""One 1-D run of values on the disk, in two generations: the last that counts, and the next."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from hadal.errors import OffloadError
from hadal.offload.buffers import aligned
from hadal.offload.requests import Request
from hadal.offload.store import DiskStore

# Elements: where a stretch of a run may begin, for every dtype. Direct reads and writes begin at
# multiples of 4096 bytes.
UNIT_NUMEL = 4096
_PART_NUMEL = 1 << 24


class DiskRun:
    """Values of one dtype in a store, `numel` of them.

    What is written counts from `commit` on; `rollback` forgets it. So an update that fails leaves
    everything as it was before, at the price of twice the room on the disk. Until the first commit
    all elements are `fill`, without a look at the disk.
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
        self._generation: int | None = None
        self._is_dirty = False

    @property
    def is_blank(self) -> bool:
        """Whether nothing was written that counts."""
        return self._generation is None

    def start_read(self, start: int, out: Tensor) -> Request | None:
        """Begin to fill `out` (1-D, aligned memory) with the elements from `start` on.

        They are those of the last commit. None: they are there already.
        """
        if self._generation is None:
            out.fill_(self._fill)
            return None
        return self._start_read(self._generation, start, out)

    def start_read_back(self, start: int, out: Tensor) -> Request | None:
        """Begin to fill `out` as `start_read` does, with what was written since the last commit."""
        if not self._is_dirty:
            return self.start_read(start, out)
        return self._start_read(self._next, start, out)

    def _start_read(self, generation: int, start: int, out: Tensor) -> Request:
        region = self._regions[generation]
        return self._store.start_read(region, start * self.dtype.itemsize, _bytes(out))

    def start_write(self, start: int, values: Tensor) -> Request:
        """Begin to write `values` (1-D, aligned memory), which must stay until that is done."""
        self._is_dirty = True
        region = self._regions[self._next]
        return self._store.start_write(region, start * self.dtype.itemsize, _bytes(values))

    @property
    def _next(self) -> int:
        return 0 if self._generation is None else 1 - self._generation

    def commit(self) -> None:
        """Let count what was written; nothing changes where nothing was."""
        if self._is_dirty:
            self._generation, self._is_dirty = self._next, False

    def rollback(self) -> None:
        """Forget what was written since the last commit."""
        self._is_dirty = False

    def read(self) -> Tensor:
        """All elements, in host memory of their own: what was written last."""
        values = aligned(max(self.numel, 1) * self.dtype.itemsize)
        out = values.view(self.dtype)[: self.numel]
        generation = self._next if self._is_dirty else self._generation
        if generation is None:
            return out.fill_(self._fill)
        if self.numel:
            self._store.start_read(self._regions[generation], 0, _bytes(out)).wait()
        return out

    def write(self, values: Tensor) -> None:
        """Write all elements and let them count. `values` may lie in any memory."""
        self.write_next(values)
        self.commit()

    def write_next(self, values: Tensor) -> None:
        """Write all elements."""
        own = values
        if values.device.type != "cpu" or values.data_ptr() % UNIT_NUMEL:
            memory = aligned(max(self.numel, 1) * self.dtype.itemsize)
            own = memory.view(self.dtype)[: self.numel].copy_(values)
        if self.numel:
            self.start_write(0, own).wait()
        self._is_dirty = True

    def lay_out(self) -> None:
        """Write what it begins with, where nothing was written yet."""
        if self.is_blank and self.numel:
            part = aligned(min(self.numel, _PART_NUMEL) * self.dtype.itemsize).view(self.dtype)
            part.fill_(self._fill)
            for start in range(0, self.numel, _PART_NUMEL):
                self.start_write(start, part[: self.numel - start]).wait()
            self.commit()

    def free(self) -> None:
        """Give the room back."""
        for region in self._regions:
            self._store.free(region)


def _bytes(values: Tensor) -> Tensor:
    return values.view(torch.uint8)


@dataclass(frozen=True, slots=True, eq=False)
class ReadOnly:
    """A run, for a walk that leaves it as it is."""

    run: DiskRun
    reads_back: bool = False
    """Whether what counts is what was written since the last commit."""

    @property
    def numel(self) -> int:
        """How many values there are."""
        return self.run.numel

    @property
    def dtype(self) -> torch.dtype:
        """Their dtype."""
        return self.run.dtype

    def start_read(self, start: int, out: Tensor) -> Request | None:
        """Begin to fill `out` with those from `start` on; None: it is done."""
        read = self.run.start_read_back if self.reads_back else self.run.start_read
        return read(start, out)

    def start_write(self, start: int, values: Tensor) -> Request | None:
        """Nothing is written."""
        return None


class Readable(Protocol):
    """Values that are read a stretch at a time."""

    @property
    def numel(self) -> int:
        """How many there are."""

    @property
    def dtype(self) -> torch.dtype:
        """Their dtype."""

    def start_read(self, start: int, out: Tensor) -> Request | None:
        """Begin to fill `out` with those from `start` on; None: it is done."""


class RunCut:
    """A stretch of a run, for who wants to know its length and dtype and read it part by part."""

    def __init__(self, run: Readable, start: int = 0, stop: int | None = None) -> None:
        self._run = run
        self._start = start
        self._stop = run.numel if stop is None else stop

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the elements."""
        return self._run.dtype

    @property
    def shape(self) -> tuple[int]:
        """The shape of the tensor that it stands for."""
        return (self.numel(),)

    def numel(self) -> int:
        """How many elements."""
        return self._stop - self._start

    def element_size(self) -> int:
        """Bytes of one element."""
        return self._run.dtype.itemsize

    def __getitem__(self, place: slice) -> RunCut:
        start, stop, _ = place.indices(self.numel())
        return RunCut(self._run, self._start + start, self._start + max(start, stop))

    def parts(self, nbytes: int) -> Iterator[Tensor]:
        """All elements in order, in parts of about so many bytes; each lasts until the next.

        Raises:
            OffloadError: they cannot be read.
        """
        step = max(1, nbytes // self.element_size() // UNIT_NUMEL) * UNIT_NUMEL
        memory = aligned(step * self.element_size()).view(self.dtype)
        at = self._start
        while at < self._stop:
            # Reads begin at a page.
            first = at // UNIT_NUMEL * UNIT_NUMEL
            out = memory[: min(step, self._run.numel - first)]
            request = self._run.start_read(first, out)
            if request is not None:
                request.wait()
            stop = min(self._stop, first + out.numel())
            yield out[at - first : stop - first]
            at = stop


@contextmanager
def one_update(runs: Callable[[], Iterable[DiskRun]]) -> Iterator[None]:
    """Around an update of all these runs: they count where it succeeds, and else nothing does.

    `runs` is asked at the end: an update may lay new ones.
    """
    try:
        yield
    except BaseException:
        for run in runs():
            run.rollback()
        raise
    for run in runs():
        run.commit()
