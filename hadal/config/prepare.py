"""Conversion of raw JSON to current names: resolves old keys, leftovers, "auto" and typos."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hadal.config.plain import found
from hadal.config.report import Report, join
from hadal.config.section import Child, Moved, Section, mark_of
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
        report.fault(here, f'has moved; put it into "{model.moved[name].to}"')
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
    if isinstance(value, str) and value == AUTO and not model.takes_auto(name):
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


# ---- forms of older releases ---------------------------------------------------------------------


def modernise(raw: dict[str, Any], report: Report, client_optimizer: bool = False) -> None:
    """Put every key into its current place.

    `client_optimizer`: the program passes its own, so that the optimizer's section is ignored.
    """
    _stage_of_boolean(raw, report)
    sections = {"": Config} | {
        name: child.model
        for name in Config.model_fields
        if isinstance(raw.get(name), dict) and (child := Config.child(name, raw)) is not None
    }
    for path, model in sections.items():
        section = raw[path] if path else raw
        for old in [name for name in model.moved if name in section]:
            _move(raw, section, (path, old), model.moved[old], report)
    if isinstance(raw.get("datastates_ckpt"), bool):
        raw["datastates_ckpt"] = {} if raw["datastates_ckpt"] else None
    _strip_mappings(raw, report)
    _complete_params(raw, report, client_optimizer)


def _stage_of_boolean(raw: dict[str, Any], report: Report) -> None:
    zero, bucket = raw.get("zero_optimization"), "allgather_size"
    if isinstance(zero, bool):
        report.note("zero_optimization", f"{str(zero).lower()} is an old form of stage {int(zero)}")
        raw["zero_optimization"] = {"stage": int(zero)}
    elif raw.pop(bucket, None) is not None:
        place = Config.moved[bucket].to
        report.note(bucket, f"an old name, ignored; the key of today is {place}")


def _move(
    raw: dict[str, Any],
    section: dict[str, Any],
    place: tuple[str, str],
    moved: Moved,
    report: Report,
) -> None:
    """Move a key to its place today, unless that is no object; `prepare` then says so."""
    here, old, new = join(*place), place[1], moved.to
    *outer, last = new.split(".")
    target: Any = raw
    for name in outer:
        if target.get(name) is None:
            target[name] = {}
        target = target[name]
        if not isinstance(target, dict):
            return
    value, given = section.pop(old), target.get(last)
    if value is None:
        return
    if moved.true is not None and not isinstance(value, bool):
        report.fault(here, f'expected true or false; prefer "{new}"')
    elif given is not None and (value is not False or isinstance(given, dict)):
        report.fault(here, f'replaced by "{new}", which is given too; remove "{old}" here')
    else:
        report.note(here, f'an old name, read as "{new}"')
        if moved.true is None:
            target[last] = value
        elif value:
            target[last] = moved.true


def _strip_mappings(raw: dict[str, Any], report: Report) -> None:
    """Remove whitespace around the keys of `autotuning.arg_mappings`."""
    tuning = raw.get("autotuning")
    flags = tuning.get("arg_mappings") if isinstance(tuning, dict) else None
    if isinstance(flags, dict):
        for name in [str(name) for name in flags if str(name) != str(name).strip()]:
            report.note(f"autotuning.arg_mappings.{name}", "surrounding whitespace is ignored")
        raw["autotuning"]["arg_mappings"] = {str(k).strip(): flag for k, flag in flags.items()}


def _complete_params(raw: dict[str, Any], report: Report, client_optimizer: bool) -> None:
    """Give every optimizer and scheduler its params, and refuse clipping inside them."""
    for name in ("optimizer", "scheduler"):
        section = raw.get(name)
        if isinstance(section, dict) and section.get("params") is None:
            section["params"] = {}
    optimizer = raw.get("optimizer")
    params = optimizer["params"] if isinstance(optimizer, dict) else None
    if isinstance(params, dict) and "max_grad_norm" in params:
        del params["max_grad_norm"]
        if not client_optimizer:
            here = "optimizer.params.max_grad_norm"
            report.fault(here, "refused here; use the top-level key gradient_clipping")
