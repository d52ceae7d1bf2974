"""The site: these pages, and a reference made of the docstrings (`make site`)."""

from __future__ import annotations

import os
import re
from pathlib import Path

from sphinx.application import Sphinx

ROOT = Path(__file__).parent.parent
SUFFIXES = {".py", ".sh", ".yaml"}
MODULES = (
    "hadal",
    "hadal.zero",
    "hadal.comm",
    "hadal.utils",
    "hadal.activation_checkpointing",
    "hadal.autotuning",
    "hadal.compression",
    "hadal.data_efficiency",
    "hadal.moe",
    "hadal.monitor",
    "hadal.pipeline",
    "hadal.profiling",
    "hadal.sequence",
    "hadal.sparse_attention",
    "hadal.tensor_parallel",
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
    "sphinxcontrib.mermaid",
]
html_theme = "furo"
html_title = "Hadal"
root_doc = "index"
exclude_patterns = ["README.md", "sources"]
suppress_warnings = ["ref.ref"]  # labels in docstrings of torch
myst_enable_extensions = ["colon_fence"]
myst_fence_as_directive = ["mermaid"]
myst_heading_anchors = 4
autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_preserve_defaults = True
napoleon_google_docstring = True
napoleon_numpy_docstring = False
copybutton_prompt_text = r"\$ "
nitpicky = False


def _write_pages(app: Sphinx) -> None:
    """Write a page for each public module, of the names that it exports, and for each example."""
    pages = {
        f"api/{name}": f".. automodule:: {name}\n   :members:\n   :imported-members:\n"
        for name in MODULES
    }
    examples = [file for file in (ROOT / "examples").rglob("*.*") if file.suffix in SUFFIXES]
    for file in examples:
        name = file.relative_to(ROOT).as_posix()
        pages[name] = f".. literalinclude:: /{os.path.relpath(file, app.srcdir)}\n"
    for name, text in pages.items():
        page = Path(app.srcdir) / f"{name}.rst"
        page.parent.mkdir(parents=True, exist_ok=True)
        title = name.partition("/")[2]
        page.write_text(f"{title}\n{'=' * len(title)}\n\n{text}")


def _link(match: re.Match[str]) -> str:
    """Lead a link to a file outside of docs/ to its page; a folder has none."""
    text, path, anchor = match.groups(default="")
    folder, _, file = path.partition("/")
    if file == "README.md":
        return f"[{text}]({folder}.md{anchor})"
    return f"[{text}]({path}.rst)" if Path(path).suffix in SUFFIXES else text


def _read(app: Sphinx, name: str, source: list[str]) -> None:
    readme = ROOT / name / "README.md"
    if readme.exists():
        moved = re.sub(r"\]\((?!https?:|#|\.\./)", f"](../{name}/", readme.read_text())
        source[0] = moved.replace("](../docs/", "](") + "\n" + source[0]
    source[0] = re.sub(r"\[([^]]+)\]\(\.\./([^)#]+)(#[^)]*)?\)", _link, source[0])


def setup(app: Sphinx) -> None:
    """Register what Sphinx calls."""
    app.connect("builder-inited", _write_pages)
    app.connect("source-read", _read)
