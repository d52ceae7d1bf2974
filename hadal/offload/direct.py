"""Bytes between memory and a file, past the system's cache where that can be.

To find room in the cache takes longer than the disk does, and what was there is lost to the
program. What goes past it (O_DIRECT) begins on a page, in memory and in the file.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Sequence
from typing import TypeAlias

from hadal.device import unforked_memory
from hadal.offload.extents import ALIGNMENT

Move: TypeAlias = Callable[[int, Sequence[memoryview], int], int]
"""`os.preadv` or `os.pwritev`."""

_HUGE_NBYTES = 1 << 21
# Transfers without a whole page in a row, after which there will be no more.
_PATIENCE = 3


def usual_pages(nbytes: int) -> memoryview:
    """Memory that begins on a page, full of zeros. A forked process does not have it."""
    return memoryview(unforked_memory(nbytes))[:nbytes]


def pages(nbytes: int) -> memoryview:
    """Memory that begins on a page, full of zeros, on huge pages where it is long enough.

    A disk takes a huge page in a few requests, pages of the usual size in hundreds. A forked
    process does not have this memory, and must not touch it.
    """
    if nbytes < _HUGE_NBYTES:
        return usual_pages(nbytes)
    # A huge page begins at a multiple of its length: somewhere in what is longer by one.
    memory = unforked_memory(nbytes + _HUGE_NBYTES, on_huge_pages=True)
    start = -ctypes.addressof(ctypes.c_char.from_buffer(memory)) % _HUGE_NBYTES
    return memoryview(memory)[start : start + nbytes]


def moved(move: Move, descriptor: int, parts: Sequence[memoryview], place: int) -> int:
    """Read or write from `place` on until the parts are through or nothing moves; how many bytes.

    What came short goes on from the last whole page, as a direct transfer must.
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
    """The parts without their first bytes."""
    left = []
    for part in parts:
        if skipped < len(part):
            left.append(part[skipped:])
        skipped = max(0, skipped - len(part))
    return left


def set_direct(descriptor: int, wanted: bool) -> bool:
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
