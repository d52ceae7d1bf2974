"""Traces: the order in which one forward or backward used the buckets of a model.

Tests: tests/zero/test_planner.py, tests/zero/test_foresight.py
"""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

_DIGEST_BITS = 48


class Kind(Enum):
    """The kinds of work that have a trace of their own."""

    FORWARD = "forward"
    EVALUATION = "forward without gradients"
    BACKWARD = "backward"


class Use(NamedTuple):
    """One use of a bucket; the uses of a trace are numbered from 0."""

    bucket: int
    """The bucket's number."""
    until: int
    """It is over before the use of this number begins (the number of uses: at the very end)."""
    reduced: int = 0
    """How many reductions every rank has started before it begins."""


def digest_of(*values: object, bits: int = _DIGEST_BITS) -> int:
    """Return a number of so many bits: equal for the same numbers in every process, for others
    almost never.
    """
    told = hashlib.blake2b(repr(values).encode(), digest_size=8)
    return int.from_bytes(told.digest(), "big") >> (64 - bits)


@dataclass(frozen=True)
class Trace:
    """The uses of one pass, in the order in which they began."""

    uses: tuple[Use, ...]

    @cached_property
    def digest(self) -> int:
        """Equal for equal traces."""
        return digest_of(self.uses)

    @cached_property
    def path_digest(self) -> int:
        """Equal for traces of one path."""
        return digest_of(self.path)

    @property
    def moments(self) -> tuple[int, ...]:
        """Ends of uses and starts of reductions, as numbers of which the larger ones are later."""
        return (*(use.until for use in self.uses), *(-use.reduced for use in self.uses))

    def at(self, moments: Sequence[int]) -> Trace:
        """Return the same path with other `moments`."""
        count = len(self.uses)
        ends, starts = moments[:count], moments[count:]
        lines = zip(self.path, ends, starts, strict=True)
        return Trace(tuple(Use(bucket, end, -start) for bucket, end, start in lines))

    @property
    def path(self) -> tuple[int, ...]:
        """The numbers of the buckets used, without the ends of their uses."""
        return tuple(use.bucket for use in self.uses)


class Recorder:
    """A recorder of the uses of one pass."""

    def __init__(self) -> None:
        self._buckets: list[int] = []
        self._ends: list[int | None] = []
        self._open: dict[int, int] = {}
        self._reductions: list[tuple[int, int]] = []

    def begin(self) -> None:
        """Clear the record."""
        self._buckets.clear()
        self._ends.clear()
        self._open.clear()
        self._reductions.clear()

    def need(self, bucket: int) -> None:
        """Begin a use of a bucket."""
        self._open[bucket] = len(self._buckets)
        self._buckets.append(bucket)
        self._ends.append(None)

    def done(self, bucket: int) -> int | None:
        """End the present use of a bucket; return its number, None if there is no such use."""
        number = self._open.pop(bucket, None)
        if number is not None:
            self._ends[number] = len(self._buckets)
        return number

    def reduce(self, bucket: int) -> None:
        """Record a started reduction; `bucket` is -1 for one whose uses are not recorded."""
        self._reductions.append((len(self._buckets), bucket))

    def trace(self) -> Trace:
        """Return the trace since the beginning."""
        last = len(self._buckets)
        pairs = zip(self._buckets, self._ends, strict=True)
        uses = [Use(b, last if end is None else end) for b, end in pairs]
        final = {use.bucket: use.until for use in uses}
        # A bucket that no gradient came for was reduced early: next time it may be used first.
        starts = (max(at, final.get(bucket, 0)) for at, bucket in self._reductions)
        latest = list(accumulate(starts, max))
        return Trace(
            tuple(use._replace(reduced=bisect_right(latest, i)) for i, use in enumerate(uses))
        )


def describe_parting(
    paths: Sequence[Sequence[int]], owners: Sequence[str], names: Sequence[str]
) -> str:
    """Describe where paths part: the bucket that each owner used there, by name."""
    common, longest = 0, max(map(len, paths))
    # Paths that do not part at all end together.
    while common < longest and len({tuple(path[common : common + 1]) for path in paths}) == 1:
        common += 1
    after = f"after {names[paths[0][common - 1]]}" if common else "at the beginning"
    told = [
        f"{owner} {'used ' + names[path[common]] if common < len(path) else 'came to the end'}"
        for owner, path in zip(owners, paths, strict=True)
    ]
    return f"{after}, {'; '.join(told)}"
