"""The largest micro-batch that fits in a rank's memory, predicted or fitted to runs. Pure.

A rank's memory has a part that is independent of the micro-batch (model states), and one that is
proportional to it (activations).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

_USABLE = 0.95
"""The usable fraction of the memory; fragmentation takes the rest."""


class Need(NamedTuple):
    """The memory that one rank needs, in bytes."""

    fixed: float
    per_sample: float

    def at(self, micro_batch: int) -> float:
        """Return the bytes needed with a micro-batch."""
        return self.fixed + self.per_sample * micro_batch


def predicted(states_nbytes: int, activation_nbytes: int, micro_batch: int) -> Need:
    """Predict the need from model states and the activations of a forward with `micro_batch`."""
    return Need(states_nbytes, activation_nbytes / micro_batch)


def fitted(peaks: Sequence[tuple[int, int]]) -> Need | None:
    """Fit the need to the (micro-batch, peak bytes) of two or more runs; None if inconclusive."""
    if len(peaks) < 2:
        return None
    (small, low), *_, (large, high) = sorted(peaks)
    if large == small or high <= low:
        return None
    per_sample = (high - low) / (large - small)
    return Need(high - per_sample * large, per_sample)


def largest(need: Need, memory_nbytes: int) -> int | None:
    """Return the largest micro-batch that fits, 0 if none does, or None if there is no limit."""
    room = _USABLE * memory_nbytes - need.fixed
    if room < need.per_sample:
        return 0
    return int(room // need.per_sample) if need.per_sample else None


def is_exhausted(reason: str) -> bool:
    """Return whether a failed experiment's message means that it ran out of memory."""
    text = reason.lower()
    words = ("out of memory", "outofmemory", "can't allocate memory", "memoryerror", "sigkill")
    return any(word in text for word in words)
