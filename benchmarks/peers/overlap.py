"""Arithmetic of intervals of time: how much of one set overlaps with another."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

Interval = tuple[float, float]


@dataclass(frozen=True)
class Overlap:
    """Seconds of communication, of computation, and of both at once."""

    communication_s: float
    compute_s: float
    both_s: float

    @property
    def share(self) -> float | None:
        """The fraction of communication that overlaps with computation; None if there is none."""
        return self.both_s / self.communication_s if self.communication_s else None


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The same times as disjoint intervals, in order."""
    result: list[Interval] = []
    for start, stop in sorted(i for i in intervals if i[0] < i[1]):
        if result and start <= result[-1][1]:
            result[-1] = (result[-1][0], max(stop, result[-1][1]))
        else:
            result.append((start, stop))
    return result


def common(one: list[Interval], other: list[Interval]) -> float:
    """The total length of the intersection; both arguments come from `union`."""
    total, at = 0.0, 0
    for start, stop in one:
        while at < len(other) and other[at][1] <= start:
            at += 1
        index = at
        while index < len(other) and other[index][0] < stop:
            total += min(stop, other[index][1]) - max(start, other[index][0])
            index += 1
    return total


def measured(communication: Iterable[Interval], compute: Iterable[Interval]) -> Overlap:
    """The totals of two sets of intervals, in seconds."""
    one, other = union(communication), union(compute)
    return Overlap(
        sum(stop - start for start, stop in one),
        sum(stop - start for start, stop in other),
        common(one, other),
    )
