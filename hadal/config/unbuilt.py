"""Detection of keys that request something not built yet, or that have no effect."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from hadal.config.plain import shown
from hadal.config.report import Report
from hadal.config.section import Child, Mark, Section, default_of, mark_of


@dataclass(frozen=True, slots=True)
class _Walk:
    report: Report
    stage: int


def tell_unbuilt(config: Section, report: Report, *, stage: int, skip: tuple[str, ...]) -> None:
    """Report every key whose value would change something that this version does not do."""
    walk = _Walk(report, stage)
    for name in type(config).model_fields:
        if name not in skip:
            _look(walk, config, name, "")


def _look(walk: _Walk, section: Section, name: str, path: str) -> None:
    field = type(section).model_fields[name]
    mark, value = mark_of(field), getattr(section, name)
    here = f"{path}.{name}" if path else name
    if value is None or here in walk.report.faults or walk.stage not in mark.stages:
        return
    if mark.status == "acts":
        for where, child in _children(section, name, value, here):
            _descend(walk, child, where)
        return
    default = default_of(field)
    if not mark.asks(value, default):
        return
    if mark.status == "no effect":
        walk.report.note(here, f"{shown(value)} has no effect")
    else:
        walk.report.not_built(here, _refusal(value, default, mark))


def _refusal(value: Any, default: Any, mark: Mark) -> str:
    if isinstance(value, Section):
        return "the section is not built yet; leave it out"
    if mark.only:
        return f"{shown(value)} is not built yet; choose another"
    why = f": {mark.why}" if mark.why else ""
    return f"{shown(value)} is not built yet{why}; leave it out or give {shown(default)}"


def _descend(walk: _Walk, section: Section, path: str) -> None:
    """Visit the switch first: a section that is off or refused as a whole requests nothing else."""
    switch = section.switch
    if switch is not None:
        before = len(walk.report.unbuilt)
        _look(walk, section, switch, path)
        if not section.is_on or len(walk.report.unbuilt) > before:
            return
    for name in type(section).model_fields:
        if name != switch:
            _look(walk, section, name, path)


def _children(section: Section, name: str, value: Any, here: str) -> Iterator[tuple[str, Section]]:
    raw: Mapping[str, Any] = {"type": getattr(section, "type", None)}
    child = type(section).child(name, raw)
    if child is None:
        return
    if isinstance(value, Section):
        yield here, value
    elif child.shape == "one":
        yield here, _typed(child, value)
    elif child.shape == "map":
        yield from ((f"{here}.{inner}", one) for inner, one in value.items())
    else:
        yield from ((f"{here}[{index}]", one) for index, one in enumerate(value))


def _typed(child: Child, value: Mapping[str, Any]) -> Section:
    """Return checked params, which are stored as a plain dict, as their declared section."""
    return child.model.model_construct(**value)
