"""Reads and writes under way, and the threads that make them, each by one system call."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from queue import SimpleQueue
from typing import TypeAlias

from torch import Tensor

from hadal.errors import HadalError, OffloadError, UsageError
from hadal.offload.buffers import memory_of
from hadal.offload.direct import pages
from hadal.offload.extents import ALIGNMENT, Extent
from hadal.offload.file import Act, DiskFile
from hadal.offload.settings import IoSettings
from hadal.offload.sums import Sums


@dataclass(frozen=True, slots=True, eq=False)
class Region:
    """A range of a store's file that holds one thing; it begins on a page."""

    name: str
    nbytes: int
    extent: Extent
    """Where it lies in the file, in whole pages."""
    sums: Sums | None = None


OpenRequests: TypeAlias = "dict[Request, None]"
"""Requests of a store that are under way, or have failed and were not waited for, as they began.

Threads add and drop them, each by one call."""


class Request:
    """One read or write that goes on by itself until it is waited for."""

    def __init__(self, act: Act, region: Region, extent: Extent, under_way: OpenRequests) -> None:
        self.act = act
        self.region = region
        self.extent = extent
        """Which bytes of the region."""
        self.error: HadalError | None = None
        """Why it failed, from the moment when it did."""
        self._left = 0
        self._open = under_way
        self._lock = threading.Lock()
        self._done = threading.Event()
        self._process = os.getpid()

    @property
    def is_done(self) -> bool:
        """Whether nothing of it is under way any more; it may have failed."""
        return self._done.is_set()

    def wait(self) -> None:
        """Wait until it is done.

        Raises:
            OffloadError: it failed. What was read is of no use; what was written is half there.
        """
        if not self.is_done and os.getpid() != self._process:
            raise UsageError(
                "a request to a disk was waited for in a forked process, which has none of the"
                " threads that carry it out; wait in the process that began it"
            )
        self.settle()
        self._open.pop(self, None)
        if self.error is not None:
            raise self.error

    def settle(self) -> None:
        """Wait until it is done, however it ends."""
        self._done.wait()

    def begin(self, calls: int) -> None:
        """Expect so many calls to end."""
        self._left = calls
        if calls:
            self._open[self] = None
        else:
            self._done.set()

    def end_one(self, error: HadalError | None) -> None:
        """One call has ended; the first error of all is kept."""
        with self._lock:
            self._left -= 1
            self.error = self.error or error
            if self._left:
                return
            if self.error is None:
                self._open.pop(self, None)
            self._done.set()


class Call:
    """Neighbouring blocks of a request, which travel in one system call."""

    __slots__ = ("_blocks", "_buffer", "_contents", "_file", "_request")

    def __init__(
        self, request: Request, blocks: list[Extent], buffer: Tensor, file: DiskFile
    ) -> None:
        self._request = request
        self._blocks = blocks
        self._file = file
        self._buffer = buffer  # so that the memory is not freed meanwhile
        first, start, stop = request.extent.start, blocks[0].start, blocks[-1].stop
        self._contents = memory_of(buffer)[start - first : stop - first]

    @property
    def count(self) -> int:
        """How many blocks it moves."""
        return len(self._blocks)

    def run(self) -> None:
        """Move the blocks, unless the request has failed already."""
        error: HadalError | None = None
        if self._request.error is None:
            try:
                if self._request.act == "read":
                    self._read()
                else:
                    self._write()
            except HadalError as caught:
                error = caught
            except Exception as caught:  # whoever waits must be told, whatever it is
                error = OffloadError(f"{self._file.path}: {self._what()} failed: {caught!r}")
        self._request.end_one(error)

    def _read(self) -> None:
        parts, last = self._parts()
        self._file.read(parts, self._place(), self._what())
        if last:
            self._contents[-len(last) :] = last
        sums = self._request.region.sums
        place = sums.damaged(self._extent(), self._contents) if sums else None
        if place is not None:
            raise OffloadError(
                f"{self._file.path}: {self._what()} is damaged at byte {place} of it: what is read"
                " there was not written there (the checksums differ); look at the disk's health,"
                " and go on from the last checkpoint"
            )

    def _write(self) -> None:
        parts, last = self._parts()
        if last:
            last[:] = self._contents[-len(last) :]
        self._file.write(parts, self._place(), self._what())
        if self._request.region.sums is not None:
            self._request.region.sums.keep(self._extent(), self._contents)

    def _parts(self) -> tuple[list[memoryview], memoryview]:
        """What moves, in whole pages; of a last page that is not in the buffer, the used part."""
        short = len(self._contents) % ALIGNMENT
        if not short:
            return [self._contents], memoryview(b"")
        page = pages(ALIGNMENT)
        whole = self._contents[: len(self._contents) - short]
        return [part for part in (whole, page) if part], page[:short]

    def _extent(self) -> Extent:
        return Extent(self._blocks[0].start, self._blocks[-1].stop)

    def _place(self) -> int:
        return self._request.region.extent.start + self._blocks[0].start

    def _what(self) -> str:
        return f"'{self._request.region.name}'"


class Queue:
    """Runs calls in the order in which they come, several at a time.

    The interpreter's lock is free while the system reads and writes. Threads are started when they
    are first needed. They know the queue, not its owner, so that an owner may be collected.
    """

    def __init__(self, settings: IoSettings, name: str) -> None:
        self._settings = settings
        self._name = name
        self._waiting: deque[Call] = deque()
        self._under_way = 0
        self._lock = threading.Lock()
        self._begun: SimpleQueue[Call | None] = SimpleQueue()
        self._unfinished = 0
        self._threads: list[threading.Thread] = []

    def put(self, calls: Iterable[Call]) -> None:
        """Run these after those that came before."""
        with self._lock:
            self._waiting.extend(calls)
            self._begin()
            self._start_threads()

    @property
    def is_mine(self) -> bool:
        """Whether this is one of the queue's own threads."""
        return threading.current_thread() in self._threads

    def close(self) -> None:
        """End the threads; nothing is under way any more."""
        for _ in self._threads:
            self._begun.put(None)
        for thread in self._threads:
            thread.join()
        self._threads.clear()

    def _begin(self) -> None:
        """Hand as many calls to the threads as may be under way now."""
        if self._under_way and not self._settings.overlaps:
            return
        while self._waiting and self._settings.admits(self._waiting[0].count, self._under_way):
            call = self._waiting.popleft()
            self._under_way += call.count
            self._unfinished += 1
            self._begun.put(call)

    def _start_threads(self) -> None:
        while len(self._threads) < min(self._unfinished, self._settings.workers):
            number = len(self._threads)
            thread = threading.Thread(target=self._work, name=f"{self._name}-{number}", daemon=True)
            self._threads.append(thread)
            try:
                thread.start()
            except RuntimeError:  # the program is ending: those that are there must do
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
            del call  # nobody's memory is held while there is nothing to do
