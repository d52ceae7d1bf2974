"""Commands about a configuration: `hadal explain`, `hadal schema` and `hadal elastic`."""

from __future__ import annotations

import argparse
import importlib
import json
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from hadal.cli.parser import CONFIG_HELP, add_command, add_config, add_flag, add_json, positive
from hadal.cli.terminal import FAILED, aligned, fail, heading, key, show, show_json, write_file
from hadal.errors import ConfigError

if TYPE_CHECKING:
    from rich.table import Table
    from rich.text import Text

    from hadal.config import Config
    from hadal.config.elasticity import Elasticity
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
    add_flag(shown, "--defaults", "Show the defaults of the sections in use, too")
    add_flag(shown, "--all", "Show every key, of sections that are off, too")
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
    from hadal.config.scheduler import PARAMS as SCHEDULES, TORCH_SCHEDULES

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

    refused = {re.sub(r"\[.*", "", fault.path) for fault in faults}
    values = dict(leaves(config.as_dict()))
    found = {
        path: ExplainedValue(path, values.get(path, _LEFT_OPEN), origin)
        for path, origin in config.origins.items()
    }
    for path in refused:
        default = found[path].value if path in found else None
        found[path] = ExplainedValue(path, _given(raw, path, default), REFUSED)
    return list(found.values())


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


# ---- hadal schema --------------------------------------------------------------------------------


def add_schema(group: Any) -> None:
    """Add `hadal schema`."""
    parser = add_command(
        group,
        "schema",
        help="Print the JSON schema of ds_config.json, for editors",
        description="Print the JSON schema of ds_config.json, with which editors complete keys,"
        " show their descriptions and underline mistakes. Set it as the configuration's `$schema`,"
        " or for a whole project in VS Code's `json.schemas`; Hadal and DeepSpeed ignore that key.",
        examples=(
            "hadal schema --output ds_config.schema.json",
            '# in ds_config.json:  "$schema": "./ds_config.schema.json",',
            '# in .vscode/settings.json:  "json.schemas": [{"fileMatch": ["ds_config*.json"],',
            '#                                              "url": "./ds_config.schema.json"}]',
        ),
    )
    add_flag(parser, "--output FILE", "Write the schema to a file instead", Path)
    parser.set_defaults(run=run_schema)


def run_schema(parsed: argparse.Namespace) -> int:
    """Write the schema."""
    from hadal.config.document import config_schema

    text = json.dumps(config_schema(), indent=2) + "\n"
    if parsed.output is None:
        sys.stdout.write(text)
    else:
        write_file(parsed.output, text)
    return 0


_NUMBERS = 16
"""The count of numbers on a line."""


# ---- hadal elastic -------------------------------------------------------------------------------


def add_elastic(group: Any) -> None:
    """Add `hadal elastic`."""
    parser = add_command(
        group,
        "elastic",
        help="Show which batch `elasticity` chooses, and how many ranks can train it",
        description="Show the batch that the configuration's `elasticity` section chooses, and the"
        " numbers of ranks that can train it.",
        examples=("hadal elastic ds_config.json --world-size 64",),
    )
    add_flag(parser, "config CONFIG", CONFIG_HELP)
    add_flag(parser, "--world-size N", "Also show the batch of each of N ranks", positive)
    add_json(parser)
    parser.set_defaults(run=run_elastic)


def run_elastic(parsed: argparse.Namespace) -> int:
    """Show the batch.

    Raises:
        ConfigError: there is no batch, or none for so many ranks.
    """
    result = _elastic_batch(_elastic_section(parsed.config), parsed.world_size)
    if parsed.json:
        show_json(result)
    else:
        _show_elastic(result)
    return 0


class Bounds(NamedTuple):
    """Explain the numbers of ranks that an elastic job may have."""

    world_sizes: tuple[int, ...] = ()
    """Empty: any."""
    pause_s: float = 0.0


def bounds_of(source: str) -> Bounds:
    """Return the `elasticity` section of a configuration.

    Raises:
        ConfigError: it has faults.
    """
    from hadal.config.elasticity import list_of
    from hadal.config.reading import read

    result = read(source)[1].get("elasticity")
    if not isinstance(result, dict) or result.get("enabled") is not True:
        return Bounds()
    section = _elastic_section(source)
    shared = section.model_parallel_size
    return Bounds(
        tuple(count * shared for count in list_of(section).ranks), 60.0 * section.min_time
    )


def _elastic_section(source: str) -> Elasticity:
    """Return the section by itself, whether it is on or not."""
    from hadal.config import load_config
    from hadal.config.elasticity import elastic_faults
    from hadal.config.reading import read
    from hadal.errors import written

    name, raw = read(source)
    if not isinstance(raw.get("elasticity"), dict):
        raise ConfigError(
            f"{name} has no `elasticity` section; add one with max_train_batch_size and"
            " micro_batch_sizes"
        )
    alone = {"elasticity": {**raw["elasticity"], "enabled": False}, "train_batch_size": 1}
    section = load_config(alone).elasticity
    assert section is not None  # it was given
    faults = elastic_faults(section)
    if faults:
        raise ConfigError(written(name, faults), faults)
    return section


def _elastic_batch(section: Elasticity, world_size: int | None) -> dict[str, Any]:
    from hadal.config.elasticity import choice_of, list_of, sizes_of
    from hadal.config.general import Sizes

    shared = section.model_parallel_size
    choice = list_of(section) if world_size is None else choice_of(section, world_size)
    result: dict[str, Any] = {
        "train_batch_size": choice.train,
        "world_sizes": [count * shared for count in choice.ranks],
        "model_parallel_size": shared,
    }
    if world_size is None:
        return result
    sizes = sizes_of(section, world_size, world_size // shared)
    if not isinstance(sizes, Sizes):
        raise ConfigError(f"{sizes.path}: {sizes.message}", (sizes,))
    return result | {
        "world_size": world_size,
        "train_micro_batch_size_per_gpu": sizes.micro,
        "gradient_accumulation_steps": sizes.accumulation,
    }


def _show_elastic(result: dict[str, Any]) -> None:
    counts, shared = result["world_sizes"], result["model_parallel_size"]
    by = f", {shared} of them for each copy of the model" if shared > 1 else ""
    rows = [(key("batch"), f"{result['train_batch_size']} samples")]
    rows.append((key("ranks"), f"{len(counts)} numbers{by}"))
    for start in range(0, len(counts), _NUMBERS):
        rows.append((key(""), " ".join(map(str, counts[start : start + _NUMBERS]))))
    show(aligned(rows))
    if "world_size" in result:
        micro, times = (
            result["train_micro_batch_size_per_gpu"],
            result["gradient_accumulation_steps"],
        )
        show(f"{result['world_size']} ranks: {times} micro-batches of {micro} samples each")
