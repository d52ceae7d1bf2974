"""Checksums of what was written: what is read must be that.

A region is summed in cells of a fixed length, so reads and writes begin and end at their borders or
at the region's end. The sum is a CRC-32, as in checkpoints: it finds damage, and is no proof
against a forger.
"""

from __future__ import annotations

import zlib
from array import array

from hadal.errors import UsageError
from hadal.offload.extents import Extent

CELL_NBYTES = 8192
"""Two pages: what holds 4096 elements of two bytes, the least that a training reads apart."""


class Sums:
    """The checksums of one region. Each cell is written or read by one thread at a time."""

    def __init__(self, name: str, nbytes: int) -> None:
        self._name = name
        self._nbytes = nbytes
        # For each cell its sum and one bit above it; 0 where nothing was written.
        self._found = array("Q", bytes(8 * -(-nbytes // CELL_NBYTES)))

    def check_borders(self, extent: Extent) -> None:
        """See that a read or write consists of whole cells.

        Raises:
            UsageError: it does not.
        """
        start, stop = extent
        if start % CELL_NBYTES or (stop % CELL_NBYTES and stop != self._nbytes):
            raise UsageError(
                f"bytes {start} to {stop} of '{self._name}' cannot be moved: with checksums both"
                f" ends are multiples of {CELL_NBYTES}, or the region's end"
            )

    def forget(self, extent: Extent) -> None:
        """Drop those of what is being written over."""
        for cell in _cells(extent):
            self._found[cell] = 0

    def keep(self, extent: Extent, contents: memoryview) -> None:
        """Remember those of what was written."""
        for cell, part in zip(_cells(extent), _parts(contents), strict=True):
            self._found[cell] = _sum(part)

    def damaged(self, extent: Extent, contents: memoryview) -> int | None:
        """Where the first cell begins that does not read as it was written, or never was."""
        for cell, part in zip(_cells(extent), _parts(contents), strict=True):
            if self._found[cell] != _sum(part):
                return cell * CELL_NBYTES
        return None


def _cells(extent: Extent) -> range:
    return range(extent.start // CELL_NBYTES, -(-extent.stop // CELL_NBYTES))


def _parts(contents: memoryview) -> list[memoryview]:
    starts = range(0, len(contents), CELL_NBYTES)
    return [contents[start : start + CELL_NBYTES] for start in starts]


def _sum(part: memoryview) -> int:
    return 1 << 32 | zlib.crc32(part)
