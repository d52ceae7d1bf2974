"""docs/configuration.md, written from the declarations: `python -m hadal.config.document`."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from pathlib import Path

from pydantic.fields import FieldInfo

from hadal.config.kinds import expected
from hadal.config.optimizer_params import PARAMS as OPTIMIZERS
from hadal.config.plain import plain, shown
from hadal.config.scheduler import PARAMS as SCHEDULES
from hadal.config.section import Section, Status, default_of
from hadal.config.status import has_typed_params, status_inside, status_of
from hadal.config.top_level import Config

PAGE = Path("docs/configuration.md")
_INTRODUCTION = """\
# Configuration

Written from the declarations in `hadal/config/` by `python -m hadal.config.document`; edit those.

A configuration is a dict, a path to a JSON file, or the URL-safe base64 of its text. Files may
hold comments (`#`, `//`, `/* */`) and trailing commas, but no key twice. A value may be the string
`"auto"`: a program such as Hugging Face's Trainer fills it in, otherwise the default holds.
`hadal explain CONFIG --world-size N` shows what a file comes to, `hadal schema` prints a JSON
schema for editors.

**Values.** A number may be written as a string that spells it (`"8"`, `"1e-4"`, `"5e8"`), wherever
a number is expected; an integer may have a fraction of zero (`8.0`), but for counts of updates. A
switch takes `true` or `false` alone, not `1` and not `"true"`. The same holds in every section and
in the arguments of torch's own classes. (`amp` also takes Apex's words `"True"` and `"False"`.)

**Status.** *acts*: does what is said here. *not built yet*: refused where it would change
something. *no effect*: accepted, and logged where it differs from the default.

**Keys that do nothing.** `initialize` logs one line with all keys that were given and do nothing
here: those without effect, those that act at other stages only, and those of a section whose switch
nobody has given (`"tensorboard": {"job_name": "x"}`). A section with its switch turned off
(`"enabled": false`, `"device": "none"`) is off on purpose, and so is a key at its default: nothing
is logged. `"log_level": "error"` silences the line.
"""


def page() -> str:
    """Return the whole page."""
    lines = [_INTRODUCTION, "## Top level", ""]
    lines += _table(Config, "acts")
    for name, field in Config.model_fields.items():
        child = Config.child(name, {})
        if child is not None:
            lines += _section(child.model, name, status_of(field, "acts"), 2)
        if name == "optimizer":
            lines += _types("optimizer.params", OPTIMIZERS)
        if name == "scheduler":
            lines += _types("scheduler.params", SCHEDULES)
    return "\n".join(lines).rstrip() + "\n"


def _types(path: str, params: Mapping[str, type[Section]]) -> list[str]:
    """Describe params by type; types that take the same are told together."""
    lines: list[str] = []
    for model in dict.fromkeys(params.values()):
        names = " and ".join(name for name, kind in params.items() if kind is model)
        lines += [f"### `{path}` of {names}", "", _summary(model), ""]
        lines += _table(model, "acts") if model.model_fields else []
    return lines


def _section(model: type[Section], path: str, above: Status, level: int) -> list[str]:
    above = status_inside(model, above)
    lines = [f"{'#' * level} `{path}`", "", _summary(model), ""]
    lines += _table(model, above)
    for name, field in model.model_fields.items():
        child = model.child(name, {})
        if child is not None and not has_typed_params(model, name):
            below = {"one": name, "map": f"{name}.<name>", "list": f"{name}[]"}[child.shape]
            status = status_of(field, above)
            lines += _section(child.model, f"{path}.{below}", status, min(level + 1, 4))
    return lines


def _summary(model: type[Section]) -> str:
    return " ".join((model.__doc__ or "").split())


def _table(model: type[Section], above: Status) -> list[str]:
    rows = [
        _row(name, field, above)
        for name, field in model.model_fields.items()
        if model.child(name, {}) is None or has_typed_params(model, name)
    ]
    if not rows:
        return list(_old_names(model))
    head = ["| key | value | default | meaning | status |", "|---|---|---|---|---|"]
    return [*head, *rows, "", *_old_names(model)]


def _row(name: str, field: FieldInfo, above: Status) -> str:
    value, default = expected(field), shown(plain(default_of(field)))
    if default == "null" and not value.endswith(("null", "anything")):
        default = ""
    quoted = f"`{default}`" if default else ""
    cells = [f"`{name}`", value, quoted, field.description or "", status_of(field, above)]
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _old_names(model: type[Section]) -> Iterator[str]:
    told = [f"`{name}` is another name of `{new}`" for name, new in model.aliases.items()]
    told += [f"`{name}` is an old name of `{new}`" for name, new in model.renamed.items()]
    told += [f"`{name}` is an old form of `{new}`" for name, new in model.moved.items()]
    told += [f"`{name}`: {what}" for name, what in model.leftovers.items()]
    if told:
        yield from ("Also accepted:", "")
        yield from (f"- {line}." for line in told)
        yield ""


def main() -> None:
    """Write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=PAGE, metavar="FILE")
    parser.parse_args().output.write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main()
