"""Bytes on their way to a file and back, in blocks.

They go past the system's cache where that can be: to find room in it takes longer than the disk
does, and what was there is lost to the program. So whole blocks are written directly (O_DIRECT),
and only what is left at the end by way of the cache; what is read comes from the cache as far as it
is there. Blocks lie on huge pages: a disk takes such a one in a few requests, pages of the usual
size in hundreds, which is two to four times as slow.
"""

from __future__ import annotations

import errno
import os
import sys
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager

import torch
from torch import Tensor

from hadal.offload.direct import pages, set_direct, usual_pages
from hadal.offload.extents import ALIGNMENT

_BLOCK_NBYTES = 1 << 22
_DIRECT_NBYTES = 1 << 18


class Output:
    """Collects bytes into blocks and writes these in order, to the descriptor of an empty file.

    With `doubled` one block is written by a thread while the next is filled. Leaving it as a
    context writes what is left, and waits.
    """

    def __init__(self, descriptor: int, *, doubled: bool) -> None:
        self._descriptor = descriptor
        self._doubled = doubled
        self._memory = _two_blocks()
        self._blocks: list[memoryview] = []
        self._filled = 0
        self._pool: ThreadPoolExecutor | None = None
        self._pending: Future[None] | None = None
        self._is_direct = False
        self._has_begun = False

    def __enter__(self) -> Output:
        self._blocks = self._memory.__enter__()
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        try:
            self._wait()
            if kind is None and self._filled:
                self._go_direct(False)
                self._put(self._blocks[0][: self._filled])
        finally:
            if self._pool is not None:
                self._pool.shutdown()
            self._memory.__exit__(None, None, None)

    def write(self, given: bytes | memoryview) -> None:
        """Take bytes; they are copied.

        Raises:
            OSError: these, or those before, cannot be written.
        """
        rest = memoryview(given)
        while rest:
            count = min(len(rest), _BLOCK_NBYTES - self._filled)
            self._blocks[0][self._filled : self._filled + count] = rest[:count]
            self._filled += count
            rest = rest[count:]
            if self._filled == _BLOCK_NBYTES:
                self._flush()

    def _flush(self) -> None:
        """Begin to write the block that is full, and go on with the other."""
        if not self._has_begun:
            self._has_begun = True
            self._go_direct(True)
        self._wait()
        if self._doubled:
            self._pool = self._pool or ThreadPoolExecutor(1, "hadal-writer")
            self._pending = self._pool.submit(self._put, self._blocks[0])
        else:
            self._put(self._blocks[0])
        self._blocks.reverse()
        self._filled = 0

    def _wait(self) -> None:
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def _put(self, rest: memoryview) -> None:
        while rest:
            try:
                rest = rest[os.write(self._descriptor, rest) :]
            except OSError as error:
                # After a piece of odd length, or on a file system that wants larger ones.
                if error.errno != errno.EINVAL or not self._is_direct:
                    raise
                self._go_direct(False)

    def _go_direct(self, wanted: bool) -> None:
        if wanted != self._is_direct:
            self._is_direct = set_direct(self._descriptor, wanted)


class Kept:
    """The beginning of a file, held in memory from its first reading for the next one.

    `room` tells the bytes that may still be taken, in whole blocks; `apart` the (start, stop) of
    extents of the file that are held in tensors of their own, for whoever wants to go on with them.
    """

    def __init__(self, room: int, apart: Iterable[tuple[int, int]] = ()) -> None:
        self.room = room
        self.nbytes = 0
        """How much of the file is here."""
        self._apart = sorted(extent for extent in apart if extent[0] < extent[1])
        self._starts: list[int] = []
        self._pieces: list[Tensor] = []

    def between(self, start: int, stop: int) -> Iterator[memoryview]:
        """What is here of bytes [start, stop)."""
        stop = min(stop, self.nbytes)
        number = bisect_right(self._starts, start) - 1
        while start < stop:
            piece, offset = self._pieces[number], start - self._starts[number]
            found = piece[offset : offset + min(stop - start, _BLOCK_NBYTES)]
            yield found.numpy().data
            start += len(found)
            number += start == self._starts[number] + len(piece)

    def whole(self, start: int, stop: int) -> Tensor | None:
        """One of the extents held apart: its bytes, 1-D uint8; None where it is not all here."""
        number = bisect_right(self._starts, start) - 1
        if stop > self.nbytes or (start, stop) not in self._apart:
            return None
        return self._pieces[number]

    def take(self, block: memoryview, place: int) -> None:
        """Keep a copy of the block at `place` of the file, if there is room for it."""
        if place != self.nbytes or self.room < _BLOCK_NBYTES:
            return
        self.room -= _BLOCK_NBYTES
        given = torch.frombuffer(block, dtype=torch.uint8)
        while len(given):
            if not self._pieces or self.nbytes == self._starts[-1] + len(self._pieces[-1]):
                self._add_piece()
            target = self._pieces[-1][self.nbytes - self._starts[-1] :][: len(given)]
            target.copy_(given[: len(target)])
            given = given[len(target) :]
            self.nbytes += len(target)

    def _add_piece(self) -> None:
        """Memory for what follows: an extent that is held apart, or a block up to the next one."""
        start = self.nbytes
        following = bisect_left(self._apart, (start, start))
        begin, stop = (*self._apart, (sys.maxsize, sys.maxsize))[following]
        if begin == start:
            piece = torch.empty(stop - start, dtype=torch.uint8)
        else:
            # Memory of its own, which the system has back when this is let go of. No disk reads
            # into it: pages of the usual size are there at once, huge ones may have to be found.
            room = min(begin - start, _BLOCK_NBYTES)
            piece = torch.frombuffer(usual_pages(room), dtype=torch.uint8)
        self._starts.append(start)
        self._pieces.append(piece)


