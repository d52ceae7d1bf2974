"""Generates docs/configuration.md and docs/configuration_unbuilt.md from the declarations.

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

from hadal.config.plain import expected, plain, shown
from hadal.config.schema import has_typed_params, status_inside, status_of
from hadal.config.section import Section, Status, Typed, default_of
from hadal.config.top_level import Config

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
