"""A reward for trl's scripts, which load it by its dotted name."""

from __future__ import annotations


def variety(completions: list[str], **_: object) -> list[float]:
    """Return the number of different words of each completion."""
    return [float(len(set(completion.split()))) for completion in completions]
