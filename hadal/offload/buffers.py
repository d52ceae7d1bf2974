"""Host memory for direct disk I/O: whole pages, pinned on request."""

from __future__ import annotations

import ctypes
from collections import deque

import torch
from torch import Tensor

from hadal.device import Event, page_locked
from hadal.errors import OffloadError, UsageError
from hadal.offload.direct import ALIGNMENT, pages


def aligned(nbytes: int, *, pinned: bool = False) -> Tensor:
    """Allocate a page-aligned vector of bytes, which a forked process must not touch.

    Args:
        nbytes: the number of bytes.
        pinned: pin it if there is an accelerator.
    """
    if not nbytes:
        return torch.empty(0, dtype=torch.uint8)
    if not pinned or not torch.accelerator.is_available():
        return torch.frombuffer(pages(nbytes), dtype=torch.uint8)
    return page_locked(nbytes)


def memory_of(buffer: Tensor) -> memoryview:
    """Return the bytes of a vector, which the caller must keep alive.

    It avoids numpy, because torch's storage cannot be resized once numpy has used it.
    """
    nbytes = buffer.numel()
    if not nbytes:
        return memoryview(b"")
    return memoryview((ctypes.c_char * nbytes).from_address(buffer.data_ptr())).cast("B")


def check_buffer(buffer: Tensor) -> None:
    """Check that a disk can read into and write from a tensor.

    Raises:
        UsageError: it is not a page-aligned vector of bytes in host memory.
    """
    if (
        buffer.dtype != torch.uint8
        or buffer.dim() != 1
        or not buffer.is_contiguous()
        or buffer.device.type != "cpu"
    ):
        raise UsageError(
            "a buffer for the disk must be a contiguous 1-D tensor of uint8 in host memory, found"
            f" {tuple(buffer.shape)} of {buffer.dtype} on {buffer.device}; use"
            " `tensor.view(torch.uint8)` of one from `hadal.offload.aligned`"
        )
    if buffer.data_ptr() % ALIGNMENT:
        raise UsageError(
            f"a buffer for the disk must begin at a multiple of {ALIGNMENT} bytes, found one"
            f" {buffer.data_ptr() % ALIGNMENT} bytes after one; use a slice of"
            f" `hadal.offload.aligned(nbytes)` that begins at such a multiple"
        )


class BufferPool:
    """A pool of at most `count` buffers of one length, allocated on first use and then kept."""

    def __init__(self, count: int, nbytes: int, *, pinned: bool = False) -> None:
        self.count = count
        self.nbytes = nbytes
        self._pinned = pinned
        self._free: list[Tensor] = []
        self._taken: dict[int, Tensor] = {}
        # Buffers that a device is still copying from, in the order of the copies.
        self._leaving: deque[tuple[Event, Tensor]] = deque()
        self._is_closed = False

    def take(self, nbytes: int = 0) -> Tensor:
        """Lend a buffer of `nbytes` or more; its contents are undefined.

        Raises:
            OffloadError: all are taken, or they are too short.
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
        """Return a buffer, which is lent again once `after` is over.

        Raises:
            UsageError: it was not taken from this pool, or was already returned.
        """
        found = self._taken.pop(buffer.data_ptr(), None)
        if self._is_closed:
            return
        if found is None:
            raise UsageError(
                "a buffer was returned to a pool that did not lend it, or already has it back"
            )
        if after is None or after.is_over:
            self._free.append(found)
        else:
            self._leaving.append((after, found))

    def close(self) -> None:
        """Free all memory; buffers still in use are freed when their holders drop them."""
        self._is_closed = True
        while self._leaving:
            self._leaving.popleft()[0].wait_on_host()
        self._free.clear()
        self._taken.clear()

    def has_free(self) -> bool:
        """Return True if a buffer can be taken without waiting."""
        while self._leaving and self._leaving[0][0].is_over:
            self._free.append(self._leaving.popleft()[1])
        return bool(self._free) or len(self._taken) + len(self._leaving) < self.count

    def _made(self) -> Tensor:
        # Not empty, because its address identifies the buffer.
        return aligned(max(self.nbytes, 1), pinned=self._pinned)[: self.nbytes]


class LooseBuffers:
    """A pool of buffers of any length, allocated when taken and freed when returned."""

    def __init__(self, *, pinned: bool = False) -> None:
        self._pinned = pinned

    def take(self, nbytes: int) -> Tensor:
        """Lend a buffer of `nbytes`; its contents are undefined."""
        return aligned(max(nbytes, 1), pinned=self._pinned)[:nbytes]

    def give_back(self, buffer: Tensor) -> None:
        """Return a buffer, which is freed with its last reference."""
