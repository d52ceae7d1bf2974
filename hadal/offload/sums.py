"""Checksums of a region, which show that a read returns the data written.

Each cell of a fixed length has a checksum, so reads and writes begin and end at cell borders or at
the region's end. The checksum is a CRC-32, as in checkpoints: it finds damage, but does not protect
against forgery.
"""

from __future__ import annotations

import zlib
from array import array

from hadal.errors import UsageError
from hadal.offload.extents import Extent

CELL_NBYTES = 8192
"""Two pages: 4096 elements of two bytes, the smallest unit that training reads."""


class Sums:
    """The checksums of one region. Each cell is written or read by one thread at a time."""

    def __init__(self, name: str, nbytes: int) -> None:
        self._name = name
        self._nbytes = nbytes
        # Each cell's sum with an additional high bit; 0 if nothing was written.
        self._found = array("Q", bytes(8 * -(-nbytes // CELL_NBYTES)))

    def check_borders(self, extent: Extent) -> None:
        """Check that a read or write consists of whole cells.

        Raises:
            UsageError: it does not.
        """
        start, stop = extent
        if start % CELL_NBYTES or (stop % CELL_NBYTES and stop != self._nbytes):
            raise UsageError(
                f"bytes {start} to {stop} of '{self._name}' cannot be transferred: with checksums"
                f" both ends must be multiples of {CELL_NBYTES}, or the region's end"
            )

    def forget(self, extent: Extent) -> None:
        """Drop the sums of an extent that is about to be overwritten."""
        for cell in _cells(extent):
            self._found[cell] = 0

    def keep(self, extent: Extent, contents: memoryview) -> None:
        """Store the sums of the contents written."""
        for cell, part in zip(_cells(extent), _parts(contents), strict=True):
            self._found[cell] = _sum(part)

    def damaged(self, extent: Extent, contents: memoryview) -> int | None:
        """Return the start of the first cell that differs from the data written, or None."""
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
