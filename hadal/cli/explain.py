"""`hadal explain CONFIG`: the effective configuration, and the origin of each value."""

from __future__ import annotations

import argparse
import importlib
import json
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from hadal.cli.arguments import add_config, add_json
from hadal.cli.parser import add_command
from hadal.cli.terminal import FAILED, fail, heading, show, show_json

if TYPE_CHECKING:
    from rich.table import Table
    from rich.text import Text

    from hadal.config import Config
    from hadal.config.load import Examined
    from hadal.config.section import Section
    from hadal.errors import Fault

_LEFT_OPEN = "(default of the type)"
_USUAL_WIDTH = 40
_STYLES = {
    "": "heading",
    "you": "good",
    "auto": "warning",
    "inferred": "hint",
    "default": "faint",
    "refused": "error",
}
REFUSED = "refused"


class ExplainedValue(NamedTuple):
    """One value of the effective configuration."""

    path: str
    value: Any
    origin: str


class ExplainedLine(NamedTuple):
    """One printed line; a section's name has neither value nor origin."""

    name: str
    value: str
    origin: str


@dataclass(slots=True)
class SectionTree:
    """A section as it is printed: its values, then the sections below it."""

    values: dict[str, ExplainedValue] = field(default_factory=dict)
    below: dict[str, SectionTree] = field(default_factory=dict)


def add_to(group: Any) -> None:
    """Add the subcommand."""
    parser = add_command(
        group,
        "explain",
        help="Show the effective configuration and the origin of every value",
        description="Show the effective configuration, section by section: each value that is not"
        " a default, and its origin: the file, `auto`, or other keys that imply it. The exit code"
        " is 1 if `hadal.initialize` would refuse the configuration; every fault is listed.",
        examples=(
            "hadal explain ds_config.json --world-size 8",
            "hadal explain ds_config.json --defaults",
        ),
    )
    add_config(parser)
    shown = parser.add_mutually_exclusive_group()
    shown.add_argument(
        "--defaults", action="store_true", help="Show the defaults of the sections in use, too"
    )
    shown.add_argument(
        "--all", action="store_true", help="Show every key, of sections that are off, too"
    )
    add_json(parser)
    parser.set_defaults(run=run)


def run(parsed: argparse.Namespace) -> int:
    """Show the configuration; return 1 if `initialize` would refuse it.

    Raises:
        ConfigError: there is no configuration to show.
    """
    from hadal.config.load import examine
    from hadal.config.reading import read
    from hadal.errors import ConfigError, written

    _, raw = read(parsed.config)
    _know_types(raw)
    found = examine(parsed.config, world_size=parsed.world_size)
    faults = faults_of(found)
    hidden = () if parsed.all else unused(found.config)
    table = [
        row
        for row in rows(found.config, raw, faults)
        if row.origin != "default"
        or parsed.all
        or (parsed.defaults and not _is_below(row.path, hidden))
    ]
    if parsed.json:
        show_json(_as_json(found, parsed.world_size, table, faults))
    else:
        _show(found, parsed.world_size, table)
    if faults:
        if not parsed.json:
            fail(ConfigError(written(found.name, faults), faults), _hint(found, raw))
        return FAILED
    return 0


# ---- faults --------------------------------------------------------------------------------------


def faults_of(found: Examined) -> tuple[Fault, ...]:
    """Return every fault for which `initialize` would refuse the configuration of any model."""
    report = found.report
    known = {**report.faults, **report.unbuilt}
    if not report.is_faulty(("optimizer", "scheduler")):
        known |= {fault.path: fault for fault in _types_faults(found.config)}
    return tuple(known.values())


def _hint(found: Examined, raw: Mapping[str, Any]) -> str:
    """Return a hint at the programs that fill in what is missing; empty if nothing is."""
    from hadal.config.general import BATCH_KEYS

    schedule = found.config.scheduler
    if BATCH_KEYS[0] in found.report.faults and raw.keys().isdisjoint(BATCH_KEYS[:2]):
        return "Lightning sets the batch sizes itself, if they are left out as here"
    if schedule is not None and schedule.missing:
        return 'the Trainer of transformers and Accelerate replace "auto" before initialize'
    return ""


def _know_types(raw: Mapping[str, Any]) -> None:
    """Import torch if the optimizer or the schedule may be a class that only a newer one has."""
    from hadal.config.optimizer import KINDS, canonical_type
    from hadal.config.scheduler import PARAMS as SCHEDULES
    from hadal.config.scheduler import TORCH_SCHEDULES

    known = {*KINDS, *SCHEDULES, *TORCH_SCHEDULES, "auto"}
    for name in ("optimizer", "scheduler"):
        section = raw.get(name)
        kind = canonical_type(section.get("type")) if isinstance(section, Mapping) else None
        if isinstance(kind, str) and kind not in known:
            importlib.import_module("torch.optim.lr_scheduler")


def _types_faults(config: Config) -> Iterator[Fault]:
    """Try classes of torch out; built-in types are known without torch, which takes seconds."""
    from hadal.config.optimizer import built_in
    from hadal.config.scheduler import PARAMS as SCHEDULES

    optimizer, schedule = config.optimizer, config.scheduler
    is_torchs = optimizer is not None and optimizer.type not in built_in()
    is_open = schedule is not None and (schedule.type not in SCHEDULES or schedule.missing)
    if is_torchs or is_open:
        from hadal.optim.build import faults_of

        yield from faults_of(
            None if schedule is None else (schedule.type, schedule.params),
            (optimizer.type, optimizer.params) if optimizer is not None and is_torchs else None,
        )


# ---- values --------------------------------------------------------------------------------------


