"""Python's garbage collector, which `disable_python_gc` switches off while an engine lives."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from contextlib import contextmanager

# Objects that a collection scans in less than a millisecond.
_MANY = 10_000


class _Hold:
    """Count of holders that disable the collector; the last one restores it."""

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

    def give_back_old(self) -> None:
        """Do so, and count many new objects as old: the next collection would scan them."""
        is_worth = self._holders == 1 and self._was_enabled and gc.get_count()[0] > _MANY
        if is_worth and not gc.get_freeze_count():  # which counts the frozen ones, one by one
            gc.freeze()
            gc.unfreeze()
        self.give_back()


_hold = _Hold()


@contextmanager
def collector_at_rest() -> Iterator[None]:
    """Disable the collector around work that makes many objects, but no cycles.

    Scanning all objects of a program that has imported torch takes a tenth of a second.
    """
    _hold.take()
    try:
        yield
    finally:
        _hold.give_back_old()


def hold_collector(owner: object) -> weakref.finalize:  # type: ignore[type-arg]
    """Disable the collector until the result is called, or until `owner` is gone."""
    _hold.take()
    return weakref.finalize(owner, _hold.give_back)
