"""Direct disk I/O: transfers past the system's cache, extents of a file, whole files in blocks.

Making room in the cache takes longer than the disk itself, and evicts the program's other data.
Direct transfers (O_DIRECT) must be page-aligned in memory and in the file.
"""

from __future__ import annotations

import ctypes
import errno
import os
import sys
from bisect import bisect_left, bisect_right, insort
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from itertools import islice, pairwise
from time import perf_counter
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from hadal.device import unforked_memory
from hadal.units import rounded_up

Move: TypeAlias = Callable[[int, Sequence[memoryview], int], int]
"""`os.preadv` or `os.pwritev`."""

_HUGE_NBYTES = 1 << 21
# Give up after this many consecutive transfers of less than a page.
_PATIENCE = 3


def usual_pages(nbytes: int) -> memoryview:
    """Allocate zeroed, page-aligned memory, which a forked process does not inherit."""
    return memoryview(unforked_memory(nbytes))[:nbytes]


def pages(nbytes: int) -> memoryview:
    """Allocate zeroed, page-aligned memory, on huge pages if it is long enough.

    A transfer to huge pages takes few requests to the disk, one to ordinary pages takes hundreds. A
    forked process does not inherit this memory and must not touch it.
    """
    if nbytes < _HUGE_NBYTES:
        return usual_pages(nbytes)
    # A huge page is aligned to its size: allocate one more and use the aligned part.
    memory = unforked_memory(nbytes + _HUGE_NBYTES, on_huge_pages=True)
    start = -ctypes.addressof(ctypes.c_char.from_buffer(memory)) % _HUGE_NBYTES
    return memoryview(memory)[start : start + nbytes]


def moved(move: Move, descriptor: int, parts: Sequence[memoryview], place: int) -> int:
    """Read or write the parts from `place` on, repeating short transfers; return the bytes moved.

    After a short transfer it continues at the last whole page, as a direct transfer must.
    """
    total = sum(map(len, parts))
    done = failures = 0
    while done < total:
        count = move(descriptor, _after(parts, done), place + done)
        if done + count == total:
            return total
        whole = count - count % ALIGNMENT
        done += whole
        failures = 0 if whole else failures + 1
        if not count or failures == _PATIENCE:
            return done + count - whole
    return done


def _after(parts: Sequence[memoryview], skipped: int) -> list[memoryview]:
    """Return the parts without their first `skipped` bytes."""
    left = []
    for part in parts:
        if skipped < len(part):
            left.append(part[skipped:])
        skipped = max(0, skipped - len(part))
    return left


def set_direct(descriptor: int, wanted: bool) -> bool:
    """Enable or disable direct I/O for a file; return whether it is enabled now.

    On file systems without support it stays disabled.
    """
    if not hasattr(os, "O_DIRECT"):
        return False
    import fcntl  # exists on such systems

    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    changed = flags | os.O_DIRECT if wanted else flags & ~os.O_DIRECT
    try:
        fcntl.fcntl(descriptor, fcntl.F_SETFL, changed)
    except OSError:
        if not wanted:
            raise
        return False
    return wanted


# ---- arithmetic ----------------------------------------------------------------------------------

ALIGNMENT = 4096
"""Direct I/O requires offsets, lengths and addresses that are multiples of this."""


class Extent(NamedTuple):
    """Bytes [start, stop)."""

    start: int
    stop: int

    @property
    def nbytes(self) -> int:
        """The number of bytes."""
        return self.stop - self.start


