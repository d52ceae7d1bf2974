"""The type of a rule: the keys it reads, and a check of the whole configuration.

Tests: tests/config/test_rules.py
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from hadal.config.top_level import Config
from hadal.errors import Fault

Check = Callable[[Config], Iterator[Fault]]


@dataclass(frozen=True, slots=True)
class Rule:
    """A contradiction. `reads` are the keys that must be valid for the check to mean anything."""

    reads: tuple[str, ...]
    check: Check


def reading(*reads: str) -> Callable[[Check], Rule]:
    """Turn a function into a rule that reads the given keys."""
    return lambda check: Rule(reads, check)
