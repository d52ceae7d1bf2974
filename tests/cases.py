"""Cases of a test: which run always, and which only where slow tests do."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Any
from zlib import crc32

import pytest


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


def every(**factors: Sequence[Any]) -> pytest.MarkDecorator:
    """Every combination of levels."""
    return pytest.mark.parametrize(tuple(factors), list(product(*factors.values())))
