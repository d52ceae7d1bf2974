"""The site: these pages, and a reference made of the declarations in the code (`make site`)."""

from __future__ import annotations

import argparse
import importlib
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from sphinx.application import Sphinx

if TYPE_CHECKING:
    from hadal.cli.parser import Parser

ROOT = Path(__file__).parent.parent
SUFFIXES = {".py", ".sh", ".yaml"}
MODULES = (
    "hadal",
    "hadal.zero",
    "hadal.comm",
    "hadal.utils",
    "hadal.activation_checkpointing",
    "hadal.compat.analyzers",
    "hadal.compat.trainer",
    "hadal.compression",
    "hadal.data_efficiency.analysis",
    "hadal.data_efficiency.indexed",
    "hadal.data_efficiency.layer_drop",
    "hadal.data_efficiency.ordered",
    "hadal.data_efficiency.seqlen",
    "hadal.data_efficiency.token_drop",
    "hadal.moe",
    "hadal.monitor.files",
    "hadal.pipeline",
    "hadal.profiling",
    "hadal.sequence",
    "hadal.sparse_attention",
)
"""The modules of the reference."""

project = "Hadal"
author = "the Hadal developers"
extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
]
html_theme = "furo"
html_title = "Hadal"
html_static_path = ["sources/site.css"]
html_css_files = ["site.css"]
html_theme_options = {"navigation_with_keys": True}
html_show_copyright = False
pygments_dark_style = "github-dark"
root_doc = "index"
default_role = "code"
smartquotes = False
exclude_patterns = ["README.md", "sources"]
suppress_warnings = ["ref.ref"]  # labels in docstrings of torch
myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 4
autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_preserve_defaults = True
napoleon_google_docstring = True
napoleon_numpy_docstring = False
copybutton_prompt_text = "$ "
nitpicky = False

# ---- pages that only the site has ----------------------------------------------------------------


def _write_pages(app: Sphinx) -> None:
    """Write the generated pages; those whose text is the same are not built again."""
    sys.path.insert(0, str(ROOT))
    pages = {"index.md": _index()}
    pages |= {f"api/{name}.rst": _of_module(name) for name in MODULES}
    pages |= {f"examples/{path}.rst": text for path, text in _examples(app)}
    pages |= {f"configuration/{name}.md": text for name, text in _sections()}
    pages |= {f"commands/{name}.md": text for name, text in _commands()}
    for name, text in pages.items():
        page = Path(app.srcdir) / name
        page.parent.mkdir(parents=True, exist_ok=True)
        if not page.exists() or page.read_text() != text:
            page.write_text(text)


def _index() -> str:
    """Return the first page: what README.md says first, and the pages that docs/README.md lists."""
    first = (ROOT / "README.md").read_text().partition("\n## ")[0].replace("](docs/", "](")
    listed = (ROOT / "docs" / "README.md").read_text().partition("\n## ")[2]
    parts = [first.rstrip()]
    for section in listed.split("\n## "):
        title = section.partition("\n")[0]
        names = "\n".join(re.findall(r"^- \[[^]]+\]\((\S+)\.md\)", section, re.MULTILINE))
        tree = f"```{{toctree}}\n:hidden:\n:caption: {title}\n\n{names}\n```"
        parts += [f"## {section.rstrip()}", tree]
    return "\n\n".join(parts) + "\n"


def _of_module(name: str) -> str:
    """Return the page of a module's public names; errors and modules have pages of their own."""
    module = importlib.import_module(name)
    own = [key for key, value in vars(module).items() if _is_of(value, module.__name__)]
    names = [
        key
        for key in getattr(module, "__all__", own)
        if key[0] != "_" and not _is_of(getattr(module, key), "hadal.errors")
    ]
    names.sort(key=lambda key: key != "initialize")
    described = f".. automodule:: {name}\n   :imported-members:\n   :members: {', '.join(names)}\n"
    return f"{name}\n{'=' * len(name)}\n\n{described}"


def _is_of(value: object, module: str) -> bool:
    return not str(getattr(value, "__name__", "_")).startswith("_") and (
        getattr(value, "__module__", "") == module
    )


def _examples(app: Sphinx) -> Iterator[tuple[str, str]]:
    for file in sorted((ROOT / "examples").rglob("*.*")):
        if file.suffix in SUFFIXES:
            name, source = file.relative_to(ROOT / "examples"), os.path.relpath(file, app.srcdir)
            yield (
                name.as_posix(),
                f"{name}\n{'=' * len(str(name))}\n\n.. literalinclude:: /{source}\n",
            )


def _configuration() -> tuple[str, list[str]]:
    """Return what docs/configuration.md says first, and its sections."""
    from hadal.config.document import pages

    first, _, rest = pages()["configuration.md"].partition("\n## Contents\n")
    generated = r"^Generated from .*\n\n"
    return re.sub(generated, "", first, flags=re.MULTILINE), rest.split("\n## ")[1:]


def _listed(text: str) -> str:
    """Return a section with its keys as a list of definitions, which fits a phone."""
    row = r"^\| (`\w+`) \| (.*?) \|(?: (.*?))? \| (.*) \| \*\*(.*?)\*\* \|$"

    def key(match: re.Match[str]) -> str:
        name, value, default, meaning, status = match.groups()
        default = f", default {default}" if default else ""
        return f"{name}\n: {value}{default}; {status}. {meaning}\n"

    text = re.sub(r"^\| key \| value .*\n\|---.*\n", "", text, flags=re.MULTILINE)
    return re.sub(row, key, text, flags=re.MULTILINE).replace("\\|", "|")


