"""Python's cycle collector, held still by engines that ask for it (`disable_python_gc`)."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from contextlib import contextmanager


class _Hold:
    """Counts who wants the collector to stand still; the last one gives it back as it was."""

    def __init__(self) -> None:
        self._holders = 0
        self._was_enabled = False

    def take(self) -> None:
        if not self._holders:
            self._was_enabled = gc.isenabled()
            gc.disable()
        self._holders += 1

    def give_back(self) -> None:
        self._holders -= 1
        if not self._holders and self._was_enabled:
            gc.enable()


_hold = _Hold()


@contextmanager
def collector_at_rest() -> Iterator[None]:
    """Hold the collector still for a while: work that leaves no cycles behind, but many objects.

    A look at all objects of a program that has imported torch takes a tenth of a second.
    """
    _hold.take()
    try:
        yield
    finally:
        _hold.give_back()


def hold_collector(owner: object) -> weakref.finalize:  # type: ignore[type-arg]
    """Hold the collector still until the result is called, or until `owner` is gone."""
    _hold.take()
    return weakref.finalize(owner, _hold.give_back)
