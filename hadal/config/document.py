"""Generates docs/configuration.md and docs/configuration_unbuilt.md from the declarations.

Run `python -m hadal.config.document`.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from pydantic.fields import FieldInfo

from hadal.config.plain import expected, plain, shown
from hadal.config.schema import has_typed_params, status_inside, status_of
from hadal.config.section import Section, Status, Typed, default_of
from hadal.config.top_level import Config

FOLDER = Path("docs")
_EXAMPLES = Path(__file__).parents[2] / "docs" / "examples" / "configuration.json"
_MAIN, _UNBUILT = "configuration.md", "configuration_unbuilt.md"
_MOST_USED = (
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
    "gradient_clipping",
    "optimizer.type",
    "optimizer.params",
    "scheduler.type",
    "scheduler.params",
    "bf16.enabled",
    "fp16.enabled",
    "fp16.loss_scale",
    "zero_optimization.stage",
    "zero_optimization.reduce_bucket_size",
    "zero_optimization.stage3_prefetch_bucket_size",
    "zero_optimization.stage3_param_persistence_threshold",
    "zero_optimization.offload_optimizer.device",
    "zero_optimization.offload_param.device",
    "steps_per_print",
    "wall_clock_breakdown",
    "checkpoint.async_save",
)
_GENERATED = (
    "Generated from the declarations in `hadal/config/` by `python -m hadal.config.document`;"
    " edit those."
)
_INTRODUCTION = f"""\
# Configuration

{_GENERATED}

A configuration is a dict, a path to a JSON file, JSON text, or its URL-safe base64. JSON may
contain comments (`#`, `//`, `/* */`) and trailing commas, but no duplicate keys. A value may be
the string `"auto"`: a program such as Hugging Face's Trainer replaces it; otherwise the default
applies.

The example of a section is a part of a file, which also sets a batch size. `hadal init` writes a
first configuration. `hadal explain CONFIG --world-size N` shows the effective
value of every key and its origin, and exits with 1 if `hadal.initialize` would refuse the file.
`hadal schema > ds_config.schema.json` writes a JSON schema; with
`"$schema": "./ds_config.schema.json"` as the first key of a configuration, editors such as VS Code
complete and check it.

**Values.** Wherever a number is expected, a string that spells it as JSON does is accepted too
(`"8"`, `"1e-4"`, `"5e8"`). An integer may have a zero fraction (`8.0`), except counts of scheduler
updates. A switch is `true` or `false`, never `1` or `"true"`. The same rule applies in every
section and to the arguments of torch's own classes. (`amp` also accepts Apex's words `"True"` and
`"False"`.)

**Status.** **acts**: does what its description says. **not built yet**: refused if its value would
change anything. **no effect**: accepted; logs a note if it differs from the default. Sections that
are not built yet are on [a page of their own]({_UNBUILT}).

**Keys that do nothing.** `initialize` logs one line that lists all given keys which do nothing:
keys without effect, keys that act at other stages only, and keys of a section whose switch is not
given (`"tensorboard": {{"job_name": "x"}}`). Keys at their default are not listed, nor are the keys
of a section that is switched off explicitly (`"enabled": false`, `"device": "none"`).
`"log_level": "error"` suppresses the line.
"""
_UNBUILT_INTRODUCTION = f"""\
# Configuration sections that are not built yet

{_GENERATED}

Hadal checks the keys of these sections, but has not built the features behind them. `initialize`
refuses a configuration that switches one of them on, and names the key. Keys marked **no effect**
are accepted. [The main page]({_MAIN}) describes the sections that act.
"""


@dataclass(slots=True)
class _Pages:
    """The lines of both pages; a section's status selects its page."""

    main: list[str] = field(default_factory=list)
    unbuilt: list[str] = field(default_factory=list)

    def of(self, status: Status) -> list[str]:
        return self.unbuilt if status == "not built yet" else self.main


@cache
def examples() -> dict[str, dict[str, Any]]:
    """Return an example for each section that acts; the empty path is the top level."""
    found: dict[str, dict[str, Any]] = json.loads(_EXAMPLES.read_text(encoding="utf-8"))
    return found


