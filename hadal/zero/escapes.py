"""Views of gathered weights that outlive the use of their bucket: `weight.t()`, kept or returned.

They are plain tensors, so that no class of theirs announces who reads them.
"""

from __future__ import annotations

from hadal.zero.bucket import Bucket

# In how many forwards and backwards every operation is watched behind such a view.
_PHASES = 8


class Escapes:
    """The buckets whose views have outlived a use, and whether every operation is watched."""

    def __init__(self) -> None:
        self._left: dict[Bucket, int] = {}
        self.are_watched = False
        """Whether every operation is watched in the present forward or backward."""

    def begin(self) -> None:
        """A forward or a backward begins."""
        for bucket, left in [*self._left.items()]:
            if left > 1 or bucket.has_other_views:
                self._left[bucket] = left - 1
            else:
                del self._left[bucket]
        self.are_watched = bool(self._left)

    def note(self, bucket: Bucket) -> bool:
        """Look for such views before a bucket is freed; tell whether nobody would announce them."""
        if not bucket.has_other_views:
            return False
        self._left[bucket] = _PHASES
        return not self.are_watched
