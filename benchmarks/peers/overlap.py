"""The overlap of communication with computation in a profiler's trace."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

Interval = tuple[float, float]

# The names of kernels, and on a CPU of the ranges around the work of gloo's threads.
_COMMUNICATION = ("nccl", "rccl", "oneccl", "gloo")
# Computation on a CPU: matrix products are most of it, and contain no other range.
_CPU_COMPUTE = ("aten::mm", "aten::addmm", "aten::bmm", "aten::_scaled_dot_product")


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


def read_trace(path: Path) -> Overlap:
    """The overlap in a Chrome trace of torch's profiler: of kernels, or else of CPU ranges."""
    events = [e for e in json.loads(path.read_text())["traceEvents"] if e.get("ph") == "X"]
    kernels = [e for e in events if e.get("cat") == "kernel"]
    communication, compute = [], []
    for event in kernels or events:
        name = str(event["name"]).lower()
        place = (event["ts"] / 1e6, (event["ts"] + event["dur"]) / 1e6)
        if any(word in name for word in _COMMUNICATION):
            communication.append(place)
        elif kernels or name.startswith(_CPU_COMPUTE):
            compute.append(place)
    return measured(communication, compute)