def pages() -> dict[str, str]:
    """Return the text of each page by its file name."""
    body = _Pages()
    body.main += ["## Top level", "", *_example(""), *_table(Config, "acts")]
    for name, key in Config.model_fields.items():
        child = Config.child(name, {})
        if child is None:
            continue
        to = body if name in examples() else _Pages(body.unbuilt, body.unbuilt)
        _section(to, child.model, name, status_of(key, "acts"), 2)
        if issubclass(child.model, Typed):
            body.main += _types(f"{name}.params", child.model.types)
    main = [_INTRODUCTION, *_most_used(), "## Contents", "", *_contents(body.main), "", *body.main]
    rest = [_UNBUILT_INTRODUCTION, "## Contents", "", *_contents(body.unbuilt), "", *body.unbuilt]
    texts = {_MAIN: main, _UNBUILT: rest}
    return {name: "\n".join(lines).rstrip() + "\n" for name, lines in texts.items()}


def anchor(heading: str) -> str:
    """Return the link target of a heading, as GitHub and most Markdown renderers make it."""
    kept = (letter for letter in heading.lower() if letter.isalnum() or letter in " _-")
    return "".join(kept).strip().replace(" ", "-")


def _contents(lines: list[str]) -> Iterator[str]:
    for line in lines:
        marks, _, heading = line.partition(" ")
        if marks in ("##", "###"):
            yield f"{'  ' * (len(marks) - 2)}- [{heading}](#{anchor(heading)})"


def _most_used() -> Iterator[str]:
    yield from ("## The keys used most", "", "| key | default | meaning |", "|---|---|---|")
    for path in _MOST_USED:
        key, section = _key(Config, path), path.rpartition(".")[0]
        target = anchor(section or "Top level")
        meaning = (key.description or "").split(". ")[0].rstrip(".") + "."
        default = _default(key)
        yield f"| [`{path}`](#{target}) | {f'`{default}`' if default else ''} | {meaning} |"
    yield ""


def _key(model: type[Section], path: str) -> FieldInfo:
    name, _, rest = path.partition(".")
    child = model.child(name, {})
    return _key(child.model, rest) if rest and child is not None else model.model_fields[name]


def _example(path: str) -> Iterator[str]:
    if path in examples():
        yield from ("```json", json.dumps(examples()[path], indent=2), "```", "")


def _types(path: str, params: Mapping[str, type[Section]]) -> Iterator[str]:
    """Describe params by type; types that accept the same ones share a table."""
    for model in dict.fromkeys(params.values()):
        names = ", ".join(name for name, kind in params.items() if kind is model)
        yield from (f"### `{path}` of {names}", "", _summary(model), "")
        yield from _table(model, "acts") if model.model_fields else ()


def _section(body: _Pages, model: type[Section], path: str, above: Status, level: int) -> None:
    above = status_inside(model, above)
    lines = body.of(above)
    if lines is body.unbuilt:
        level = min(level, path.count(".") + 2)
    lines += [f"{'#' * level} `{path}`", "", _summary(model), "", *_example(path)]
    lines += _table(model, above)
    for name, key in model.model_fields.items():
        child = model.child(name, {})
        if child is not None and not has_typed_params(model, name):
            below = {"one": name, "map": f"{name}.<name>", "list": f"{name}[]"}[child.shape]
            status = status_of(key, above)
            _section(body, child.model, f"{path}.{below}", status, min(level + 1, 4))


def _summary(model: type[Section]) -> str:
    return " ".join((model.__doc__ or "").split())


def _table(model: type[Section], above: Status) -> Iterator[str]:
    rows = [
        _row(name, key, above)
        for name, key in model.model_fields.items()
        if model.child(name, {}) is None or has_typed_params(model, name)
    ]
    if rows:
        yield from ("| key | value | default | meaning | status |", "|---|---|---|---|---|")
        yield from (*rows, "")
    yield from _old_names(model)


def _default(key: FieldInfo) -> str:
    default = shown(plain(default_of(key)))
    return "" if default == "null" and not expected(key).endswith(("null", "anything")) else default


def _row(name: str, key: FieldInfo, above: Status) -> str:
    default = _default(key)
    quoted = f"`{default}`" if default else ""
    status = f"**{status_of(key, above)}**"
    cells = [f"`{name}`", expected(key), quoted, key.description or "", status]
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _old_names(model: type[Section]) -> Iterator[str]:
    others = [f"`{name}`, another name of `{new}`" for name, new in model.aliases.items()]
    others += [f"`{name}`, an old name of `{new}`" for name, new in model.renamed.items()]
    others += [f"`{name}`, an old form of `{new.to}`" for name, new in model.moved.items()]
    others += [f"`{name}`, {what}" for name, what in model.leftovers.items()]
    if others:
        yield from ("Also accepted:", "")
        yield from (f"- {line}." for line in others)
        yield ""


def main() -> None:
    """Write the pages."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--folder", type=Path, default=FOLDER)
    folder = parser.parse_args().folder
    for name, text in pages().items():
        (folder / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
