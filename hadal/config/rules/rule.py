"""What a rule is: the keys it reads, and a look at the whole configuration."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from hadal.config.top_level import Config
from hadal.errors import Fault

Check = Callable[[Config], Iterator[Fault]]


@dataclass(frozen=True, slots=True)
class Rule:
    """A contradiction. `reads` are the keys that it must trust to say anything."""

    reads: tuple[str, ...]
    check: Check


def reading(*reads: str) -> Callable[[Check], Rule]:
    """Make a rule of a function, and say which keys it reads."""
    return lambda check: Rule(reads, check)
