"""`hadal report`: versions, devices and available features; or the page of runs."""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import os
import platform
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hadal import __version__
from hadal.cli.parser import add_command, add_flag, add_json
from hadal.cli.terminal import aligned, is_colourful, key, show, show_json
from hadal.errors import UsageError

if TYPE_CHECKING:
    from rich.text import Text

_LIBRARIES = ("transformers", "accelerate", "peft", "trl", "lightning", "safetensors", "pydantic")
_STARTERS = {"ssh": "ssh", "slurm": "srun", "MPI": "mpirun", "pdsh": "pdsh"}
_AVAILABLE = "available"
_FOLLOW_S = 10

Section = dict[str, str]


def add_to(group: Any) -> None:
    """Add the subcommand."""
    parser = add_command(
        group,
        "report",
        help="Show versions, devices and available features; or build a page about runs",
        description="Show the installed versions, the devices of this machine, the available"
        " features and the reasons for missing ones. With directories of runs that had"
        " jsonl_monitor enabled, write one HTML page that shows them, and compares several.",
        examples=(
            "hadal report --markdown  # to be pasted into an issue",
            "hadal report runs/first --output first.html",
            "hadal report runs/first runs/second  # compares them in runs/report.html",
            "hadal report autotuning_results  # the table and picture of a search",
            "hadal report runs --follow  # until they end; the open page loads itself again",
        ),
    )
    add_flag(
        parser, "runs RUN", "Folder of a run or of several, or an events.jsonl", Path, nargs="*"
    )
    add_flag(
        parser,
        "--output FILE",
        "HTML file to write (default: report.html in the folder of all)",
        Path,
    )
    add_flag(
        parser, "--follow", f"Write the page every {_FOLLOW_S} seconds until all runs have ended"
    )
    form = parser.add_mutually_exclusive_group()
    add_json(form)
    add_flag(form, "--markdown", "Print plain text in a code block, for an issue")
    parser.set_defaults(run=run)


def run(parsed: argparse.Namespace) -> int:
    """Show it."""
    if parsed.runs:
        return _write_page(parsed.runs, parsed.output, follows=parsed.follow)
    if parsed.output or parsed.follow:
        raise UsageError("--output and --follow are about a page; pass the directory of a run")
    sections = {
        "versions": versions(),
        "machine": machine(),
        _AVAILABLE: {what: why or "yes" for what, why in lacking().items()},
    }
    if parsed.json:
        show_json(sections)
        return 0
    plain = parsed.markdown or not is_colourful(sys.stdout)
    if parsed.markdown:
        sys.stdout.write("```text\n")
    _show(sections, plain)
    if parsed.markdown:
        sys.stdout.write("```\n")
    return 0


def _write_page(runs: Sequence[Path], output: Path | None, *, follows: bool) -> int:
    from hadal.plugins.monitor.report import write_page

    path, is_over = write_page(runs, output, _FOLLOW_S if follows else None)
    show(f"wrote {path}" + ("" if is_over or not follows else "; Ctrl-C ends following"))
    while follows and not is_over:
        time.sleep(_FOLLOW_S)
        _, is_over = write_page(runs, output, _FOLLOW_S)
    return 0


def _show(sections: Mapping[str, Section], plain: bool) -> None:
    from rich.text import Text

    width = max(len(name) for section in sections.values() for name in section)
    for title, section in sections.items():
        show(title if plain else Text(title, "heading"))
        rows = []
        for name, value in section.items():
            shown = f"{name:<{width}}"
            if plain:
                rows.append((Text(shown), Text(value)))
            else:
                rows.append((key(shown), _marked(value) if title == _AVAILABLE else Text(value)))
        show(aligned(rows, indent=2))


def _marked(value: str) -> Text:
    from rich.text import Text

    if value == "yes":
        return Text("✓", "good")
    return Text.assemble(("✗ ", "error"), value.removeprefix("no: "))


def versions() -> Section:
    """Return the installed packages."""
    import torch

    from hadal.device.inventory import built_with, libraries

    found = {
        "hadal": f"{__version__}, {Path(__file__).parents[1]}",
        "python": f"{platform.python_version()}, {sys.executable}",
        "torch": f"{torch.__version__}, built for {built_with()}",
        **libraries(),
        "import deepspeed": deepspeed(),
    }
    return found | {name: _version(name) or "not installed" for name in _LIBRARIES}


def deepspeed() -> str:
    """Return the package that `import deepspeed` finds."""
    spec = importlib.util.find_spec("deepspeed")
    if spec is None or spec.origin is None:
        return "not importable (use `hadal run --as-deepspeed` or install compat/deepspeed-stub)"
    if Path(spec.origin).with_name("_led_to_hadal.py").exists():
        return f"leads to Hadal, as {_version('deepspeed')}"
    return f"DeepSpeed itself, {_version('deepspeed')}, {spec.origin}"


def machine() -> Section:
    """Return the devices and libraries that compute."""
    from hadal.device.inventory import backends, devices

    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    found = devices()
    facts = {
        "system": platform.platform(),
        "cores": f"{len(os.sched_getaffinity(0))} of {os.cpu_count()} usable",
        "memory": f"{memory / 1e9:.1f} GB",
        "process groups": ", ".join(backends()) or "none",
        "accelerators": str(len(found)) if found else "none",
    }
    return facts | {f"accelerator {number}": each for number, each in enumerate(found)}


def lacking() -> Section:
    """Return why each feature is unavailable; an empty text for available ones."""
    from hadal.comm.local.cross_memory import system
    from hadal.device.inventory import lacks_compiler, lacks_fused_kernels

    facts = {
        "fused optimizers": lacks_fused_kernels(),
        "torch.compile": lacks_compiler(),
        "shared memory between local ranks": ""
        if system() is not None
        else "this system has no cross-memory attach; gloo's sends are used",
        "hadal report RUN": _missing("plotly", "pip install plotly"),
        "hadal plot-schedule": _missing("matplotlib", "pip install matplotlib"),
    }
    for launcher, program in _STARTERS.items():
        found = shutil.which(program)
        facts[f"hadal run by {launcher}"] = "" if found else f"`{program}` is not installed"
    return {what: f"no: {why}" if why else "" for what, why in facts.items()}


def _missing(module: str, remedy: str) -> str:
    found = importlib.util.find_spec(module) is not None
    return "" if found else f"{module} is not installed: {remedy}"


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
