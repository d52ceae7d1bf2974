"""What ranks announce to gather a bucket, and what each of them does when it is called."""

from __future__ import annotations

from collections.abc import Callable, Collection

from hadal.zero.bucket import Bucket
from hadal.zero.uses import Uses


class Calls:
    """The codes of gathers: a bucket's number, beyond all of them where the gather is exact.

    Beyond these are the numbers of gradients that are to be reduced once more.
    """

    def __init__(self, uses: Uses) -> None:
        self._uses = uses
        self.reduce: Callable[[int], None] = lambda _: None
        """Takes part in such a reduction."""

    def code_of_reduction(self, number: int) -> int:
        """What is announced to reduce gradients once more."""
        return 2 * len(self._uses.buckets) + number

    def _is_reduction(self, code: int) -> bool:
        return code >= self.code_of_reduction(0)

    def code_of(self, number: int, *, exact: bool) -> int:
        """What is announced to gather a bucket; where nothing is rounded, every gather is exact."""
        buckets = self._uses.buckets
        return number + len(buckets) if exact and buckets[number].rounds else number

    def _called(self, code: int) -> tuple[Bucket, bool]:
        """The bucket of a code, and whether its gather is exact."""
        buckets = self._uses.buckets
        return buckets[code % len(buckets)], code >= len(buckets)

    def name(self, code: int) -> str:
        """The bucket's name."""
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
        """Lend, unless nobody asks among those that this rank gathers the bucket with.

        They know the same of it, so all of them take part or none does. In a reduction all do.
        """
        if self._is_reduction(code):
            self.gather(code)
            return
        bucket, exact = self._called(code)
        if any(asker in bucket.gatherers_of(exact=exact) for asker in askers):
            self.lend(code)
