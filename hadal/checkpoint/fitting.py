"""Which saved value belongs to which of a model's: by name, as `load_state_dict` does it.

Pure: names, shapes and options; no tensor is read.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hadal.checkpoint.contents import BUFFER, MASTER, WEIGHT, SavedGroup
from hadal.checkpoint.plain import decoded
from hadal.checkpoint.source import Entry, Source
from hadal.errors import CheckpointError, few
from hadal.zero.regroup import has_gone


@dataclass(slots=True)
class Fit:
    """What was found for each of the model's names, and what was not."""

    found: dict[str, str] = field(default_factory=dict)
    """By the model's name: the name under which it was saved."""
    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    misshapen: list[str] = field(default_factory=list)

    def refuse(self, source: Source, *, strict: bool) -> None:
        """Raise where the checkpoint is of another model.

        Raises:
            CheckpointError: a shape differs, or, if `strict`, a name is missing or too many.
        """
        told = []
        if self.misshapen:
            told.append(f"shapes differ: {few(self.misshapen, joint='; ')}")
        if strict and self.missing:
            told.append(f"the checkpoint lacks {few(self.missing)}")
        if strict and self.unexpected:
            told.append(f"the model lacks {few(self.unexpected)}")
        if told:
            remedy = "" if self.misshapen else " Give load_module_strict=False to load the rest."
            raise CheckpointError(
                f"{source.path} does not fit the model: {'. '.join(told)}.{remedy}"
            )


def fit_names(wanted: Iterable[tuple[Sequence[str], tuple[int, ...], str]], source: Source) -> Fit:
    """Look up (names of one value, shape, kind) in a source; a tied parameter has several names.

    `kind` is "weight" or "buffer".
    """
    fit, used = Fit(), set[tuple[str, str]]()
    for names, shape, kind in wanted:
        name, entry = _look_up(names, kind, source)
        if entry is None:
            if not has_gone(names[0]):
                fit.missing.append(names[0])
            continue
        used.add((name, kind))
        if entry.shape != shape:
            fit.misshapen.append(f"{names[0]} is {shape}, and {entry.shape} in the checkpoint")
        fit.found[names[0]] = name
    for name, kind in source.entries:
        there = WEIGHT if kind in (WEIGHT, MASTER) else kind
        if there in (WEIGHT, BUFFER) and (name, there) not in used and not has_gone(name):
            used.add((name, there))
            fit.unexpected.append(name)
    return fit


def _look_up(names: Sequence[str], kind: str, source: Source) -> tuple[str, Entry | None]:
    kinds = (WEIGHT, MASTER) if kind == WEIGHT else (kind,)
    for alias in names:
        name = source.aliases.get(alias, alias)
        for one in kinds:
            if (name, one) in source.entries:
                return name, source.entries[name, one]
    return names[0], None


def exact_kind(name: str, source: Source, *, uses_masters: bool) -> str:
    """Where a parameter's finest values are: in its master, if that is there and wanted."""
    has_weight = (name, WEIGHT) in source.entries
    wants_master = uses_masters or not has_weight
    return MASTER if wants_master and (name, MASTER) in source.entries else WEIGHT


@dataclass(frozen=True, slots=True)
class GroupFit:
    """What a param group takes over, and what it cannot."""

    options: dict[str, Any]
    disputed: tuple[str, ...] = ()
    """Options on which the saved groups of its parameters differ: they stay as they are."""


def fit_groups(
    groups: Sequence[Sequence[str]], saved: Sequence[SavedGroup], found: Mapping[str, str]
) -> list[GroupFit]:
    """What each of the model's param groups, given by its names, takes over from saved ones.

    A group takes what all groups agree on in which its parameters were saved. One without
    parameters takes over from the group of its number, if there are as many.
    """
    group_of = {name: number for number, group in enumerate(saved) for name in group.names}
    options = [dict(decoded(group.options)) for group in saved]
    fits = []
    for number, names in enumerate(groups):
        numbers = {group_of[found[name]] for name in names if found.get(name) in group_of}
        if not names and len(groups) == len(saved):
            numbers = {number}
        of_saved = [options[one] for one in sorted(numbers)]
        first = of_saved[0] if of_saved else {}
        agreed = {
            key: value
            for key, value in first.items()
            if all(key in other and other[key] == value for other in of_saved)
        }
        disputed = {key for one in of_saved for key in one} - agreed.keys()
        fits.append(GroupFit(agreed, tuple(sorted(disputed))))
    return fits
