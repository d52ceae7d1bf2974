"""Generates docs/configuration.md, docs/configuration_unbuilt.md and the JSON schema of all keys.

Introductions and examples are in docs/sources/. Run `python -m hadal.config.document`.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from pydantic.fields import FieldInfo
from pydantic.json_schema import models_json_schema

from hadal.config.optimizer import Optimizer
from hadal.config.scheduler import Scheduler
from hadal.config.section import (
    Section,
    Status,
    Typed,
    default_of,
    expected,
    mark_of,
    plain,
    shown,
    spellings,
)
from hadal.config.top_level import Config

Schema = dict[str, Any]
_DRAFT = "https://json-schema.org/draft/2020-12/schema"
_COMMENTS: Schema = {"^(_|//|\\$)": {}}


# ---- the JSON schema (draft 2020-12), for editors, and the status of keys ------------------------


def config_schema() -> Schema:
    """Return the schema of the whole configuration."""
    models: set[type[Section]] = {Config, *Optimizer.types.values(), *Scheduler.types.values()}
    ordered = sorted(models, key=lambda model: model.__name__)
    _, found = models_json_schema([(model, "validation") for model in ordered])
    defs: dict[str, Schema] = found["$defs"]
    open_types: dict[type[Section], set[Status]] = {model: {"acts"} for model in models}
    for model, places in (open_types | statuses(Config)).items():
        _complete(defs[model.__name__], model)
        if len(places) == 1:
            _write_status(defs[model.__name__], model, *places)
    for model in (Optimizer, Scheduler):
        _typed_params(defs, model)
    root = defs.pop("Config")
    root["patternProperties"] = _COMMENTS
    title = {"$schema": _DRAFT, "title": "ds_config.json"}
    return title | {name: root[name] for name in root if name != "title"} | {"$defs": defs}


def _complete(schema: Schema, model: type[Section]) -> None:
    """Add to pydantic's schema: "auto", names of older releases, required keys."""
    properties: dict[str, Schema] = schema.setdefault("properties", {})
    for name, field in model.model_fields.items():
        properties[name] = _tidy(properties[name], _also_taken(model, name))
        # pydantic leaves out a description that is the same as the section's own.
        properties[name].setdefault("description", field.description)
    for name, new in model.aliases.items():
        properties[name] = {"description": f"The same as {new}."}
    for name, new in model.renamed.items():
        properties[name] = {"description": f"An old name of {new}.", "deprecated": True}
    for name, moved in model.moved.items():
        properties[name] = {"description": f"An old form of {moved.to}.", "deprecated": True}
    for name, what in model.leftovers.items():
        properties[name] = {"description": f"A leftover, {what}.", "deprecated": True}
    if model.required and model.may_be_empty:
        schema["anyOf"] = [{"maxProperties": 0}, {"required": list(model.required)}]
    elif model.required:
        schema["required"] = list(model.required)


def _write_status(schema: Schema, model: type[Section], above: Status) -> None:
    """Write into each key's schema the unbuilt status that it has from a section's switch."""
    for name, field in model.model_fields.items():
        status = status_of(field, above)
        if status != "acts":
            schema["properties"][name]["x-hadal-status"] = status


def _also_taken(model: type[Section], name: str) -> list[Schema]:
    """Return the schemas that the loader accepts besides the declared type."""
    field, more = model.model_fields[name], list[Schema]()
    mark = mark_of(field)
    words = spellings(field)
    if words:
        more.append({"enum": words})
    if mark.null_is_default:
        more.append({"type": "null"})
    if not model.takes_auto(name) and model.child(name, {}) is None:
        more.append({"const": "auto"})
    return more


def _tidy(schema: Schema, more: list[Schema]) -> Schema:
    outer = {"title", "description", "default", "x-hadal-status"}
    inner = {name: value for name, value in schema.items() if name not in outer}
    kept = {name: schema[name] for name in schema if name in outer - {"title"}}
    if kept.get("default", ...) is None and {"type": "null"} not in inner.get("anyOf", [inner]):
        del kept["default"]
    if not more or not inner:
        return inner | kept
    choices = inner["anyOf"] if set(inner) == {"anyOf"} else [inner]
    return {"anyOf": [*choices, *more]} | kept


