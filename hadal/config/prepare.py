"""From raw JSON to the values of frozen sections: current names, types and ranges.

Old keys, leftovers, "auto" and typos are resolved first. Every fault and note has its path, and a
`Report` collects them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from pydantic import ValidationError

from hadal.config.general import General
from hadal.config.section import Child, Moved, Section, Typed, expected, found, mark_of
from hadal.config.top_level import Config
from hadal.config.values import boolean_word, spelled_numbers
from hadal.errors import ConfigError, Fault, UnbuiltConfigError, nearest, written

AUTO = "auto"
_TUNING = "for the autotuner: use `hadal run --autotuning tune`, or set a single value"
_COMMENTS = ("_", "//", "$")
SectionType = TypeVar("SectionType", bound=Section)
Location = Sequence[int | str]


@dataclass(slots=True)
class Report:
    """Faults and notes of one configuration; at most one fault per path."""

    faults: dict[str, Fault] = field(default_factory=dict)
    unbuilt: dict[str, Fault] = field(default_factory=dict)
    paths_by_note: dict[str, list[str]] = field(default_factory=dict)
    idle: dict[str, list[str]] = field(default_factory=dict)
    autos: list[str] = field(default_factory=list)

    def fault(self, path: str, message: str) -> None:
        """Record a reason to refuse the configuration."""
        self.faults.setdefault(path, Fault(path, message))

    def not_built(self, path: str, message: str) -> None:
        """Record that the configuration requests something that is not built yet."""
        self.unbuilt.setdefault(path, Fault(path, message))

    def note(self, path: str, message: str) -> None:
        """Record a note; keys with the same message share one line."""
        self.paths_by_note.setdefault(message, []).append(path)

    def note_idle(self, path: str, message: str) -> None:
        """Record a key that does nothing here, and why; all of them are logged in one line."""
        self.idle.setdefault(message, []).append(path)

    @property
    def notes(self) -> tuple[str, ...]:
        """All notes, one sentence each."""
        return _sentences(self.paths_by_note) + self.idle_notes

    @property
    def idle_notes(self) -> tuple[str, ...]:
        """The keys that do nothing here, one sentence for each reason."""
        return _sentences(self.idle)

    @property
    def lines(self) -> tuple[str, ...]:
        """The lines to log."""
        idle = "; ".join(self.idle_notes)
        together = (f"keys that do nothing here: {idle}",) if idle else ()
        return _sentences(self.paths_by_note) + together

    def is_faulty(self, paths: Iterable[str]) -> bool:
        """Return whether a key, one above or one below it is faulty, so that nothing follows from
        it.
        """
        return any(_touch(fault, path) for path in paths for fault in self.faults)

    def settle(self, name: str, *, allow_unbuilt: bool) -> None:
        """Raise if there is a fault; `allow_unbuilt` turns keys that are not built into notes."""
        if allow_unbuilt:
            for fault in self.unbuilt.values():
                self.note(fault.path, fault.message)
            self.unbuilt.clear()
        paths_by_note = tuple(self.faults.values()) + tuple(self.unbuilt.values())
        if not paths_by_note:
            return
        kind = ConfigError if self.faults else UnbuiltConfigError
        raise kind(written(name, paths_by_note), paths_by_note)


def _sentences(paths_by_message: Mapping[str, list[str]]) -> tuple[str, ...]:
    return tuple(f"{', '.join(paths)}: {message}" for message, paths in paths_by_message.items())


def _touch(one: str, other: str) -> bool:
    """Return whether two paths are equal or one is below the other."""
    shorter, longer = sorted((one, other), key=len)
    return longer == shorter or longer.startswith((f"{shorter}.", f"{shorter}["))


def join(path: str, name: str) -> str:
    """Return the JSON path of a key in a section."""
    return f"{path}.{name}" if path else name


# ---- current names -------------------------------------------------------------------------------


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
    _read_booleans(raw, report)
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


def _read_booleans(raw: dict[str, Any], report: Report) -> None:
    zero, bucket = raw.get("zero_optimization"), "allgather_size"
    if isinstance(zero, bool):
        report.note("zero_optimization", f"{str(zero).lower()} is an old form of stage {int(zero)}")
        raw["zero_optimization"] = {"stage": int(zero)}
    elif raw.pop(bucket, None) is not None:
        place = Config.moved[bucket].to
        report.note(bucket, f"an old name, ignored; the key of today is {place}")
    clipping = raw.get("gradient_clipping")
    if isinstance(clipping, bool):  # as in Ray's example
        report.note("gradient_clipping", f"{str(clipping).lower()} is read as {float(clipping)}")
        raw["gradient_clipping"] = float(clipping)


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
    value, given = boolean_word(section.pop(old)), target.get(last)
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


# ---- types and ranges ----------------------------------------------------------------------------


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
