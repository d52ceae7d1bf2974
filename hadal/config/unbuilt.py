"""Detection of keys that request something not built yet, or that do nothing as given."""

from __future__ import annotations

from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any

from hadal.config.plain import shown
from hadal.config.report import Report
from hadal.config.section import Mark, Section, default_of, mark_of


@dataclass(frozen=True, slots=True)
class _Walk:
    report: Report
    stage: int
    reports_idle: bool = True
    """True to note keys that do nothing; not below a switch turned off on purpose."""

    def note_idle(self, path: str, message: str) -> None:
        if self.reports_idle:
            self.report.note_idle(path, message)


def report_unbuilt(config: Section, report: Report, *, stage: int, skip: tuple[str, ...]) -> None:
    """Report every key whose value would change something that this version does not do.

    A key that requests something and gets nothing is noted: one without effect, one that acts at
    other stages only, and one below a switch that is not given. A switch that is given and off
    means that silence is wanted.
    """
    walk = _Walk(report, stage)
    for name in type(config).model_fields:
        if name not in skip:
            _look(walk, config, name, "")


def _look(walk: _Walk, section: Section, name: str, path: str) -> None:
    field = type(section).model_fields[name]
    mark, value = mark_of(field), getattr(section, name)
    here = f"{path}.{name}" if path else name
    if value is None or here in walk.report.faults:
        return
    default = default_of(field)
    if walk.stage not in mark.stages:
        is_off = isinstance(value, Section) and not value.is_on
        if mark.asks(value, default) and not is_off:
            walk.note_idle(here, f"has no effect at stage {walk.stage}, only at {_stages(mark)}")
    elif mark.status == "acts":
        child = type(section).child(name, {"type": getattr(section, "type", None)})
        for where, inner in child.sections(here, value) if child is not None else ():
            _descend(walk, inner, where)
    elif not mark.asks(value, default):
        return
    elif mark.status == "no effect":
        walk.note_idle(here, f"{shown(value)} has no effect")
    elif mark.serves:
        walk.note_idle(here, f"has no effect without {mark.serves}, which is not built yet")
    else:
        walk.report.not_built(here, _refusal(value, default, mark))


def _stages(mark: Mark) -> str:
    *most, last = (str(stage) for stage in mark.stages)
    return f"stages {', '.join(most)} and {last}" if most else f"stage {last}"


def _refusal(value: Any, default: Any, mark: Mark) -> str:
    if isinstance(value, Section):
        return "the section is not built yet; leave it out"
    if mark.only and default in mark.only:
        return f"{shown(value)} is not built yet; leave the section out"
    if mark.only:
        return f"{shown(value)} is not built yet; choose another"
    why = f": {mark.why}" if mark.why else ""
    return f"{shown(value)} is not built yet{why}; leave it out or set {shown(default)}"


def _descend(walk: _Walk, section: Section, path: str) -> None:
    """Visit the switch first: a section that is off or refused as a whole requests nothing else."""
    if section.switch is not None:
        owner, _, switch = section.switch.rpartition(".")
        before = len(walk.report.unbuilt)
        where = f"{path}.{owner}" if owner else path
        _look(walk, attrgetter(owner)(section) if owner else section, switch, where)
        if len(walk.report.unbuilt) > before:
            return
        here = f"{path}.{section.switch}"
        if not section.is_on:
            if not section.is_switched and here not in walk.report.autos:
                _note_without(walk, section, path, here)
            return
    elif "enabled" in section.model_fields_set and not section.enabled:  # type: ignore[attr-defined]
        walk = replace(walk, reports_idle=False)
    for name in type(section).model_fields:
        if name != section.switch:
            _look(walk, section, name, path)


def _note_without(walk: _Walk, section: Section, path: str, switch: str) -> None:
    """Note each key below that requests something, although the section's switch is not given."""
    for name in [n for n in type(section).model_fields if n in section.model_fields_set]:
        field, value = type(section).model_fields[name], getattr(section, name)
        here = f"{path}.{name}"
        if isinstance(value, Section):
            _note_without(walk, value, here, switch)
        elif mark_of(field).asks(value, default_of(field)):
            walk.note_idle(here, f"has no effect without {switch}")
