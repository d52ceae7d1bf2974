"""Asynchronous reads and writes, and the threads that run their system calls."""

from __future__ import annotations

import os
import threading
import zlib
from array import array
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from queue import SimpleQueue
from typing import TypeAlias

from torch import Tensor

from hadal.config.offload import Aio
from hadal.device import device_thread
from hadal.errors import HadalError, OffloadError, UsageError
from hadal.offload.buffers import memory_of
from hadal.offload.direct import ALIGNMENT, Extent, pages
from hadal.offload.file import Act, DiskFile

# The number of system calls that share a queue's depth if blocks go in batches.
_CALLS_IN_A_QUEUE = 4


@dataclass(frozen=True, slots=True, eq=False)
class Region:
    """A page-aligned range of a store's file for one thing."""

    name: str
    nbytes: int
    extent: Extent
    """Its whole pages in the file."""
    sums: Sums | None = None


OpenRequests: TypeAlias = "dict[IoRequest, None]"
"""A store's requests that are under way, or failed and were not waited for, in starting order.

Threads add and remove them with single atomic operations."""


class IoRequest:
    """An asynchronous read or write."""

    def __init__(self, act: Act, region: Region, extent: Extent, under_way: OpenRequests) -> None:
        self.act = act
        self.region = region
        self.extent = extent
        """The bytes of the region."""
        self.error: HadalError | None = None
        """The error, as soon as the request has failed."""
        self._left = 0
        self._open = under_way
        self._lock = threading.Lock()
        self._done = threading.Event()
        self._process = os.getpid()

    @property
    def is_done(self) -> bool:
        """True if it has ended, perhaps with an error."""
        return self._done.is_set()

    def wait(self) -> None:
        """Wait until it is done, and raise its error.

        Raises:
            OffloadError: it failed. Data read is invalid; data written is incomplete.
        """
        if not self.is_done and os.getpid() != self._process:
            raise UsageError(
                "a forked process waited for a request to a disk, but lacks the threads that"
                " run it; wait in the process that started it"
            )
        self.settle()
        self._open.pop(self, None)
        if self.error is not None:
            raise self.error

    def settle(self) -> None:
        """Wait until it is done, without raising its error."""
        self._done.wait()

    def begin(self, calls: int) -> None:
        """Expect this many calls."""
        self._left = calls
        if calls:
            self._open[self] = None
        else:
            self._done.set()

    def end_one(self, error: HadalError | None) -> None:
        """Record the end of one call; keep the first error."""
        with self._lock:
            self._left -= 1
            self.error = self.error or error
            if self._left:
                return
            if self.error is None:
                self._open.pop(self, None)
            self._done.set()


class IoCall:
    """Consecutive blocks of a request, transferred in one system call."""

    __slots__ = ("_buffer", "_contents", "_extent", "_file", "_place", "_request", "_what", "count")

    def __init__(
        self, request: IoRequest, blocks: list[Extent], buffer: Tensor, file: DiskFile
    ) -> None:
        self.count = len(blocks)
        self._request = request
        self._file = file
        self._buffer = buffer  # keeps the memory alive
        first, start, stop = request.extent.start, blocks[0].start, blocks[-1].stop
        self._contents = memory_of(buffer)[start - first : stop - first]
        self._extent = Extent(start, stop)
        self._place = request.region.extent.start + start
        self._what = f"'{request.region.name}'"

    def run(self) -> None:
        """Transfer the blocks, unless the request has already failed."""
        error: HadalError | None = None
        if self._request.error is None:
            try:
                if self._request.act == "read":
                    self._read()
                else:
                    self._write()
            except HadalError as caught:
                error = caught
            except Exception as caught:  # of any kind, because the waiting thread must get it
                error = OffloadError(f"{self._file.path}: {self._what} failed: {caught!r}")
        self._request.end_one(error)

    def _read(self) -> None:
        parts, last = self._parts()
        self._file.read(parts, self._place, self._what)
        if last:
            self._contents[-len(last) :] = last
        sums = self._request.region.sums
        place = sums.damaged(self._extent, self._contents) if sums else None
        if place is not None:
            raise OffloadError(
                f"{self._file.path}: {self._what} is damaged at byte {place} of it: the data read"
                " differs from the data written (wrong checksum); check the disk's health, and"
                " resume from the last checkpoint"
            )

    def _write(self) -> None:
        parts, last = self._parts()
        if last:
            last[:] = self._contents[-len(last) :]
        self._file.write(parts, self._place, self._what)
        if self._request.region.sums is not None:
            self._request.region.sums.keep(self._extent, self._contents)

    def _parts(self) -> tuple[list[memoryview], memoryview]:
        """Return the pages to transfer, and the used part of a last page outside the buffer."""
        short = len(self._contents) % ALIGNMENT
        if not short:
            return [self._contents], memoryview(b"")
        page = pages(ALIGNMENT)
        whole = self._contents[: len(self._contents) - short]
        return [part for part in (whole, page) if part], page[:short]


