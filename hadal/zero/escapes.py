"""Views of gathered weights that outlive the use of their bucket: `weight.t()`, kept or returned.

They are plain tensors, so their class announces no reads.

Tests: tests/zero/test_gathering.py
"""

from __future__ import annotations

from hadal.zero.bucket import Bucket

# The number of forwards and backwards with every operation watched behind such a view.
_PHASES = 8


class Escapes:
    """The buckets whose views have outlived a use, and the state of watching every operation."""

    def __init__(self) -> None:
        self._left: dict[Bucket, int] = {}
        self.are_watched = False
        """True: every operation of the present forward or backward is watched."""

    def begin(self) -> None:
        """Begin a forward or a backward."""
        for bucket, left in [*self._left.items()]:
            if left > 1 or bucket.has_other_views:
                self._left[bucket] = left - 1
            else:
                del self._left[bucket]
        self.are_watched = bool(self._left)

    def note(self, bucket: Bucket) -> bool:
        """Look for such views before a bucket is freed; True: their reads go unannounced."""
        if not bucket.has_other_views:
            return False
        self._left[bucket] = _PHASES
        return not self.are_watched