def blocks_of(
    descriptor: int, start: int, stop: int, kept: Kept | None = None
) -> Iterator[memoryview]:
    """Bytes [start, stop) of a file in order; each block lasts until the next is asked for.

    One is read by a thread while another is looked at. What is kept is not read again, and what
    does not come from the cache is kept, as far as there is room.

    Raises:
        OSError: it cannot be read, or is shorter.
    """
    if kept is not None:
        yield from kept.between(start, stop)
        start = max(start, min(stop, kept.nbytes))
    if start < stop < start + _DIRECT_NBYTES:
        yield memoryview(_read_exactly(descriptor, start, stop))
        start = stop
    if start == stop:
        return
    with _two_blocks() as blocks, ThreadPoolExecutor(1, "hadal-reader") as pool:
        file, place = _Input(descriptor), start - start % ALIGNMENT
        pending = pool.submit(file.fill, _up_to(blocks[0], stop - place), place)
        while start < stop:
            following = place + _BLOCK_NBYTES
            if place + pending.result() < min(stop, following):
                raise OSError(errno.EIO, "the file ends too early")
            if following < stop:
                more = _up_to(blocks[1], stop - following)
                pending = pool.submit(file.fill, more, following)
            yield blocks[0][start - place : stop - place]
            if kept is not None and not file.is_cached:
                kept.take(blocks[0], place)
            blocks.reverse()
            start = place = following


def _read_exactly(descriptor: int, start: int, stop: int) -> bytearray:
    """A short piece: it comes through the cache, which reads on for the next one."""
    found = bytearray(stop - start)
    rest, place = memoryview(found), start
    while rest:
        count = os.preadv(descriptor, [rest], place)
        if not count:
            raise OSError(errno.EIO, "the file ends too early")
        rest, place = rest[count:], place + count
    return found


def _up_to(block: memoryview, nbytes: int) -> memoryview:
    """As much of a block as whole pages of so many bytes take."""
    return block[: nbytes + -nbytes % ALIGNMENT]


class _Input:
    """A file as it is read: from the cache while it is there, then past it."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self.is_cached = hasattr(os, "RWF_NOWAIT")
        """Whether all that was read was in the cache: it will be there again."""
        self._is_direct = False

    def fill(self, block: memoryview, place: int) -> int:
        """Read from `place` on, where a page begins, until the block is full, or the file ends.

        Returns how many bytes there are.
        """
        filled = 0
        if self.is_cached:
            # A page first: what misses the cache begins to be read into it.
            for limit in (ALIGNMENT, len(block)):
                filled += self._take_cached(block[filled:limit], place + filled)
            self.is_cached = filled == len(block)
        while filled < len(block):
            self._go_direct(filled % ALIGNMENT == 0)
            count = self._read(block[filled:], place + filled)
            if not count:
                break
            filled += count
        return filled

    def _take_cached(self, block: memoryview, place: int) -> int:
        """As much of a block as the cache has."""
        try:
            return os.preadv(self._descriptor, [block], place, os.RWF_NOWAIT)
        except OSError as error:
            # Not there; or a file system that cannot tell.
            if error.errno not in (errno.EAGAIN, errno.EOPNOTSUPP, errno.EINVAL):
                raise
            return 0

    def _read(self, block: memoryview, place: int) -> int:
        try:
            return os.preadv(self._descriptor, [block], place)
        except OSError as error:
            # A file system that wants larger pieces than pages.
            if error.errno != errno.EINVAL or not self._is_direct:
                raise
            self._go_direct(False)
            return os.preadv(self._descriptor, [block], place)

    def _go_direct(self, wanted: bool) -> None:
        if wanted != self._is_direct:
            self._is_direct = set_direct(self._descriptor, wanted)


# Blocks that nobody uses: fresh memory is slow to fill.
_free: list[memoryview] = []


@contextmanager
def _two_blocks() -> Iterator[list[memoryview]]:
    """Two blocks of memory on huge pages, for as long as the context lasts."""
    blocks = [_block(), _block()]
    try:
        yield blocks
    finally:
        _free.extend(blocks)


def _block() -> memoryview:
    try:
        return _free.pop()
    except IndexError:
        return pages(_BLOCK_NBYTES)
