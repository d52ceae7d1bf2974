"""The disk tier: regions of one file, read and written while other work goes on."""

from __future__ import annotations

import logging
import os
import threading
import weakref
from collections.abc import Sequence
from pathlib import Path

from torch import Tensor

from hadal.errors import OffloadError, UsageError
from hadal.offload.buffers import check_buffer
from hadal.offload.extents import ALIGNMENT, Extent, Room, cut, dealt, grouped, rounded
from hadal.offload.file import Act, DiskFile
from hadal.offload.folder import STATES, OwnFolder
from hadal.offload.requests import Call, OpenRequests, Queue, Region, Request
from hadal.offload.settings import IoSettings
from hadal.offload.sums import CELL_NBYTES, Sums

_log = logging.getLogger(__name__)


class DiskStore:
    """What one process has on a disk: one file, in a folder of its own.

    The file grows by what is allocated, all of it reserved at once, and is removed when the store
    is closed, when nobody refers to it any more, and when the program ends. What a killed process
    has left is removed when the next store is opened under the same path.

    Several requests are under way at a time, in no order: a region is read after the write before
    it was waited for, and the same holds for two writes. A buffer is left alone until its request
    is done; the request keeps its memory.

    Args:
        folder: a folder on the disk, for all processes.
        settings: how requests are cut, and how many are under way; with `verifies` offsets and
            lengths are multiples of 8192.

    Raises:
        OffloadError: nothing can be written there.
    """

    def __init__(self, folder: str | Path, settings: IoSettings | None = None) -> None:
        self.settings = settings = settings or IoSettings()
        self._folder = OwnFolder(Path(folder))
        try:
            self._file = DiskFile(self._folder.path / STATES, Path(folder))
        except OSError as error:
            self._folder.remove()
            raise OffloadError(f"{self._folder.path} cannot hold a file: {error}") from error
        self._queues = [Queue(settings, f"hadal-disk-{n}") for n in range(settings.threads)]
        self._next_queue = 0
        self._room = Room()
        self._lock = threading.Lock()
        self._step = rounded(settings.block_nbytes, CELL_NBYTES if settings.verifies else ALIGNMENT)
        self._regions: set[Region] = set()
        self._open: OpenRequests = {}
        self._process = os.getpid()
        self._end = weakref.finalize(
            self, _end, self._queues, self._open, self._file, self._folder, self._process
        )

    @property
    def path(self) -> Path:
        """The file."""
        return self._file.path

    @property
    def nbytes(self) -> int:
        """How long the file is."""
        return self._file.nbytes

    def allocate(self, name: str, nbytes: int) -> Region:
        """A region of so many bytes. What is in it is not known before it is written.

        Args:
            name: what it holds, as errors call it.
            nbytes: how many bytes; whole pages are taken.

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
        region = Region(
            name, nbytes, extent, Sums(name, nbytes) if self.settings.verifies else None
        )
        self._regions.add(region)
        return region

    def free(self, region: Region) -> None:
        """Let others have a region's place.

        Raises:
            UsageError: it is free already, or a request to it is under way.
        """
        self._check_known(region)
        if any(one.region is region and not one.is_done for one in list(self._open)):
            raise UsageError(f"'{region.name}' was freed with a request under way; wait for it")
        with self._lock:
            self._regions.remove(region)
            self._room.give_back(region.extent)
            self._file.shrink(self._room.end)

    def start_read(self, region: Region, offset: int, buffer: Tensor) -> Request:
        """Begin to fill a buffer from a region.

        Args:
            region: where to read.
            offset: from which of its bytes on; a multiple of 4096.
            buffer: a vector of bytes that begins on a page, part of what `aligned` has made. Its
                length is a multiple of 4096, or what is left of the region.

        Raises:
            UsageError: they do not fit, or the store is closed.
        """
        return self._start("read", region, offset, buffer)

    def start_write(self, region: Region, offset: int, buffer: Tensor) -> Request:
        """Begin to write a buffer into a region; the arguments are those of `start_read`."""
        return self._start("written", region, offset, buffer)

    def close(self) -> None:
        """Wait for all requests, and remove the file; again, it does nothing.

        Raises:
            OffloadError: a request has failed that nobody has waited for.
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

    def _start(self, act: Act, region: Region, offset: int, buffer: Tensor) -> Request:
        self._check_known(region)
        check_buffer(buffer)
        extent = Extent(offset, offset + buffer.numel())
        _check_extent(extent, region)
        if region.sums is not None:
            region.sums.check_borders(extent)
            if act == "written":
                region.sums.forget(extent)
        shares = self._shares(extent)
        request = Request(act, region, extent, self._open)
        request.begin(sum(map(len, shares)))
        for share in shares:
            self._next_queue = (self._next_queue + 1) % len(self._queues)
            calls = [Call(request, blocks, buffer, self._file) for blocks in share]
            self._queues[self._next_queue].put(calls)
        return request

    def _shares(self, extent: Extent) -> Sequence[list[list[Extent]]]:
        """For each queue the calls of its share: neighbouring blocks."""
        blocks = cut(*extent, self._step)
        shares = dealt(blocks, min(len(self._queues), len(blocks))) if blocks else []
        return [grouped(share, self.settings.blocks_in_a_call) for share in shares]

    def _check_known(self, region: Region) -> None:
        self._check_open()
        if region not in self._regions:
            raise UsageError(
                f"'{region.name}' is no region of {self.path}: it was freed, or belongs to another"
                " store"
            )

    def _check_open(self) -> None:
        if not self._end.alive:
            raise UsageError(f"{self.path} was used after it was closed")
        if os.getpid() != self._process:
            raise UsageError(
                f"{self.path} belongs to process {self._process} and was used in {os.getpid()},"
                " forked from it; only the process that has opened a store may use it"
            )


def _check_extent(extent: Extent, region: Region) -> None:
    start, stop = extent
    if start % ALIGNMENT or not 0 <= start <= stop <= region.nbytes:
        raise UsageError(
            f"bytes {start} to {stop} of '{region.name}' ({region.nbytes} bytes) cannot be moved:"
            f" an offset is a multiple of {ALIGNMENT} inside the region"
        )
    if stop % ALIGNMENT and stop != region.nbytes:
        raise UsageError(
            f"bytes {start} to {stop} of '{region.name}' ({region.nbytes} bytes) cannot be moved:"
            f" the end is a multiple of {ALIGNMENT}, or the region's"
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
        # The garbage collector runs in whichever thread it likes; one that works cannot wait here.
        end = (queues, under_way, file, folder, process)
        threading.Thread(target=_end, args=end, name="hadal-disk-end").start()
        return
    for request in list(under_way):
        request.settle()
    for queue in queues:
        queue.close()
    for request in list(under_way):
        if request.error is not None:
            _log.error("nobody has waited for this: %s", request.error)
    file.close()
    folder.remove()
