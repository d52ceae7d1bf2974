"""Host memory that a disk reads into and writes from: whole pages, page-locked where asked."""

from __future__ import annotations

import ctypes
from collections import deque

import torch
from torch import Tensor

from hadal.device import Event, page_locked
from hadal.errors import OffloadError, UsageError
from hadal.offload.direct import pages
from hadal.offload.extents import ALIGNMENT


def aligned(nbytes: int, *, pinned: bool = False) -> Tensor:
    """A vector of bytes that begins on a page. A forked process must not touch it.

    Args:
        nbytes: how many.
        pinned: lock it into memory, where an accelerator is there to gain from it.
    """
    if not nbytes:
        return torch.empty(0, dtype=torch.uint8)
    if not pinned or not torch.accelerator.is_available():
        return torch.frombuffer(pages(nbytes), dtype=torch.uint8)
    return page_locked(nbytes)


def memory_of(buffer: Tensor) -> memoryview:
    """The bytes of a vector, which whoever looks at them must keep alive.

    Not by way of numpy: storage of torch's own that numpy has seen can never be resized.
    """
    nbytes = buffer.numel()
    if not nbytes:
        return memoryview(b"")
    return memoryview((ctypes.c_char * nbytes).from_address(buffer.data_ptr())).cast("B")


def check_buffer(buffer: Tensor) -> None:
    """See that a disk can read into and write from a tensor.

    Raises:
        UsageError: it is no vector of bytes in host memory that begins on a page.
    """
    if (
        buffer.dtype != torch.uint8
        or buffer.dim() != 1
        or not buffer.is_contiguous()
        or buffer.device.type != "cpu"
    ):
        raise UsageError(
            "a buffer for the disk must be a contiguous 1-D tensor of uint8 in host memory, found"
            f" {tuple(buffer.shape)} of {buffer.dtype} on {buffer.device}; take"
            " `tensor.view(torch.uint8)` of one that `hadal.offload.aligned` has made"
        )
    if buffer.data_ptr() % ALIGNMENT:
        raise UsageError(
            f"a buffer for the disk must begin at a multiple of {ALIGNMENT} bytes, found one"
            f" {buffer.data_ptr() % ALIGNMENT} bytes after; take a part of"
            f" `hadal.offload.aligned(nbytes)` that begins at such a multiple"
        )


class BufferPool:
    """At most `count` buffers of one length, made when first needed and kept until the end."""

    def __init__(self, count: int, nbytes: int, *, pinned: bool = False) -> None:
        self.count = count
        self.nbytes = nbytes
        self._pinned = pinned
        self._free: list[Tensor] = []
        self._taken: dict[int, Tensor] = {}
        # Buffers that a device still copies from, in the order in which it does.
        self._leaving: deque[tuple[Event, Tensor]] = deque()
        self._is_closed = False

    def take(self, nbytes: int = 0) -> Tensor:
        """Lend a buffer of `nbytes` or more; its contents are undefined.

        Raises:
            OffloadError: all are taken, or they are shorter.
            UsageError: the pool is closed.
        """
        if self._is_closed:
            raise UsageError("a buffer was taken from a pool that is closed")
        if nbytes > self.nbytes:
            raise OffloadError(f"{nbytes} bytes do not fit into a buffer of {self.nbytes}")
        if not self.has_free():
            raise OffloadError(
                f"all {self.count} buffers of {self.nbytes} bytes are in use; give one back"
                " first, or raise the number of buffers (`buffer_count` in the configuration)"
            )
        buffer = self._free.pop() if self._free else self._made()
        self._taken[buffer.data_ptr()] = buffer
        return buffer

    def give_back(self, buffer: Tensor, after: Event | None = None) -> None:
        """Return a buffer; it is lent again once `after` is over.

        Raises:
            UsageError: it was not taken here, or is back already.
        """
        found = self._taken.pop(buffer.data_ptr(), None)
        if self._is_closed:
            return
        if found is None:
            raise UsageError(
                "a buffer was given back to a pool that has not lent it, or has it already"
            )
        if after is None or after.is_over:
            self._free.append(found)
        else:
            self._leaving.append((after, found))

    def close(self) -> None:
        """Let go of all memory; what is still taken goes when its holders let go of it."""
        self._is_closed = True
        while self._leaving:
            self._leaving.popleft()[0].wait_on_host()
        self._free.clear()
        self._taken.clear()

    def has_free(self) -> bool:
        """Whether a buffer can be taken without waiting."""
        while self._leaving and self._leaving[0][0].is_over:
            self._free.append(self._leaving.popleft()[1])
        return bool(self._free) or len(self._taken) + len(self._leaving) < self.count

    def _made(self) -> Tensor:
        # A view of its own place in memory even if it is empty: buffers are told apart by it.
        return aligned(max(self.nbytes, 1), pinned=self._pinned)[: self.nbytes]


class LooseBuffers:
    """Buffers of any length, made when they are taken and freed when they are given back."""

    def __init__(self, *, pinned: bool = False) -> None:
        self._pinned = pinned

    def take(self, nbytes: int) -> Tensor:
        """Lend a buffer of `nbytes`; its contents are undefined."""
        return aligned(max(nbytes, 1), pinned=self._pinned)[:nbytes]

    def give_back(self, buffer: Tensor) -> None:
        """Return a buffer."""
