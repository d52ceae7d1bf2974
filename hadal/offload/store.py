"""The disk tier: regions of a file that are read and written asynchronously."""

from __future__ import annotations

import logging
import os
import threading
import weakref
from collections.abc import Sequence
from pathlib import Path

from torch import Tensor

from hadal.config.offload import Aio
from hadal.errors import OffloadError, UsageError
from hadal.offload.buffers import check_buffer
from hadal.offload.direct import ALIGNMENT, Extent, Room, cut, dealt, grouped
from hadal.offload.file import STATES, Act, DiskFile, OwnFolder
from hadal.offload.requests import (
    CELL_NBYTES,
    IoCall,
    IoRequest,
    OpenRequests,
    Queue,
    Region,
    Sums,
    blocks_in_a_call,
)
from hadal.units import rounded_up

_log = logging.getLogger(__name__)


class DiskStore:
    """The storage of one process on a disk: one file in its own folder.

    The file grows as regions are allocated, and its space is reserved at once. It is removed when
    the store is closed or collected, and when the program ends. Files left by a killed process are
    removed when the next store is opened under the same path.

    Several requests run at a time, in any order: wait for a write before reading its region or
    writing it again. Do not use a buffer until its request is done; the request keeps its memory
    alive.

    Args:
        folder: a folder on the disk, shared by all processes.
        section: the I/O settings; with `verify_checksums`, offsets and lengths must be multiples of
            8192.

    Raises:
        OffloadError: the folder cannot be written.
    """

    def __init__(self, folder: str | Path, section: Aio | None = None) -> None:
        section = section or Aio()
        self._verifies = section.verify_checksums
        self._blocks_in_a_call = blocks_in_a_call(section)
        self._folder = OwnFolder(Path(folder))
        try:
            self._file = DiskFile(self._folder.path / STATES, Path(folder))
        except OSError as error:
            self._folder.remove()
            raise OffloadError(f"{self._folder.path} cannot hold a file: {error}") from error
        self._queues = [
            Queue(section, f"hadal-disk-{n}") for n in range(section.intra_op_parallelism)
        ]
        self._next_queue = 0
        self._room = Room()
        self._lock = threading.Lock()
        self._step = rounded_up(section.block_size, CELL_NBYTES if self._verifies else ALIGNMENT)
        self._regions: set[Region] = set()
        self._open: OpenRequests = {}
        self._process = os.getpid()
        self._end = weakref.finalize(
            self, _end, self._queues, self._open, self._file, self._folder, self._process
        )

    @property
    def path(self) -> Path:
        """The path of the file."""
        return self._file.path

    @property
    def nbytes(self) -> int:
        """The length of the file."""
        return self._file.nbytes

    def allocate(self, name: str, nbytes: int) -> Region:
        """Allocate a region of `nbytes` bytes, whose contents are undefined until written.

        Args:
            name: its contents, for error messages.
            nbytes: the number of bytes; the region takes whole pages.

        Raises:
            OffloadError: there is no room on the disk.
        """
        self._check_open()
        with self._lock:
            extent = self._room.take(nbytes)
            try:
                self._file.reserve(self._room.end, name)
            except BaseException:
                self._room.give_back(extent)
                raise
        region = Region(name, nbytes, extent, Sums(name, nbytes) if self._verifies else None)
        self._regions.add(region)
        return region

    def free(self, region: Region) -> None:
        """Free a region.

        Raises:
            UsageError: it is already free, or a request to it is under way.
        """
        self._check_known(region)
        if any(one.region is region and not one.is_done for one in list(self._open)):
            raise UsageError(f"'{region.name}' was freed with a request under way; wait for it")
        with self._lock:
            self._regions.remove(region)
            self._room.give_back(region.extent)
            self._file.shrink(self._room.end)

    def start_read(self, region: Region, offset: int, buffer: Tensor) -> IoRequest:
        """Start filling a buffer from a region.

        Args:
            region: the region to read.
            offset: the first byte in the region; a multiple of 4096.
            buffer: a page-aligned vector of bytes, a slice of one from `aligned`. Its length is a
                multiple of 4096, or reaches the end of the region.

        Raises:
            UsageError: the arguments are not aligned or not in the region, or the store is closed.
        """
        return self._start("read", region, offset, buffer)

    def start_write(self, region: Region, offset: int, buffer: Tensor) -> IoRequest:
        """Start writing a buffer into a region; the arguments are those of `start_read`."""
        return self._start("written", region, offset, buffer)

    def close(self) -> None:
        """Wait for all requests and remove the file; further calls do nothing.

        Raises:
            OffloadError: a request that was not waited for has failed.
        """
        if not self._end.alive:
            return
        if os.getpid() != self._process:
            self._end.detach()
            return
        errors = []
        for request in list(self._open):
            try:
                request.wait()
            except Exception as error:
                errors.append(error)
        self._end()
        if errors:
            raise errors[0]

    def _start(self, act: Act, region: Region, offset: int, buffer: Tensor) -> IoRequest:
        self._check_known(region)
        check_buffer(buffer)
        extent = Extent(offset, offset + buffer.numel())
        _check_extent(extent, region)
        if region.sums is not None:
            region.sums.check_borders(extent)
            if act == "written":
                region.sums.forget(extent)
        shares = self._shares(extent)
        request = IoRequest(act, region, extent, self._open)
        request.begin(sum(map(len, shares)))
        for share in shares:
            self._next_queue = (self._next_queue + 1) % len(self._queues)
            calls = [IoCall(request, blocks, buffer, self._file) for blocks in share]
            self._queues[self._next_queue].put(calls)
        return request

    def _shares(self, extent: Extent) -> Sequence[list[list[Extent]]]:
        """Return the calls of each queue, as lists of consecutive blocks."""
        blocks = cut(*extent, self._step)
        shares = dealt(blocks, min(len(self._queues), len(blocks))) if blocks else []
        return [grouped(share, self._blocks_in_a_call) for share in shares]

    def _check_known(self, region: Region) -> None:
        self._check_open()
        if region not in self._regions:
            raise UsageError(
                f"'{region.name}' is not a region of {self.path}: it was freed, or belongs to"
                " another store"
            )

    def _check_open(self) -> None:
        if not self._end.alive:
            raise UsageError(f"{self.path} was used after it was closed")
        if os.getpid() != self._process:
            raise UsageError(
                f"{self.path} belongs to process {self._process} and was used in {os.getpid()},"
                " forked from it; only the process that opened a store may use it"
            )


