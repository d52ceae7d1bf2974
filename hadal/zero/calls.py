"""The codes that ranks announce to gather a bucket, and each rank's part in the gather.

Tests: tests/zero/test_rounds.py
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from hadal.zero.bucket import Bucket
from hadal.zero.uses import Uses


class Calls:
    """The codes of gathers: a bucket's number, plus the number of buckets for an exact gather.

    Higher codes are gradients to reduce once more.
    """

    def __init__(self, uses: Uses) -> None:
        self._uses = uses
        self.reduce: Callable[[int], None] = lambda _: None
        """Takes part in such a reduction."""

    def code_of_reduction(self, number: int) -> int:
        """Return the code that announces another reduction of gradients."""
        return 2 * len(self._uses.buckets) + number

    def _is_reduction(self, code: int) -> bool:
        return code >= self.code_of_reduction(0)

    def code_of(self, number: int, *, exact: bool) -> int:
        """Return the code that announces a gather; if nothing is rounded, every gather is exact."""
        buckets = self._uses.buckets
        return number + len(buckets) if exact and buckets[number].rounds else number

    def _called(self, code: int) -> tuple[Bucket, bool]:
        """Return the bucket of a code, and True if its gather is exact."""
        buckets = self._uses.buckets
        return buckets[code % len(buckets)], code >= len(buckets)

    def name(self, code: int) -> str:
        """Return the bucket's name."""
        if self._is_reduction(code):
            return "gradients that come late"
        return self._called(code)[0].name

    def gather(self, code: int) -> None:
        """Make a bucket's weights readable here, or reduce gradients."""
        if self._is_reduction(code):
            self.reduce(code - self.code_of_reduction(0))
            return
        bucket, exact = self._called(code)
        bucket.unshard(exact=exact)

    def lend(self, code: int) -> None:
        """Give this rank's shard to those that gather."""
        bucket, exact = self._called(code)
        bucket.serve(exact=exact)

    def lend_to(self, code: int, askers: Collection[int]) -> None:
        """Lend, unless no rank that this one gathers the bucket with has asked.

        They all know which ranks asked, so all take part or none does. In a reduction all do.
        """
        if self._is_reduction(code):
            self.gather(code)
            return
        bucket, exact = self._called(code)
        if any(asker in bucket.gatherers_of(exact=exact) for asker in askers):
            self.lend(code)
