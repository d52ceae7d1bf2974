"""The type of a rule: the keys it reads, and a check of the whole configuration."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from hadal.config.section import Section
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


def missing(section: Section, path: str, *names: str) -> Iterator[Fault]:
    """Yield a fault for each key of a section that is on which is not given."""
    for name in names:
        if getattr(section, name) is None:
            yield Fault(f"{path}.{name}", "required while the section is on; add it")
