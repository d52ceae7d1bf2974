"""Matching of saved values to a model's values by name, as `load_state_dict` does.

Pure functions of names, shapes and options; no tensor is read.
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

_NEXT = "\n  "


@dataclass(slots=True)
class Fit:
    """The saved name of each of the model's values, and the mismatches."""

    found: dict[str, str] = field(default_factory=dict)
    """The saved name by the model's name."""
    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    misshapen: list[str] = field(default_factory=list)

    def refuse(self, source: Source, *, strict: bool) -> None:
        """Raise if the checkpoint belongs to another model.

        Raises:
            CheckpointError: a shape differs, or, if `strict`, a name is missing or unexpected.
        """
        faults = []
        if self.misshapen:
            faults.append(f"shapes differ:\n  {few(self.misshapen, joint=_NEXT)}")
        if strict and self.missing:
            faults.append(f"the checkpoint lacks {few(self.missing)}")
        if strict and self.unexpected:
            faults.append(f"the model lacks {few(self.unexpected)}")
        if faults:
            remedy = "" if self.misshapen else " Pass load_module_strict=False to load the rest."
            raise CheckpointError(
                f"{source.path} does not fit the model: {'. '.join(faults)}.{remedy}"
            )


def fit_names(wanted: Iterable[tuple[Sequence[str], tuple[int, ...], str]], source: Source) -> Fit:
    """Look up (names of one value, shape, kind) in a source; a tied parameter has several names.

    `kind` is "weight" or "buffer".
    """
    fit, used = Fit(), set[str]()
    for names, shape, kind in wanted:
        name, entry = _look_up(names, kind, source)
        if entry is None:
            if not has_gone(names[0]):
                fit.missing.append(names[0])
            continue
        # Another library may store a tied parameter under each of its names.
        used.update(source.aliases.get(one, one) for one in (name, *names))
        if entry.shape != shape:
            fit.misshapen.append(f"{names[0]} is {shape}, but {entry.shape} in the checkpoint")
        fit.found[names[0]] = name
    for name, kind in source.entries:
        there = WEIGHT if kind in (WEIGHT, MASTER) else kind
        if there in (WEIGHT, BUFFER) and name not in used and not has_gone(name):
            used.add(name)
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
    """Return the kind with a parameter's most precise values: its master if saved and wanted."""
    has_weight = (name, WEIGHT) in source.entries
    wants_master = uses_masters or not has_weight
    return MASTER if wants_master and (name, MASTER) in source.entries else WEIGHT


@dataclass(frozen=True, slots=True)
class GroupFit:
    """The options that a param group loads, and those that it cannot."""

    options: dict[str, Any]
    disputed: tuple[str, ...] = ()
    """Options on which the saved groups of its parameters differ: these keep their values."""


def fit_groups(
    groups: Sequence[Sequence[str]], saved: Sequence[SavedGroup], found: Mapping[str, str]
) -> list[GroupFit]:
    """Return the options that each of the model's param groups loads from the saved groups.

    Each group is given by its parameters' names. It loads the options on which all the saved groups
    of its parameters agree. A group without parameters loads those of the saved group with its
    index, if the number of groups is the same.
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
