"""Conversion of raw JSON to current names: resolves old names, leftovers, "auto" and typos."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hadal.config.plain import found
from hadal.config.report import Report
from hadal.config.section import Child, Section, mark_of
from hadal.config.top_level import Config
from hadal.errors import nearest

AUTO = "auto"
_TUNING = "for the autotuner: use `hadal run --autotuning tune`, or set a single value"
_COMMENTS = ("_", "//", "$")


def prepare(model: type[Section], raw: Any, report: Report, path: str = "") -> dict[str, Any]:
    """Return a section's declared keys under current names, without "auto" and leftovers."""
    if not isinstance(raw, Mapping):
        report.fault(path, f"expected an object, got {found(raw)}")
        return {}
    kept: dict[str, Any] = {}
    for old, value in raw.items():
        name = _todays_name(model, str(old), raw, report, path)
        if name is None:
            continue
        if name in model.model_fields:
            _take(kept, model, (name, value, raw), report, path)
        elif value != AUTO:
            kept[name] = value
    _miss(model, raw, report, path)
    return kept


def join(path: str, name: str) -> str:
    """Return the JSON path of a key in a section."""
    return f"{path}.{name}" if path else name


def _todays_name(
    model: type[Section], name: str, raw: Mapping[str, Any], report: Report, path: str
) -> str | None:
    """Return the declared key for a name, if any; add notes on renamed keys to the report."""
    here = join(path, name)
    if name in model.model_fields:
        return name
    new = model.aliases.get(name) or model.renamed.get(name)
    if new is not None and new in raw:
        report.fault(here, f'duplicates "{new}", which is given too; keep "{new}"')
        return None
    if new is not None:
        if name in model.renamed:
            report.note(here, f'an old name, read as "{new}"')
        return new
    if name in model.leftovers:
        report.note(here, model.leftovers[name])
        return None
    if name in model.moved:
        report.fault(here, f'has moved; put it into "{model.moved[name]}"')
        return None
    if model.is_open():
        return name
    _unknown(model, name, report, path)
    return None


def _unknown(model: type[Section], name: str, report: Report, path: str) -> None:
    here = join(path, name)
    known = [*model.model_fields, *model.renamed, *model.aliases, *model.moved]
    near = nearest(name, known)
    if model is Config and name.startswith(_COMMENTS):
        return
    if name in model.elsewhere:
        report.fault(here, f"unknown key; leave it out: {model.elsewhere[name]}")
    elif near is not None:
        report.fault(here, f'unknown key; did you mean "{near}"?')
    elif name in (home := _homes(model)):
        report.fault(here, f'unknown key here; it belongs in "{home[name]}"')
    elif model is not Config:
        listed = ", ".join(sorted(model.model_fields)[:8])
        report.fault(here, f"unknown key; leave it out (known here: {listed}, ...)")
    else:
        report.note(here, "unknown key at the top level, ignored")


def _homes(model: type[Section]) -> dict[str, str]:
    """Map keys that belong in other sections to these sections."""
    homes: dict[str, str] = {}
    for name in ("fp16", "activation_checkpointing", "zero_optimization"):
        child = Config.child(name, {})
        if child is not None and child.model is not model:
            homes |= dict.fromkeys(child.model.model_fields, name)
    homes |= {name: "the top level" for name in Config.model_fields if model is not Config}
    return {name: home for name, home in homes.items() if name not in ("enabled", "profile")}


def _take(
    kept: dict[str, Any],
    model: type[Section],
    item: tuple[str, Any, Mapping[str, Any]],
    report: Report,
    path: str,
) -> None:
    """Add a declared key's value to `kept`, with everything below it prepared too."""
    name, value, raw = item
    here, field = join(path, name), model.model_fields[name]
    mark = mark_of(field)
    if isinstance(value, str) and value == AUTO and not mark.auto_is_a_word:
        report.autos.append(here)
        return
    child = model.child(name, raw)
    if value is None and (child is not None or mark.null_is_default):
        return
    if mark.tunable and (isinstance(value, list) or value == "all"):
        report.fault(here, f"{found(value)} is a range {_TUNING}")
        return
    kept[name] = value if child is None else _below(child, value, report, here)


def _below(child: Child, value: Any, report: Report, here: str) -> Any:
    if child.shape == "one":
        return prepare(child.model, value, report, here)
    if child.shape == "map" and isinstance(value, Mapping):
        return {
            str(name): prepare(child.model, inner, report, join(here, str(name)))
            for name, inner in value.items()
        }
    if child.shape == "list" and isinstance(value, list):
        return [
            prepare(child.model, inner, report, f"{here}[{index}]")
            for index, inner in enumerate(value)
        ]
    return value


def _miss(model: type[Section], raw: Mapping[str, Any], report: Report, path: str) -> None:
    if model.may_be_empty and not raw:
        return
    for name in model.required:
        if raw.get(name) is None:
            report.fault(join(path, name), "required in this section; add it")
