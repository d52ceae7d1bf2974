"""Bytes on their way to a file and back, in blocks.

What is written goes past the system's cache where that can be: to find room in it takes longer than
the disk does, and what was there is lost to the program. So whole blocks are written directly
(O_DIRECT, from memory that begins on a page), and only what is left at the end by way of the cache.
What is read comes through the cache: it is read twice, once for its checksum.
"""

from __future__ import annotations

import errno
import mmap
import os
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager

_BLOCK_NBYTES = 1 << 24


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
            self._is_direct = _set_direct(self._descriptor, wanted)


def blocks_of(descriptor: int, start: int, stop: int) -> Iterator[memoryview]:
    """Bytes [start, stop) of a file in order; each block lasts until the next is asked for.

    One is read by a thread while another is looked at.

    Raises:
        OSError: it cannot be read, or is shorter.
    """
    if stop - start < _BLOCK_NBYTES:
        yield memoryview(_read_exactly(descriptor, start, stop))
        return
    place = start
    with _two_blocks() as blocks, ThreadPoolExecutor(1, "hadal-reader") as pool:
        pending = pool.submit(_fill, descriptor, blocks[0], place)
        while place < stop:
            count = pending.result()
            if place + count < min(stop, place + _BLOCK_NBYTES):
                raise OSError(errno.EIO, "the file ends too early")
            following = place + _BLOCK_NBYTES
            if following < stop:
                pending = pool.submit(_fill, descriptor, blocks[1], following)
            yield blocks[0][: min(stop - place, _BLOCK_NBYTES)]
            blocks.reverse()
            place = following


def _read_exactly(descriptor: int, start: int, stop: int) -> bytearray:
    found = bytearray(stop - start)
    rest, place = memoryview(found), start
    while rest:
        count = os.preadv(descriptor, [rest], place)
        if not count:
            raise OSError(errno.EIO, "the file ends too early")
        rest, place = rest[count:], place + count
    return found


def _fill(descriptor: int, block: memoryview, place: int) -> int:
    """Read from `place` on until the block is full, or the file ends; how many bytes."""
    filled = 0
    while filled < len(block):
        count = os.preadv(descriptor, [block[filled:]], place + filled)
        if not count:
            break
        filled += count
    return filled


def _set_direct(descriptor: int, wanted: bool) -> bool:
    """Turn the cache off or on for a file, and say whether it is off now.

    Where a file system does not know it, the cache stays on.
    """
    if not hasattr(os, "O_DIRECT"):
        return False
    import fcntl  # such systems have it

    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    changed = flags | os.O_DIRECT if wanted else flags & ~os.O_DIRECT
    try:
        fcntl.fcntl(descriptor, fcntl.F_SETFL, changed)
    except OSError:
        if not wanted:
            raise
        return False
    return wanted


# Blocks that nobody uses: fresh memory is slow to fill.
_free: list[memoryview] = []


@contextmanager
def _two_blocks() -> Iterator[list[memoryview]]:
    """Two blocks of memory that begin on a page, for as long as the context lasts."""
    blocks = [_block(), _block()]
    try:
        yield blocks
    finally:
        _free.extend(blocks)


def _block() -> memoryview:
    try:
        return _free.pop()
    except IndexError:
        return memoryview(mmap.mmap(-1, _BLOCK_NBYTES))
