"""Transfers between memory and a file that bypass the system's cache if possible.

Making room in the cache takes longer than the disk itself, and evicts the program's other data.
Direct transfers (O_DIRECT) must be page-aligned in memory and in the file.
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
