"""Splits of a list of layers into consecutive parts, one for each stage of a pipeline.

A split is a list of bounds: part `i` has the items from `bounds[i]` up to, not including,
`bounds[i + 1]`.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from hadal.errors import UsageError


def partition_uniform(num_items: int, num_parts: int) -> list[int]:
    """Return bounds of parts of equal length; the first ones have one more if it does not divide.

    If there are fewer items than parts, each part has at most one, and the last parts are empty.

    Raises:
        UsageError: there are no parts, or fewer than no items.
    """
    _check(num_items, num_parts)
    each, more = divmod(num_items, num_parts)
    return [part * each + min(part, more) for part in range(num_parts + 1)]


def partition_balanced(weights: Sequence[float], num_parts: int) -> list[int]:
    """Return bounds for which the heaviest and the lightest part differ little.

    A dynamic program over the last bound. It keeps the best split of every prefix: the one with the
    smallest difference between its parts, and among equals the one with the latest bound. No part
    is empty, unless there are fewer items than parts.

    Raises:
        UsageError: there are no parts.
    """
    count = len(weights)
    _check(count, num_parts)
    if count <= num_parts:
        return partition_uniform(count, num_parts)
    sums = [0, *prefix_sum_inc(weights)]
    # For each prefix: its heaviest and lightest part, and the start of its last part.
    found = [[(weight, weight, 0) for weight in sums]]
    for parts in range(2, num_parts + 1):
        before, row = found[-1], [(0.0, 0.0, 0)] * (count + 1)
        for stop in range(parts, count + 1):
            least = None
            for start in range(parts - 1, stop):
                weight = sums[stop] - sums[start]
                heaviest = max(before[start][0], weight)
                lightest = min(before[start][1], weight)
                if least is None or heaviest - lightest <= least:
                    least = heaviest - lightest
                    row[stop] = heaviest, lightest, start
        found.append(row)
    bounds = [count]
    for row in reversed(found):
        bounds.append(row[bounds[-1]][2])
    return bounds[::-1]


def prefix_sum_inc(weights: Sequence[float]) -> list[float]:
    """Return the sum of the weights up to and including each."""
    return list(accumulate(weights))


def _check(num_items: int, num_parts: int) -> None:
    if num_parts < 1 or num_items < 0:
        raise UsageError(
            f"{num_items} layers cannot be split into {num_parts} stages: expected at least"
            " one stage"
        )
