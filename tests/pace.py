"""Times on a busy machine: load adds seconds, a fault adds a fraction of a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator


def paces(seconds: float) -> Iterator[float]:
    """The time that a test takes for itself, and longer ones for machines that are busy."""
    yield from (seconds, 4 * seconds, 16 * seconds)


def holds_at_some_pace(check: Callable[[float], bool], seconds: float) -> bool:
    """True if a check of times, relative to the given seconds, holds with any of `paces`."""
    return any(check(pace) for pace in paces(seconds))
