"""Validation of prepared JSON into frozen sections: types and ranges, each fault with its path."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from pydantic import ValidationError

from hadal.config.general import General
from hadal.config.plain import expected, found
from hadal.config.report import Report
from hadal.config.section import Section, Typed
from hadal.config.top_level import Config
from hadal.config.values import spelled_numbers

SectionType = TypeVar("SectionType", bound=Section)
Location = Sequence[int | str]


def validate(prepared: Mapping[str, Any], report: Report) -> dict[str, Any]:
    """Return the top-level values and sections given in the JSON, without faulty keys."""
    general = {name: prepared[name] for name in General.model_fields if name in prepared}
    checked = validate_section(General, general, report)
    values: dict[str, Any] = {name: getattr(checked, name) for name in checked.model_fields_set}
    for name, raw in prepared.items():
        child = Config.child(name, prepared)
        if child is not None:
            values[name] = validate_section(child.model, raw, report, name)
    return values


def validate_section(
    model: type[SectionType], raw: Mapping[str, Any], report: Report, path: str = ""
) -> SectionType:
    """Return a section; a faulty value is reported and replaced by its default."""
    values = dict(raw)
    if issubclass(model, Typed) and isinstance(values.get("params"), Mapping):
        values["params"] = _typed_params(model, values, report, path)
    while True:
        try:
            return model.model_validate(values)
        except ValidationError as error:
            # A key that may be one of several kinds fails once for each of them.
            problems = error.errors(include_url=False, include_context=False)
            for leaf in dict.fromkeys(tuple(_leaf(model, one["loc"])) for one in problems):
                _report_leaf(model, values, leaf, report, path)
                _drop(values, leaf)


def _typed_params(
    model: type[Typed], raw: Mapping[str, Any], report: Report, path: str
) -> dict[str, Any]:
    """Validate params against the section's type; keep only the ones that were set."""
    params = validate_section(model.params_of(raw), raw["params"], report, f"{path}.params")
    given = params.model_fields_set - set(params.model_extra or {})
    return {name: getattr(params, name) for name in raw["params"] if name in given} | (
        {name: spelled_numbers(value) for name, value in (params.model_extra or {}).items()}
    )


def _leaf(model: type[Section], location: Location) -> Location:
    """Truncate a location at the key that it belongs to; anything deeper is part of its value."""
    depth = 0
    while depth < len(location):
        name = location[depth]
        depth += 1
        child = model.child(str(name), {}) if name in model.model_fields else None
        if child is None:
            break
        model = child.model
        depth += child.shape != "one" and depth < len(location)
    return location[:depth]


def _report_leaf(
    model: type[Section], values: Any, leaf: Location, report: Report, path: str
) -> None:
    here = path
    field = None
    for name in leaf:
        if isinstance(name, int):
            here += f"[{name}]"
        else:
            here = f"{here}.{name}" if here else name
            field = model.model_fields.get(name, field)
            child = model.child(name, {}) if name in model.model_fields else None
            model = child.model if child is not None else model
        values = values[name]
    wanted = expected(field) if field is not None else "something else"
    report.fault(here, f"expected {wanted}, got {found(values)}")


def _drop(values: Any, leaf: Location) -> None:
    """Remove a faulty value, so that the others can be validated."""
    for name in leaf[:-1]:
        values = values[name]
    if isinstance(values, dict):
        values.pop(leaf[-1], None)
    else:
        values[leaf[-1]] = {}