def rows(config: Config, raw: Mapping[str, Any], faults: Iterable[Fault]) -> list[ExplainedValue]:
    """List all values in the order of their declaration; refused values as in the file."""
    from hadal.config.section import leaves

    refused = {_key_of(fault.path) for fault in faults}
    values = dict(leaves(config.as_dict()))
    found = {
        path: ExplainedValue(path, values.get(path, _LEFT_OPEN), origin)
        for path, origin in config.origins.items()
    }
    for path in refused:
        default = found[path].value if path in found else None
        found[path] = ExplainedValue(path, _given(raw, path, default), REFUSED)
    return list(found.values())


def _key_of(path: str) -> str:
    """Return the key that a fault is about: one of an item of a list is about the list."""
    return re.sub(r"\[.*", "", path)


def _given(raw: Mapping[str, Any], path: str, default: Any) -> Any:
    """Return the value that the source has at a path."""
    value: Any = raw
    for name in path.split("."):
        if not isinstance(value, Mapping) or name not in value:
            return default
        value = value[name]
    return value


def unused(config: Config) -> tuple[str, ...]:
    """Return the paths of the sections that do nothing: they are off, or not built yet."""
    return tuple(_unused(config, ""))


def _unused(section: Section, path: str) -> Iterator[str]:
    from hadal.config.section import Section, mark_of

    for name, declared in type(section).model_fields.items():
        value, here = getattr(section, name), f"{path}.{name}" if path else name
        if isinstance(value, Section):
            if mark_of(declared).status == "acts" and value.is_on:
                yield from _unused(value, here)
            else:
                yield here
        elif value is None and type(section).child(name, {}) is not None:
            yield here


def _is_below(path: str, sections: Iterable[str]) -> bool:
    return any(path == each or path.startswith(f"{each}.") for each in sections)


# ---- output --------------------------------------------------------------------------------------


def _as_json(
    found: Examined, world_size: int, table: Iterable[ExplainedValue], faults: Iterable[Fault]
) -> dict[str, Any]:
    return {
        "config": found.name,
        "world_size": world_size,
        "values": {row.path: {"value": row.value, "origin": row.origin} for row in table},
        "notes": list(_notes(found.config)),
        "faults": [{"path": fault.path, "message": fault.message} for fault in faults],
    }


def _notes(config: Config) -> Iterator[str]:
    """Yield what a reader should know: also what depends on the model, which is unknown here."""
    yield from config.notes
    if config.scheduler is not None and config.optimizer is not None:
        note = config.scheduler.replaced(config.optimizer.rates)
        if note is not None:
            yield note
    stages = config.pipeline.stages
    if not config.pipeline.auto and stages != "auto" and stages > 1:
        yield (
            f"pipeline.stages: {stages} is for a hadal.pipeline.PipelineModule of {stages} stages;"
            " initialize refuses any other model (pipeline.auto cuts one of transformers)"
        )


def _show(found: Examined, world_size: int, table: Iterable[ExplainedValue]) -> None:
    from rich.text import Text

    show(heading(f"{found.name} on {world_size} rank{'s' * (world_size > 1)}"), "")
    lines = list(lines_of(tree_of(table)))
    show(_drawn(lines) if sys.stdout.isatty() else _listed(lines))
    show("")
    for text in _notes(found.config):
        show(Text.assemble(("note: ", "warning"), text))


def tree_of(table: Iterable[ExplainedValue]) -> SectionTree:
    """Sort rows into the sections that they belong to."""
    root = SectionTree()
    for row in table:
        *sections, name = row.path.split(".")
        node = root
        for section in sections:
            node = node.below.setdefault(section, SectionTree())
        node.values[name] = row
    return root


def _listed(lines: list[ExplainedLine]) -> Text:
    """Return unwrapped lines; a long value moves its own origin only."""
    from rich.text import Text

    names = max((len(line.name) for line in lines), default=0)
    values = [len(line.value) for line in lines if len(line.value) <= _USUAL_WIDTH]
    room = max(values, default=0)
    made = Text()
    for line in lines:
        made.append(f"{line.name:<{names}}", _style_of_name(line))
        made.append(f"  {line.value:<{room}}  ").append(line.origin, _STYLES[line.origin])
        made.append("\n")
    made.rstrip()
    return made


def _drawn(lines: list[ExplainedLine]) -> Table:
    """Return a table as wide as the terminal, in which values are folded."""
    from rich.table import Table
    from rich.text import Text

    made = Table.grid(padding=(0, 2))
    made.add_column(no_wrap=True)
    made.add_column(overflow="fold")
    made.add_column(no_wrap=True)
    for line in lines:
        origin = Text(line.origin, _STYLES[line.origin])
        made.add_row(Text(line.name, _style_of_name(line)), Text(line.value), origin)
    return made


def _style_of_name(line: ExplainedLine) -> str:
    return _STYLES[line.origin] if line.origin in ("", "default", REFUSED) else ""


def lines_of(node: SectionTree, depth: int = 0) -> Iterator[ExplainedLine]:
    """Yield a tree's lines: keys are indented below the name of their section."""
    indent = "  " * depth
    for name, row in node.values.items():
        yield ExplainedLine(indent + name, _text_of(row.value), row.origin)
    for name, below in node.below.items():
        # A section with one value takes one line.
        while not below.values and len(below.below) == 1:
            ((inner, below),) = below.below.items()
            name = f"{name}.{inner}"
        if len(below.values) == 1 and not below.below:
            ((key, row),) = below.values.items()
            yield ExplainedLine(f"{indent}{name}.{key}", _text_of(row.value), row.origin)
        else:
            yield ExplainedLine(indent + name, "", "")
            yield from lines_of(below, depth + 1)


def _text_of(value: Any) -> str:
    return _LEFT_OPEN if value is _LEFT_OPEN else json.dumps(value, ensure_ascii=False)
