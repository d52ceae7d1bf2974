"""Checksums of what was written: what is read must be that.

Each block that is written is summed by itself, so a read must begin and end where writes did, or at
the borders of blocks. The sum is a CRC-32, as in checkpoints.
"""

from __future__ import annotations

import threading
import zlib
from bisect import bisect_left

from hadal.errors import UsageError
from hadal.offload.extents import Extent


class Sums:
    """The checksums of one region."""

    def __init__(self, name: str) -> None:
        self._name = name
        # In order, none over another.
        self._extents: list[Extent] = []
        self._found: dict[Extent, int] = {}
        self._lock = threading.Lock()

    def forget(self, extent: Extent) -> None:
        """Drop those of what will be written over.

        Raises:
            UsageError: a part of a written block would be left.
        """
        with self._lock:
            for inside in self._inside(extent):
                self._extents.remove(inside)
                del self._found[inside]

    def keep(self, extent: Extent, contents: memoryview) -> None:
        """Remember the sum of a block that is written."""
        found = zlib.crc32(contents)
        with self._lock:
            self._extents.insert(bisect_left(self._extents, extent), extent)
            self._found[extent] = found

    def check_covered(self, extent: Extent) -> None:
        """See that all of an extent was written, and is known by whole blocks.

        Raises:
            UsageError: it is not.
        """
        with self._lock:
            place = extent.start
            for inside in self._inside(extent):
                if inside.start != place:
                    break
                place = inside.stop
        if place != extent.stop:
            raise UsageError(
                f"bytes {place} to {extent.stop} of {self._name} are read and were not written"
                " before; wait for the write first"
            )

    def damaged(self, extent: Extent, contents: memoryview) -> Extent | None:
        """The first block inside an extent that is not what was written."""
        with self._lock:
            expected = [(inside, self._found[inside]) for inside in self._inside(extent)]
        for (start, stop), found in expected:
            if zlib.crc32(contents[start - extent.start : stop - extent.start]) != found:
                return Extent(start, stop)
        return None

    def _inside(self, extent: Extent) -> list[Extent]:
        first = bisect_left(self._extents, Extent(extent.start, extent.start))
        if first and self._extents[first - 1].stop > extent.start:
            first -= 1
        last = bisect_left(self._extents, Extent(extent.stop, extent.stop))
        overlapping = self._extents[first:last]
        for start, stop in overlapping[:1] + overlapping[-1:]:
            if start < extent.start or extent.stop < stop:
                raise UsageError(
                    f"bytes {extent.start} to {extent.stop} of {self._name} cut through {start} to"
                    f" {stop}, which were written together; with checksums they are read and"
                    " written together again"
                )
        return overlapping
