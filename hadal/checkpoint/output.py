"""Bytes on their way into a file: past the system's cache where that can be, and one block behind.

A checkpoint is larger than what a cache is for: to find room in it takes longer than the disk does,
and what was there is lost to the program. So whole blocks are written directly (O_DIRECT, from
memory that begins on a page), and only what is left at the end by way of the cache.
"""

from __future__ import annotations

import errno
import mmap
import os
from concurrent.futures import Future, ThreadPoolExecutor

_BLOCK_NBYTES = 1 << 22


class Output:
    """Collects bytes into blocks and writes these in order, to the descriptor of an empty file.

    With `doubled` one block is written by a thread while the next is filled. Leaving it as a
    context writes what is left, and waits.
    """

    def __init__(self, descriptor: int, *, doubled: bool) -> None:
        self._descriptor = descriptor
        self._doubled = doubled
        self._blocks = [memoryview(_pages()), memoryview(_pages())]
        self._filled = 0
        self._pool: ThreadPoolExecutor | None = None
        self._pending: Future[None] | None = None
        self._is_direct = False
        self._has_begun = False

    def __enter__(self) -> Output:
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
        """Turn the cache off or on; where a file system does not know it, it stays on."""
        if not hasattr(os, "O_DIRECT") or wanted == self._is_direct:
            return
        import fcntl  # such systems have it

        flags = fcntl.fcntl(self._descriptor, fcntl.F_GETFL)
        changed = flags | os.O_DIRECT if wanted else flags & ~os.O_DIRECT
        try:
            fcntl.fcntl(self._descriptor, fcntl.F_SETFL, changed)
        except OSError:
            if not wanted:
                raise
        else:
            self._is_direct = wanted


def _pages() -> mmap.mmap:
    """Memory for a block, which begins on a page; none is taken before it is written to."""
    return mmap.mmap(-1, _BLOCK_NBYTES)