def blocks_in_a_call(section: Aio) -> int:
    """Return the maximum number of blocks in one system call."""
    return 1 if section.single_submit else max(1, section.queue_depth // _CALLS_IN_A_QUEUE)


class Queue:
    """A queue that runs calls in order of arrival, several at a time.

    System calls release the GIL. Threads are started when they are first needed. They refer to the
    queue and not to its owner, so that the owner can be collected.
    """

    def __init__(self, section: Aio, name: str) -> None:
        self._depth = section.queue_depth
        self._overlaps = section.overlap_events
        self._most_threads = self._depth // blocks_in_a_call(section)
        self._name = name
        self._waiting: deque[IoCall] = deque()
        self._under_way = 0
        self._lock = threading.Lock()
        self._begun: SimpleQueue[IoCall | None] = SimpleQueue()
        self._unfinished = 0
        self._threads: list[threading.Thread] = []

    def put(self, calls: Iterable[IoCall]) -> None:
        """Run these calls after the earlier ones."""
        with self._lock:
            self._waiting.extend(calls)
            self._begin()
            self._start_threads()

    @property
    def is_mine(self) -> bool:
        """True if the current thread is one of the queue's own."""
        return threading.current_thread() in self._threads

    def close(self) -> None:
        """End the threads; no call may be under way."""
        for _ in self._threads:
            self._begun.put(None)
        for thread in self._threads:
            thread.join()
        self._threads.clear()

    def _begin(self) -> None:
        """Hand the threads as many calls as may be under way now."""
        if self._under_way and not self._overlaps:
            return
        while self._waiting:
            # A call of more blocks than the depth runs alone.
            if self._under_way and self._under_way + self._waiting[0].count > self._depth:
                return
            call = self._waiting.popleft()
            self._under_way += call.count
            self._unfinished += 1
            self._begun.put(call)

    def _start_threads(self) -> None:
        while len(self._threads) < min(self._unfinished, self._most_threads):
            number = len(self._threads)
            thread = device_thread(self._work, name=f"{self._name}-{number}", daemon=True)
            self._threads.append(thread)
            try:
                thread.start()
            except RuntimeError:  # the program is ending, so the existing threads must suffice
                self._threads.pop()
                if not self._threads:
                    raise
                return

    def _work(self) -> None:
        while (call := self._begun.get()) is not None:
            call.run()
            with self._lock:
                self._under_way -= call.count
                self._unfinished -= 1
                self._begin()
                self._start_threads()
            del call  # an idle thread must not keep a buffer's memory alive


# ---- checksums -----------------------------------------------------------------------------------

# Each cell of a fixed length has a checksum, so reads and writes begin and end at cell borders or
# at the region's end. The checksum is a CRC-32, as in checkpoints: it finds damage, but does not
# protect against forgery.

CELL_NBYTES = 8192
"""Two pages: 4096 elements of two bytes, the smallest unit that training reads."""


class Sums:
    """The checksums of one region. Each cell is written or read by one thread at a time."""

    def __init__(self, name: str, nbytes: int) -> None:
        self._name = name
        self._nbytes = nbytes
        # Each cell's sum with an additional high bit; 0 if nothing was written.
        self._found = array("Q", bytes(8 * -(-nbytes // CELL_NBYTES)))

    def check_borders(self, extent: Extent) -> None:
        """Check that a read or write consists of whole cells.

        Raises:
            UsageError: it does not.
        """
        start, stop = extent
        if start % CELL_NBYTES or (stop % CELL_NBYTES and stop != self._nbytes):
            raise UsageError(
                f"bytes {start} to {stop} of '{self._name}' cannot be transferred: with checksums"
                f" both ends must be multiples of {CELL_NBYTES}, or the region's end"
            )

    def forget(self, extent: Extent) -> None:
        """Drop the sums of an extent that is about to be overwritten."""
        for cell in _cells(extent):
            self._found[cell] = 0

    def keep(self, extent: Extent, contents: memoryview) -> None:
        """Store the sums of the contents written."""
        for cell, part in zip(_cells(extent), _parts(contents), strict=True):
            self._found[cell] = _sum(part)

    def damaged(self, extent: Extent, contents: memoryview) -> int | None:
        """Return the start of the first cell that differs from the data written, or None."""
        for cell, part in zip(_cells(extent), _parts(contents), strict=True):
            if self._found[cell] != _sum(part):
                return cell * CELL_NBYTES
        return None


def _cells(extent: Extent) -> range:
    return range(extent.start // CELL_NBYTES, -(-extent.stop // CELL_NBYTES))


def _parts(contents: memoryview) -> list[memoryview]:
    starts = range(0, len(contents), CELL_NBYTES)
    return [contents[start : start + CELL_NBYTES] for start in starts]


def _sum(part: memoryview) -> int:
    return 1 << 32 | zlib.crc32(part)
