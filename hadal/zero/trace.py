"""Traces: the order in which one forward or backward used the buckets of a model."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from typing import NamedTuple

_DIGEST_BITS = 48


class Kind(Enum):
    """The kinds of passes, each of which has its own traces."""

    FORWARD = "forward"
    EVALUATION = "forward without gradients"
    BACKWARD = "backward"


class Use(NamedTuple):
    """One use of a bucket; the uses of a trace are numbered from 0."""

    bucket: int
    """The bucket's number."""
    until: int
    """The number of the use before which this one ends (the number of uses: at the very end)."""
    reduced: int = 0
    """The number of reductions that every rank has started before this use begins."""


def digest_of(*values: object, bits: int = _DIGEST_BITS) -> int:
    """Return a number of `bits` bits that is the same in every process and differs for others."""
    digest = hashlib.blake2b(repr(values).encode(), digest_size=8)
    return int.from_bytes(digest.digest(), "big") >> (64 - bits)


@dataclass(frozen=True)
class Trace:
    """The uses of one pass, in the order in which they began."""

    uses: tuple[Use, ...]

    @cached_property
    def digest(self) -> int:
        """A number that is equal for equal traces."""
        return digest_of(self.uses)

    @cached_property
    def path_digest(self) -> int:
        """A number that is equal for traces of the same path."""
        return digest_of(self.path)

    @property
    def moments(self) -> tuple[int, ...]:
        """The ends of uses and starts of reductions, as numbers that are larger the later."""
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


def describe_parting(
    paths: Sequence[Sequence[int]], owners: Sequence[str], names: Sequence[str]
) -> str:
    """Describe where paths first differ: the name of the bucket that each owner used there."""
    common, longest = 0, max(map(len, paths))
    # Equal paths end together.
    while common < longest and len({tuple(path[common : common + 1]) for path in paths}) == 1:
        common += 1
    after = f"after {names[paths[0][common - 1]]}" if common else "at the beginning"
    went = [
        f"{owner} {'used ' + names[path[common]] if common < len(path) else 'reached the end'}"
        for owner, path in zip(owners, paths, strict=True)
    ]
    return f"{after}, {'; '.join(went)}"