def _typed_params(defs: dict[str, Schema], model: type[Typed]) -> None:
    """Let the type decide which params an editor offers."""
    schema = defs[model.__name__]
    schema["allOf"] = [
        {
            "if": {"properties": {"type": {"const": name}}, "required": ["type"]},
            "then": {"properties": {"params": {"$ref": f"#/$defs/{kind.__name__}"}}},
        }
        for name, kind in model.types.items()
    ]
    schema["properties"]["type"]["examples"] = list(model.types)


# ---- status --------------------------------------------------------------------------------------


def status_of(field: FieldInfo, above: Status) -> Status:
    """Return the status of a key in a section with status `above`."""
    own = mark_of(field).status
    return own if own != "acts" or above == "acts" else above


def status_inside(model: type[Section], above: Status) -> Status:
    """Return the status of keys in a section, whose switch may not be built."""
    if model.switch is None or above != "acts":
        return above
    *owners, name = model.switch.split(".")
    for owner in owners:
        child = model.child(owner, {})
        assert child is not None, f"{model.switch} leads through {owner}, which is no section"
        model = child.model
    return status_of(model.model_fields[name], above)


def has_typed_params(model: type[Section], name: str) -> bool:
    """Return whether the section's `type` determines the arguments that a key accepts."""
    return issubclass(model, Typed) and name == "params"


def statuses(model: type[Section], above: Status = "acts") -> dict[type[Section], set[Status]]:
    """Return the statuses of every section at and below `model`, one for each place it has."""
    above = status_inside(model, above)
    found: dict[type[Section], set[Status]] = {model: {above}}
    for name, field in model.model_fields.items():
        child = model.child(name, {})
        if child is not None and not has_typed_params(model, name):
            for below, several in statuses(child.model, status_of(field, above)).items():
                found.setdefault(below, set()).update(several)
    return found


# ---- the pages -----------------------------------------------------------------------------------

FOLDER = Path("docs")
_SOURCES = Path(__file__).parents[2] / "docs" / "sources"
_MAIN, _UNBUILT = "configuration.md", "configuration_unbuilt.md"


_Pages = Mapping[Status, list[str]]
"""The lines of the page that a section's status selects."""


@cache
def _source() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((_SOURCES / "configuration.json").read_text("utf-8"))
    return found


def examples() -> dict[str, dict[str, Any]]:
    """Return an example for each section that acts; the empty path is the top level."""
    found: dict[str, dict[str, Any]] = _source()["examples"]
    return found


def pages() -> dict[str, str]:
    """Return the text of each page by its file name."""
    acts, rest = list[str](), list[str]()
    body: _Pages = {"acts": acts, "no effect": acts, "not built yet": rest}
    acts += ["## Top level", "", *_example(""), *_table(Config, "acts")]
    for name, key in Config.model_fields.items():
        child = Config.child(name, {})
        if child is None:
            continue
        to = body if name in examples() else dict.fromkeys(body, rest)
        _section(to, child.model, name, status_of(key, "acts"), 2)
        if issubclass(child.model, Typed):
            acts += _types(f"{name}.params", child.model.types)
    bodies = {_MAIN: (acts, _most_used()), _UNBUILT: (rest, ())}
    texts = {
        name: [(_SOURCES / name).read_text("utf-8"), *first, *_contents(lines), *lines]
        for name, (lines, first) in bodies.items()
    }
    return {name: "\n".join(lines).rstrip() + "\n" for name, lines in texts.items()}


def anchor(heading: str) -> str:
    """Return the link target of a heading, as GitHub and most Markdown renderers make it."""
    kept = (letter for letter in heading.lower() if letter.isalnum() or letter in " _-")
    return "".join(kept).strip().replace(" ", "-")


def _contents(lines: list[str]) -> Iterator[str]:
    yield from ("## Contents", "")
    for line in lines:
        marks, _, heading = line.partition(" ")
        if marks in ("##", "###"):
            yield f"{'  ' * (len(marks) - 2)}- [{heading}](#{anchor(heading)})"
    yield ""


def _most_used() -> Iterator[str]:
    yield from ("## The keys used most", "", "| key | default | meaning |", "|---|---|---|")
    for path in _source()["most_used"]:
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
    lines = body[above]
    if above == "not built yet":
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
