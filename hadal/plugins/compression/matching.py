"""The modules that the groups of a technique select."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from torch import nn

from hadal.errors import Fault
from hadal.plugins.compression.layers import compressible, why_not


@dataclass(frozen=True, slots=True)
class Match:
    """One module of a group."""

    technique: str
    group: str
    """The group's name in the configuration."""
    pattern: int
    """Index of the pattern that named it."""
    name: str
    """The module's full name."""
    module: nn.Module
    params: Any
    """The group's `params`."""

    @property
    def path(self) -> str:
        """The group's JSON path."""
        return f"compression_training.{self.technique}.different_groups.{self.group}"

    def offset(self, shared: int) -> int:
        """Return the updates before the group begins: its own number, or that of all groups."""
        own: int | None = self.params.schedule_offset
        return shared if own is None else own


def matches_of(
    model: nn.Module,
    technique: str,
    groups: Mapping[str, Any],
    kinds: tuple[type[nn.Module], ...],
    faults: list[Fault],
) -> list[Match]:
    """Return the modules that a technique's groups select; append faults to `faults`.

    A pattern is searched in full names; `*` selects every module of `kinds` that can be changed.
    """
    everything = list(model.named_modules())
    modules = [(name, module) for name, module in everything if compressible(module)]
    found: list[Match] = []
    owners: dict[str, str] = {}
    for group, section in groups.items():
        if not section.modules:
            where = f"compression_training.{technique}.different_groups.{group}.modules"
            faults.append(
                Fault(where, '[] matches no module; use ["*"] for all, or remove the group')
            )
        for index, pattern in enumerate(section.modules):
            where = f"compression_training.{technique}.different_groups.{group}.modules[{index}]"
            named = list(_named(modules, pattern, kinds, where, faults, everything))
            for name, module in named:
                if name in owners:
                    faults.append(
                        Fault(
                            where, f"{pattern!r} matches {name}, which {owners[name]} matches too"
                        )
                    )
                    continue
                owners[name] = f"{group!r}.modules[{index}]"
                found.append(Match(technique, group, index, name, module, section.params))
    return found


def _named(
    modules: list[tuple[str, nn.Module]],
    pattern: str,
    kinds: tuple[type[nn.Module], ...],
    where: str,
    faults: list[Fault],
    everything: list[tuple[str, nn.Module]],
) -> Iterator[tuple[str, nn.Module]]:
    if pattern == "*":
        every = [(name, module) for name, module in modules if isinstance(module, kinds)]
        usable = [(name, module) for name, module in every if why_not(module) is None]
        if not usable:
            known = ", ".join(kind.__name__ for kind in kinds)
            because = "".join(f"; {name}: {why_not(module)}" for name, module in every[:3])
            faults.append(Fault(where, f"'*' matches no module of {known}{because}"))
        yield from usable
        return
    search = searched(pattern, where, faults)
    if search is None:
        return
    named = [(name, module) for name, module in modules if search(name)]
    if not named:
        others = [(name, module) for name, module in everything if search(name)]
        what = "matches no module" + _near(pattern, modules)
        if others:
            kind, known = type(others[0][1]).__name__, ", ".join(one.__name__ for one in kinds)
            what = f"matches {others[0][0]}: it is {kind}; this technique supports {known}"
        faults.append(Fault(where, f"{pattern!r} {what}"))
    for name, module in named:
        reason = why_not(module)
        if not isinstance(module, kinds):
            known = ", ".join(kind.__name__ for kind in kinds)
            reason = f"it is {type(module).__name__}; this technique supports {known}"
        if reason is None:
            yield name, module
        else:
            faults.append(Fault(where, f"{pattern!r} matches {name}: {reason}"))


def searched(
    pattern: str, where: str, faults: list[Fault]
) -> Callable[[str], re.Match[str] | None] | None:
    """Return the search for a pattern; None if it is no regular expression, which is a fault."""
    try:
        return re.compile(pattern).search
    except re.error as error:
        faults.append(Fault(where, f"{pattern!r} is not a regular expression: {error}"))
        return None


def _near(pattern: str, modules: list[tuple[str, nn.Module]]) -> str:
    names = [name for name, _ in modules]
    leaf = pattern.rpartition(".")[2]
    found = [name for name in names if name.rpartition(".")[2].startswith(leaf)] if leaf else []
    found = found or get_close_matches(pattern, names, n=3, cutoff=0.4) or names
    shown = ", ".join(found[:3])
    return f"; it could match {shown}" if shown else "; the model has no suitable module"
