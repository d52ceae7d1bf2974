"""Cases of a test: which run always, and which only where slow tests do."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Any
from zlib import crc32

import pytest
from contracts.cover import pairwise_cover


def mark_slow_cells(items: Sequence[pytest.Item], *, are_all_there: bool) -> None:
    """Mark the cells that are slow by a mark of their test, which names those or the others.

    Raises:
        UsageError: a mark names a cell that its test does not have; looked for if `are_all_there`.
    """
    unknown: dict[str, set[str]] = {}
    for item in items:
        for mark in (item.get_closest_marker("slow_cells"), item.get_closest_marker("fast_cells")):
            if mark is None:
                continue
            name, _, cell = item.nodeid.removesuffix("]").partition("[")
            unknown.setdefault(name, set(mark.args)).discard(cell)
            if (cell in mark.args) == (mark.name == "slow_cells"):
                item.add_marker("slow")
    lost = {name: sorted(cells) for name, cells in unknown.items() if cells}
    if lost and are_all_there:
        raise pytest.UsageError(f"slow_cells and fast_cells name cells that do not exist: {lost}")


def is_in_part(nodeid: str, part: str) -> bool:
    """Return True if a test belongs to a part such as "2/3": a share of all tests, by their names.

    A test stays in its part when others come and go, so that runs of all parts leave none out.
    """
    number, parts = map(int, part.split("/"))
    if not 1 <= number <= parts:
        raise ValueError(f"--part {part}: expected a number from 1 to {parts} before the slash")
    return crc32(nodeid.encode()) % parts == number - 1


def rarely(*values: Any, **more: Any) -> Any:
    """A case that is slow, of one value or, for several names, of as many."""
    return pytest.param(*values, marks=pytest.mark.slow, **more)


def diagonal(**factors: Sequence[Any]) -> pytest.MarkDecorator:
    """Every combination of levels; slow but for a few, which have each level once at least."""
    longest = max(map(len, factors.values()))
    chosen = {tuple(n % len(levels) for levels in factors.values()) for n in range(longest)}
    return _combinations(factors, chosen)


def pairs(**factors: Sequence[Any]) -> pytest.MarkDecorator:
    """Every combination of levels; slow but for a few, in which each two levels meet."""
    numbers = {name: [str(n) for n in range(len(levels))] for name, levels in factors.items()}
    chosen = {tuple(map(int, cell.values())) for cell in pairwise_cover(numbers)}
    return _combinations(factors, chosen)


def _combinations(
    factors: dict[str, Sequence[Any]], chosen: set[tuple[int, ...]]
) -> pytest.MarkDecorator:
    cases = [
        pytest.param(
            *(levels[n] for levels, n in zip(factors.values(), numbers, strict=True)),
            marks=() if numbers in chosen else pytest.mark.slow,
        )
        for numbers in product(*(range(len(levels)) for levels in factors.values()))
    ]
    return pytest.mark.parametrize(tuple(factors), cases)