def _check_extent(extent: Extent, region: Region) -> None:
    start, stop = extent
    if start % ALIGNMENT or not 0 <= start <= stop <= region.nbytes:
        raise UsageError(
            f"bytes {start} to {stop} of '{region.name}' ({region.nbytes} bytes) cannot be"
            f" transferred: an offset must be a multiple of {ALIGNMENT} inside the region"
        )
    if stop % ALIGNMENT and stop != region.nbytes:
        raise UsageError(
            f"bytes {start} to {stop} of '{region.name}' ({region.nbytes} bytes) cannot be"
            f" transferred: the end must be a multiple of {ALIGNMENT}, or the region's end"
        )


def _end(
    queues: Sequence[Queue],
    under_way: OpenRequests,
    file: DiskFile,
    folder: OwnFolder,
    process: int,
) -> None:
    if os.getpid() != process:
        return
    if any(queue.is_mine for queue in queues):
        # The garbage collector may run in any thread, and a queue's thread cannot wait for itself.
        end = (queues, under_way, file, folder, process)
        threading.Thread(target=_end, args=end, name="hadal-disk-end").start()
        return
    for request in list(under_way):
        request.settle()
    for queue in queues:
        queue.close()
    for request in list(under_way):
        if request.error is not None:
            _log.error("a request to the disk failed and was not waited for: %s", request.error)
    file.close()
    folder.remove()
