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
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from itertools import islice
from time import perf_counter
from typing import NamedTuple

import torch
from torch import Tensor

from hadal.offload.direct import pages, set_direct, usual_pages
from hadal.offload.extents import ALIGNMENT

_BLOCK_NBYTES = 1 << 21
_DIRECT_NBYTES = 1 << 18
# So many that a block has left the processor's cache when it is filled again: where a core fills
# it, as in a virtual machine, it would first have to fetch it from the core that looked at it.
_AHEAD = 5
# Pages that are waited for, in a file that the cache has as it seems.
_PATIENCE = 4
# So many are kept before it is judged whether that takes too long.
_TRIED_BLOCKS = 8


class Output:
    """Collects bytes into blocks and writes these in order, to the descriptor of an empty file.

    With `doubled` one block is written by a thread while the next is filled. Leaving it as a
    context writes what is left, and waits.
    """

    def __init__(self, descriptor: int, *, doubled: bool) -> None:
        self._descriptor = descriptor
        self._doubled = doubled
        self._memory = _blocks(2)
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
    """A part of a file, held in memory from its first reading for the next one.

    `room` tells the bytes that may still be taken, in whole blocks; `apart` the (start, stop) of
    extents of the file that are held in tensors of their own, for whoever wants to go on with them.
    Memory has to be found, which may take longer than to read again (where a host has first to give
    it to a virtual machine): once it does, no more is kept.
    """

    def __init__(self, room: int, apart: Iterable[tuple[int, int]] = ()) -> None:
        self.room = room
        self.start = self.stop = 0
        """The bytes of the file that are here: [start, stop)."""
        self._apart = sorted(extent for extent in apart if extent[0] < extent[1])
        self._starts: list[int] = []
        self._pieces: list[Tensor] = []
        self._blocks = 0
        """How many have been kept; the seconds for that, and those that it took to read them."""
        self._keeping = self._reading = 0.0

    def between(self, start: int, stop: int) -> Iterator[memoryview]:
        """Bytes [start, stop), which are all here."""
        number = bisect_right(self._starts, start) - 1
        while start < stop:
            piece, offset = self._pieces[number], start - self._starts[number]
            found = piece[offset : offset + min(stop - start, _BLOCK_NBYTES)]
            yield found.numpy().data
            start += len(found)
            number += start == self._starts[number] + len(piece)

    def whole(self, start: int, stop: int) -> Tensor | None:
        """One of the extents held apart: its bytes, 1-D uint8; None where it is not all here."""
        if not self.start <= start <= stop <= self.stop or (start, stop) not in self._apart:
            return None
        return self._pieces[bisect_right(self._starts, start) - 1]

    def take(self, block: memoryview, place: int, seconds: float) -> None:
        """Keep a copy of the block at `place` of the file, if there is room for it.

        It took so many seconds to read. The first may begin anywhere, as what came before may be in
        the cache; what follows it is taken without a gap.
        """
        if (self._starts and place != self.stop) or self.room < _BLOCK_NBYTES:
            return
        if not self._starts:
            self.start = self.stop = place
        began = perf_counter()
        self.room -= _BLOCK_NBYTES
        given = torch.frombuffer(block, dtype=torch.uint8)
        while len(given):
            if not self._pieces or self.stop == self._starts[-1] + len(self._pieces[-1]):
                self._add_piece()
            target = self._pieces[-1][self.stop - self._starts[-1] :][: len(given)]
            target.copy_(given[: len(target)])
            given = given[len(target) :]
            self.stop += len(target)
        self._blocks += 1
        self._keeping += perf_counter() - began
        self._reading += seconds
        # To read again takes more than to read once: the system is asked anew for every part.
        if self._blocks >= _TRIED_BLOCKS and self._keeping > 2 * self._reading:
            self.room = 0

    def _add_piece(self) -> None:
        """Memory for what follows: an extent that is held apart, or a block up to the next one."""
        start = self.stop
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

    Some are read by a thread while another is looked at. What is kept is not read again, and what
    does not come from the cache is kept, as far as there is room.

    Raises:
        OSError: it cannot be read, or is shorter.
    """
    low, high = (kept.start, kept.stop) if kept is not None else (stop, stop)
    low, high = min(max(low, start), stop), max(min(high, stop), start)
    if kept is None or low >= high:
        yield from _blocks_read(descriptor, start, stop, kept)
        return
    yield from _blocks_read(descriptor, start, low, None)
    yield from kept.between(low, high)
    yield from _blocks_read(descriptor, high, stop, None)


def read_into(out: memoryview, descriptor: int, start: int, kept: Kept | None = None) -> None:
    """Fill `out` with the bytes of a file from `start` on; what is kept is not read again.

    What lies in the cache is copied from there into its place.

    Raises:
        OSError: it cannot be read, or is shorter.
    """
    stop, done = start + len(out), 0
    if kept is None or min(kept.stop, stop) <= max(kept.start, start):
        file = _Input(descriptor, min(start + _BLOCK_NBYTES, stop) - 1)
        while done < len(out):
            count = file.take_cached(out[done : done + _BLOCK_NBYTES], start + done)
            if not count:
                break
            done += count
    for block in blocks_of(descriptor, start + done, stop, kept):
        out[done : done + len(block)] = block
        done += len(block)


def read_on(descriptor: int, wanted: bool) -> None:
    """Whether the system reads more of an open file into its cache than is asked for."""
    if hasattr(os, "posix_fadvise"):
        advice = os.POSIX_FADV_NORMAL if wanted else os.POSIX_FADV_RANDOM
        os.posix_fadvise(descriptor, 0, 0, advice)


def _blocks_read(descriptor: int, start: int, stop: int, kept: Kept | None) -> Iterator[memoryview]:
    if start < stop < start + _DIRECT_NBYTES:
        yield memoryview(_read_exactly(descriptor, start, stop))
        return
    if start == stop:
        return
    # A disk that finds the next request waiting does not pause between two of them.
    with _blocks(1 + _AHEAD) as blocks, ThreadPoolExecutor(1, "hadal-reader") as pool:
        # Not its first byte: a file's header may be there alone.
        file, free = _Input(descriptor, min(start + _BLOCK_NBYTES, stop) - 1), deque(blocks)
        places = iter(range(start - start % ALIGNMENT, stop, _BLOCK_NBYTES))
        asked: deque[tuple[int, memoryview, Future[_Filled]]] = deque()

        def ask(count: int) -> None:
            for place in islice(places, count):
                block = free.popleft()
                pending = pool.submit(file.fill, _up_to(block, stop - place), place)
                asked.append((place, block, pending))

        ask(_AHEAD)
        while asked:
            ask(1)
            place, block, pending = asked.popleft()
            found = pending.result()
            if place + found.nbytes < min(stop, place + _BLOCK_NBYTES):
                raise OSError(errno.EIO, "the file ends too early")
            yield block[max(start - place, 0) : stop - place]
            if kept is not None and not found.was_cached:
                kept.take(block[: found.nbytes], place, found.seconds)
            free.append(block)


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


class _Filled(NamedTuple):
    """What has been read."""

    nbytes: int
    was_cached: bool
    """Whether all of it was in the cache."""
    seconds: float


class _Input:
    """A file as it is read: from the cache while it is there, then past it."""

    def __init__(self, descriptor: int, place: int) -> None:
        """Look whether the cache has `place`, a byte of the first block that will be read."""
        self._descriptor = descriptor
        self.is_cached = hasattr(os, "RWF_NOWAIT")
        """Whether all that was read was in the cache: it will be there again."""
        self._is_direct = False
        self._misses = 0
        # What misses the cache begins to be read into it, and what follows too, unless told so.
        read_on(descriptor, False)
        self.is_cached = self.take_cached(memoryview(bytearray(1)), place) is not None
        read_on(descriptor, self.is_cached)

    def fill(self, block: memoryview, place: int) -> _Filled:
        """Read from `place` on, where a page begins, until the block is full, or the file ends."""
        filled, began = 0, perf_counter()
        while self.is_cached and filled < len(block):
            # A page first: what misses the cache begins to be read into it.
            limit = len(block) if filled else ALIGNMENT
            count = self.take_cached(block[filled:limit], place + filled)
            if count is None and self._misses < _PATIENCE:
                # A page that is on its way, or being moved, is no reason to leave the cache.
                self._misses += 1
                count = self._read(block[filled : filled + ALIGNMENT], place + filled)
            if count == 0:
                break
            self.is_cached = count is not None
            filled += count or 0
        while not self.is_cached and filled < len(block):
            self._go_direct(filled % ALIGNMENT == 0)
            count = self._read(block[filled:], place + filled)
            if not count:
                break
            filled += count
        return _Filled(filled, self.is_cached, perf_counter() - began)

    def take_cached(self, block: memoryview, place: int) -> int | None:
        """As much of a block as the cache has; None: nothing. 0: the file ends."""
        if not self.is_cached:
            return None
        try:
            return os.preadv(self._descriptor, [block], place, os.RWF_NOWAIT)
        except OSError as error:
            # Not there; or a file system that cannot tell.
            if error.errno not in (errno.EAGAIN, errno.EOPNOTSUPP, errno.EINVAL):
                raise
            return None

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


# Blocks that nobody uses: fresh memory is slow to fill. A forked process makes its own.
_free: list[memoryview] = []
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_free.clear)


@contextmanager
def _blocks(count: int) -> Iterator[list[memoryview]]:
    """Blocks of memory on huge pages, for as long as the context lasts."""
    blocks = [_block() for _ in range(count)]
    try:
        yield blocks
    finally:
        _free.extend(blocks)


def _block() -> memoryview:
    try:
        return _free.pop()
    except IndexError:
        return pages(_BLOCK_NBYTES)