def _page_of(section: str) -> str:
    return section.partition("\n")[0].strip("`").lower().replace(" ", "_")


def _sections() -> Iterator[tuple[str, str]]:
    """Yield a page for each section of the configuration: its headings are one level higher."""
    for section in _configuration()[1]:
        parts = re.split(r"(^```.*?^```$)", f"## {section}", flags=re.DOTALL | re.MULTILINE)
        parts[::2] = [re.sub(r"^#(#+ )", r"\1", part, flags=re.MULTILINE) for part in parts[::2]]
        yield _page_of(section), _listed("".join(parts)).rstrip() + "\n"


def _homes() -> dict[str, str]:
    """Return the page of each heading of docs/configuration.md."""
    from hadal.config.document import anchor

    return {
        anchor(heading): _page_of(section)
        for section in _configuration()[1]
        for heading in re.findall(r"^#+ (.*)", f"## {section}", re.MULTILINE)
    }


# ---- the command line ----------------------------------------------------------------------------


def _commands() -> Iterator[tuple[str, str]]:
    """Yield a page for each command, as its help describes it."""
    from hadal.cli.main import command_line

    def described(parser: Parser, level: int) -> Iterator[str]:
        usage = parser.format_usage().strip()
        yield f"{'#' * level} {parser.prog}\n\n{parser.description}\n\n```text\n{usage}\n```\n"
        for group in parser._action_groups:
            rows = [row for row in group._group_actions if row.help != argparse.SUPPRESS]
            named = list(parser._rows([row for row in rows if row.dest not in ("help", "action")]))
            if named:
                yield f"**{group.title}**\n"
            for name, text in named:
                yield f"`{name.strip()}`\n: {text.replace('*', chr(92) + '*')}\n"
        if parser.examples:
            yield "```console\n" + "\n".join(f"$ {line}" for line in parser.examples) + "\n```\n"
        for each in _below(parser):
            yield from described(each, level + 1)

    for parser in _below(command_line()):
        name = str(parser.prog).partition(" ")[2]
        yield name, "\n".join(described(parser, 1))


def _below(parser: Parser) -> list[Parser]:
    groups = [row for row in parser._actions if isinstance(row, argparse._SubParsersAction)]
    return [each for group in groups for each in group.choices.values()]


# ---- links ---------------------------------------------------------------------------------------


def _read(app: Sphinx, name: str, source: list[str]) -> None:
    """Change a page on its way in: its links lead to pages of the site."""
    folder = (ROOT / "docs" / name).parent
    readme = {"examples": ROOT / "examples", "benchmarks": ROOT / "benchmarks"}.get(name)
    if readme is not None:
        moved = re.sub(
            r"\]\((?!https?:|#|\.\./)", f"](../{name}/", (readme / "README.md").read_text()
        )
        source[0] = moved.replace("](../docs/", "](") + "\n" + source[0]
    if name == "troubleshooting":
        source[0] += _by_message(source[0])
    if name == "configuration":
        tree = "```{toctree}\n:hidden:\n\n" + "\n".join(
            f"configuration/{_page_of(section)}" for section in _configuration()[1]
        )
        source[0] = (
            re.sub(r"\]\(#", "](configuration.md#", _configuration()[0]) + f"\n{tree}\n```\n"
        )
    homes = _homes()

    def link(match: re.Match[str]) -> str:
        """Lead a link to a file outside of docs/ to its page; a folder has none."""
        text, path, anchor = match.groups(default="")
        file = Path(os.path.normpath(folder / path))
        if file == ROOT / "docs" / "configuration.md" and anchor[1:] in homes:
            up = os.path.relpath(ROOT / "docs" / "configuration", folder)
            return f"[{text}]({up}/{homes[anchor[1:]]}.md{anchor})"
        if file.is_relative_to(ROOT / "docs"):
            return match[0].replace("README.md", "index.md")
        inside = os.path.relpath(ROOT / "docs" / os.path.relpath(file, ROOT), folder)
        if file.name == "README.md":
            return f"[{text}]({Path(inside).parent}.md{anchor})"
        return f"[{text}]({inside}.rst)" if file.suffix in SUFFIXES else text

    source[0] = re.sub(r"\[([^]]+)\]\((?!\w+:|#)([^)#\s]+)(#[^)]*)?\)", link, source[0])


def _by_message(page: str) -> str:
    """Return an index of the messages that docs/troubleshooting.md quotes, in their order."""
    rows = set()
    for section in re.split(r"^##+ ", page, flags=re.MULTILINE):
        title = section.partition("\n")[0]
        for message in re.findall(r"(?<![*\w])\*(?![*\s])([^*]+)\*(?!\*)", section):
            target = re.sub(r"[^a-z0-9_ -]", "", title.lower()).replace(" ", "-")
            rows.add(f"| *{' '.join(message.split())}* | [{title}](#{target}) |")
    table = "\n".join(sorted(rows, key=str.lower))
    return f"\n## By message\n\n| message | section |\n|---|---|\n{table}\n"


def setup(app: Sphinx) -> None:
    """Register what Sphinx calls."""
    app.connect("builder-inited", _write_pages)
    app.connect("source-read", _read)