def cut(start: int, stop: int, step: int) -> list[Extent]:
    """Split [start, stop) at multiples of `step`."""
    borders = [start, *range((start // step + 1) * step, stop, step), stop]
    return [Extent(*pair) for pair in pairwise(borders) if pair[0] < pair[1]]


def grouped(blocks: list[Extent], most: int) -> list[list[Extent]]:
    """Group consecutive blocks, with at most `most` in each group."""
    return [blocks[first : first + most] for first in range(0, len(blocks), most)]


def dealt(blocks: list[Extent], shares: int) -> list[list[Extent]]:
    """Divide consecutive blocks evenly over shares; the first ones get the remainder."""
    count, more = divmod(len(blocks), shares)
    stops = [share * count + min(share, more) for share in range(shares + 1)]
    return [blocks[first:stop] for first, stop in pairwise(stops)]


class Room:
    """An allocator of a file's bytes; the file grows if no free extent suffices."""

    def __init__(self) -> None:
        self.end = 0
        """The end of the last taken extent."""
        # In order, never adjacent, never at the end.
        self._free: list[Extent] = []

    def take(self, nbytes: int) -> Extent:
        """Take whole pages for `nbytes` bytes: the smallest free extent that suffices."""
        wanted = rounded_up(nbytes, ALIGNMENT)
        fitting = [free for free in self._free if free.nbytes >= wanted]
        if not wanted or not fitting:
            self.end += wanted
            return Extent(self.end - wanted, self.end)
        free = min(fitting, key=lambda extent: extent.nbytes)
        self._free.remove(free)
        taken = Extent(free.start, free.start + wanted)
        if taken.stop < free.stop:
            insort(self._free, Extent(taken.stop, free.stop))
        return taken

    def give_back(self, extent: Extent) -> None:
        """Free an extent; the end moves down if nothing below it is taken."""
        if not extent.nbytes:
            return
        place = bisect_left(self._free, extent)
        start, stop = extent
        if place < len(self._free) and self._free[place].start == stop:
            stop = self._free.pop(place).stop
        if place and self._free[place - 1].stop == start:
            start = self._free.pop(place - 1).start
        if stop == self.end:
            self.end = start
        else:
            insort(self._free, Extent(start, stop))


# ---- checkpoint files ----------------------------------------------------------------------------

# Blocks bypass the page cache if possible: making room in it takes longer than the disk does, and
# evicts the program's own pages. Whole blocks are written directly (O_DIRECT), and only the
# remainder at the end goes through the cache; reads use the cache for pages that it already has.
# Blocks are on huge pages: a disk needs only a few requests for such a block, but hundreds for
# pages of the usual size, which is two to four times as slow.

BLOCK_NBYTES = 1 << 21
_DIRECT_NBYTES = 1 << 18
# Enough blocks that one has left the processor's cache before it is filled again: if a core fills
# it, as in a virtual machine, it would first have to fetch it from the core that read it.
_AHEAD = 5
# The number of cache misses to wait for, in a file that seems to be cached.
_PATIENCE = 4
# The number of blocks to keep before judging whether keeping takes too long.
_TRIED_BLOCKS = 8


class Output:
    """A writer that collects bytes into blocks and writes them in order to an empty file.

    With `doubled` a thread writes one block while the next is filled. Leaving the context writes
    the rest and waits.
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
        """Copy bytes into the current block, and write it once it is full.

        Raises:
            OSError: these or earlier bytes cannot be written.
        """
        rest = memoryview(given)
        while rest:
            count = min(len(rest), BLOCK_NBYTES - self._filled)
            self._blocks[0][self._filled : self._filled + count] = rest[:count]
            self._filled += count
            rest = rest[count:]
            if self._filled == BLOCK_NBYTES:
                self._flush()

    def _flush(self) -> None:
        """Start writing the full block, and switch to the other."""
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
                # After a chunk of odd length, or on a file system that requires larger ones.
                if error.errno != errno.EINVAL or not self._is_direct:
                    raise
                self._go_direct(False)

    def _go_direct(self, wanted: bool) -> None:
        if wanted != self._is_direct:
            self._is_direct = set_direct(self._descriptor, wanted)


class Kept:
    """A contiguous range of a file, kept in memory between its first read and the next.

    `room` is the number of bytes that may still be kept, in whole blocks; `apart` lists the
    (start, stop) extents of the file that get tensors of their own, which callers may take over.
    Allocating memory may take longer than reading again (if a host must first give it to a virtual
    machine): once it does, no more is kept.
    """

    def __init__(self, room: int, apart: Iterable[tuple[int, int]] = ()) -> None:
        self.room = room
        self.start = self.stop = 0
        """The kept bytes of the file: [start, stop)."""
        self._apart = sorted(extent for extent in apart if extent[0] < extent[1])
        self._starts: list[int] = []
        self._pieces: list[Tensor] = []
        self._blocks = 0
        """The number of kept blocks; then the seconds to keep them, and to read them."""
        self._keeping = self._reading = 0.0

    def between(self, start: int, stop: int) -> Iterator[memoryview]:
        """Yield bytes [start, stop), which must all be kept."""
        number = bisect_right(self._starts, start) - 1
        while start < stop:
            piece, offset = self._pieces[number], start - self._starts[number]
            found = piece[offset : offset + min(stop - start, BLOCK_NBYTES)]
            yield found.numpy().data
            start += len(found)
            number += start == self._starts[number] + len(piece)

    def whole(self, start: int, stop: int) -> Tensor | None:
        """Return the bytes of an `apart` extent, 1-D uint8; None if not all of it is kept."""
        if not self.start <= start <= stop <= self.stop or (start, stop) not in self._apart:
            return None
        return self._pieces[bisect_right(self._starts, start) - 1]

    def take(self, block: memoryview, place: int, seconds: float) -> None:
        """Keep a copy of the block at `place` of the file, read in `seconds`, if there is room.

        The first block may be anywhere, as those before it may come from the cache; the following
        blocks must leave no gap.
        """
        if (self._starts and place != self.stop) or self.room < BLOCK_NBYTES:
            return
        if not self._starts:
            self.start = self.stop = place
        began = perf_counter()
        self.room -= BLOCK_NBYTES
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
        # A second read costs more than the first: the system is asked again for every part.
        if self._blocks >= _TRIED_BLOCKS and self._keeping > 2 * self._reading:
            self.room = 0

    def _add_piece(self) -> None:
        """Allocate memory for the next bytes: an `apart` extent, or a block up to the next one."""
        start = self.stop
        following = bisect_left(self._apart, (start, start))
        begin, stop = (*self._apart, (sys.maxsize, sys.maxsize))[following]
        if begin == start:
            piece = torch.empty(stop - start, dtype=torch.uint8)
        else:
            # Its own memory, which returns to the system when freed. No disk reads into it, and
            # pages of the usual size are available at once, while huge ones may have to be found.
            room = min(begin - start, BLOCK_NBYTES)
            piece = torch.frombuffer(usual_pages(room), dtype=torch.uint8)
        self._starts.append(start)
        self._pieces.append(piece)


def blocks_of(
    descriptor: int, start: int, stop: int, kept: Kept | None = None
) -> Iterator[memoryview]:
    """Yield bytes [start, stop) of a file in order; each block is valid until the next one.

    A thread reads some blocks while the caller uses another. Kept bytes are not read again, and
    bytes that do not come from the cache are kept if there is room.

    Raises:
        OSError: the file cannot be read, or is shorter.
    """
    return kept_first(partial(_blocks_read, descriptor), start, stop, kept)


def kept_first(
    read: Callable[[int, int, Kept | None], Iterator[memoryview]],
    start: int,
    stop: int,
    kept: Kept | None,
) -> Iterator[memoryview]:
    """Yield bytes [start, stop) of a file in order: those that are kept, and the others by `read`.

    If none of them is kept, `read` gets `kept` to keep what it has room for.
    """
    low, high = (kept.start, kept.stop) if kept is not None else (stop, stop)
    low, high = min(max(low, start), stop), max(min(high, stop), start)
    if kept is None or low >= high:
        yield from read(start, stop, kept)
        return
    yield from read(start, low, None)
    yield from kept.between(low, high)
    yield from read(high, stop, None)


def read_into(out: memoryview, descriptor: int, start: int, kept: Kept | None = None) -> None:
    """Fill `out` with the bytes of a file from `start` on; kept bytes are not read again.

    Cached bytes are copied straight into `out`.

    Raises:
        OSError: the file cannot be read, or is shorter.
    """
    stop, done = start + len(out), 0
    if kept is None or min(kept.stop, stop) <= max(kept.start, start):
        file = _Input(descriptor, min(start + BLOCK_NBYTES, stop) - 1)
        while done < len(out):
            count = file.take_cached(out[done : done + BLOCK_NBYTES], start + done)
            if not count:
                break
            done += count
    for block in blocks_of(descriptor, start + done, stop, kept):
        out[done : done + len(block)] = block
        done += len(block)


def read_on(descriptor: int, wanted: bool) -> None:
    """Set whether the system reads ahead in an open file."""
    if hasattr(os, "posix_fadvise"):
        advice = os.POSIX_FADV_NORMAL if wanted else os.POSIX_FADV_RANDOM
        os.posix_fadvise(descriptor, 0, 0, advice)


def _blocks_read(descriptor: int, start: int, stop: int, kept: Kept | None) -> Iterator[memoryview]:
    if start < stop < start + _DIRECT_NBYTES:
        yield memoryview(read_exactly(descriptor, start, stop))
        return
    if start == stop:
        return
    # With the next request already queued, the disk does not pause between requests.
    with _blocks(1 + _AHEAD) as blocks, ThreadPoolExecutor(1, "hadal-reader") as pool:
        # Not its first byte: perhaps only the file's header is cached.
        file, free = _Input(descriptor, min(start + BLOCK_NBYTES, stop) - 1), deque(blocks)
        places = iter(range(start - start % ALIGNMENT, stop, BLOCK_NBYTES))
        asked: deque[tuple[int, memoryview, Future[_Filled]]] = deque()

        def ask(count: int) -> None:
            for place in islice(places, count):
                block = free.popleft()
                nbytes = stop - place
                pending = pool.submit(file.fill, block[: nbytes + -nbytes % ALIGNMENT], place)
                asked.append((place, block, pending))

        ask(_AHEAD)
        while asked:
            ask(1)
            place, block, pending = asked.popleft()
            found = pending.result()
            if place + found.nbytes < min(stop, place + BLOCK_NBYTES):
                raise OSError(errno.EIO, "the file ends too early")
            yield block[max(start - place, 0) : stop - place]
            if kept is not None and not found.was_cached:
                kept.take(block[: found.nbytes], place, found.seconds)
            free.append(block)


def read_exactly(descriptor: int, start: int, stop: int) -> bytearray:
    """Read a short range through the system's cache."""
    found = bytearray(stop - start)
    rest, place = memoryview(found), start
    while rest:
        count = os.preadv(descriptor, [rest], place)
        if not count:
            raise OSError(errno.EIO, "the file ends too early")
        rest, place = rest[count:], place + count
    return found


class _Filled(NamedTuple):
    """The outcome of filling a block."""

    nbytes: int
    was_cached: bool
    """True if all of it was in the cache."""
    seconds: float


class _Input:
    """A reader that uses the cache while the file is in it, and then bypasses it."""

    def __init__(self, descriptor: int, place: int) -> None:
        """Check whether `place`, a byte of the first block to read, is cached."""
        self._descriptor = descriptor
        self.is_cached = hasattr(os, "RWF_NOWAIT")
        """True while everything read was cached, so that it will be again."""
        self._is_direct = False
        self._misses = 0
        # A cache miss starts reading the page, and the following ones, into it unless advised.
        read_on(descriptor, False)
        self.is_cached = self.take_cached(memoryview(bytearray(1)), place) is not None
        read_on(descriptor, self.is_cached)

    def fill(self, block: memoryview, place: int) -> _Filled:
        """Read from `place`, a page's start, until the block is full or the file ends."""
        filled, began = 0, perf_counter()
        while self.is_cached and filled < len(block):
            # One page first: a cache miss starts reading all of the request into the cache.
            limit = len(block) if filled else ALIGNMENT
            count = self.take_cached(block[filled:limit], place + filled)
            if count is None and self._misses < _PATIENCE:
                # A page that is still being read, or moved, is no reason to leave the cache.
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
        """Read as much of a block as is cached; None: nothing is, 0: the file ends."""
        if not self.is_cached:
            return None
        try:
            return os.preadv(self._descriptor, [block], place, os.RWF_NOWAIT)
        except OSError as error:
            # Not cached, or a file system that does not support the flag.
            if error.errno not in (errno.EAGAIN, errno.EOPNOTSUPP, errno.EINVAL):
                raise
            return None

    def _read(self, block: memoryview, place: int) -> int:
        try:
            return os.preadv(self._descriptor, [block], place)
        except OSError as error:
            # A file system that requires requests larger than pages.
            if error.errno != errno.EINVAL or not self._is_direct:
                raise
            self._go_direct(False)
            return os.preadv(self._descriptor, [block], place)

    def _go_direct(self, wanted: bool) -> None:
        if wanted != self._is_direct:
            self._is_direct = set_direct(self._descriptor, wanted)


# Unused blocks, kept because first writes to memory are slow. A forked process makes its own.
_free: list[memoryview] = []
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_free.clear)


@contextmanager
def _blocks(count: int) -> Iterator[list[memoryview]]:
    """Lend blocks of memory on huge pages for the duration of the context."""
    blocks = [_block() for _ in range(count)]
    try:
        yield blocks
    finally:
        _free.extend(blocks)


def _block() -> memoryview:
    try:
        return _free.pop()
    except IndexError:
        return pages(BLOCK_NBYTES)
