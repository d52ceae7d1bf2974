"""How large a micro-batch a rank's memory admits: predicted first, then from what was seen. Pure.

A rank holds what does not depend on the micro-batch (model states) and what grows with it
(activations).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

_USABLE = 0.95
"""Of the memory: the rest is lost between blocks."""


class Need(NamedTuple):
    """Bytes of one rank."""

    fixed: float
    per_sample: float

    def at(self, micro_batch: int) -> float:
        """What a micro-batch takes."""
        return self.fixed + self.per_sample * micro_batch


def predicted(states_nbytes: int, activation_nbytes: int, micro_batch: int) -> Need:
    """From model states, and the activations of one forward with this micro-batch."""
    return Need(states_nbytes, activation_nbytes / micro_batch)


def seen(peaks: Sequence[tuple[int, int]]) -> Need | None:
    """From the peaks of two or more runs, (micro-batch, bytes) each; None: they do not tell."""
    if len(peaks) < 2:
        return None
    (small, low), *_, (large, high) = sorted(peaks)
    if large == small or high <= low:
        return None
    per_sample = (high - low) / (large - small)
    return Need(high - per_sample * large, per_sample)


def largest(need: Need, memory_nbytes: int) -> int | None:
    """The largest micro-batch that fits, 0 if none does; None: there is no limit."""
    room = _USABLE * memory_nbytes - need.fixed
    if room < need.per_sample:
        return 0
    return int(room // need.per_sample) if need.per_sample else None


def is_exhausted(reason: str) -> bool:
    """Whether an experiment's last words are those of one that ran out of memory."""
    told = reason.lower()
    words = ("out of memory", "outofmemory", "can't allocate memory", "memoryerror", "sigkill")
    return any(word in told for word in words)
