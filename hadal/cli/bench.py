"""`hadal bench`: what it measures. `hadal bench io PATH` finds the `aio` section for a disk."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from hadal.cli import bench_comm
from hadal.errors import HadalError

if TYPE_CHECKING:
    from rich.console import Console

    from hadal.autotuning.disk import Measured, Search

_FAULTY = 1


def add_to(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the subcommand and its own."""
    parser = subparsers.add_parser("bench", help="measure this machine")
    own = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    bench_comm.add_to(own)
    disk = own.add_parser(
        "io",
        help="find the aio section for a disk",
        description="Write and read a file in PATH with one setting of the aio section after the"
        " other; print how fast each is, and the best as JSON for ds_config.json.",
    )
    disk.add_argument("path", metavar="PATH", type=Path, help="a folder on the disk (nvme_path)")
    disk.add_argument(
        "--size", default="1GB", metavar="SIZE", help="length of the file (default 1GB)"
    )
    disk.add_argument(
        "--seconds",
        type=_positive,
        default=60.0,
        metavar="S",
        help="how long the measurements take together (default 60)",
    )
    disk.add_argument("--json", type=Path, metavar="FILE", help="write the JSON to a file too")
    disk.set_defaults(run=run_io)


def _positive(text: str) -> float:
    value = float(text)
    if not value > 0:
        raise argparse.ArgumentTypeError(f"expected a number > 0, got {text}")
    return value


def run_io(parsed: argparse.Namespace) -> int:
    """Measure a disk; return 1 where that cannot be done."""
    from rich.console import Console

    from hadal.autotuning.disk import Search, measurer
    from hadal.checkpoint.huggingface import nbytes_of
    from hadal.offload.settings import section_of

    try:
        nbytes = nbytes_of(parsed.size)
        search = Search(measurer(parsed.path, nbytes, parsed.seconds, Search.count))
        found = _measured(search, Console(stderr=True))
    except (HadalError, ValueError) as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return _FAULTY
    assert search.best is not None  # the defaults are always measured
    _show(found, search.best)
    text = json.dumps({"aio": section_of(search.best.settings)}, indent=2)
    print(text)
    if parsed.json is not None:
        try:
            parsed.json.write_text(text + "\n")
        except OSError as error:
            print(f"{parsed.json} cannot be written: {error}", file=sys.stderr)
            return _FAULTY
    return 0


def _measured(search: Search, console: Console) -> list[Measured]:
    """Run the search behind a bar that says how far it is."""
    from rich.progress import track

    turns = track(
        search.run(),
        "measuring",
        total=search.count,
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )
    return list(turns)


def _show(found: list[Measured], best: Measured) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    from hadal.offload.settings import section_of

    # Long names in two lines, so that all fit side by side.
    titles = ["_\n".join(name.rsplit("_", 1)) for name in section_of(best.settings)]
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for title in (*titles, "write\nGB/s", "read\nGB/s"):
        table.add_column(title, justify="right")
    for one in found:
        values = [json.dumps(value) for value in section_of(one.settings).values()]
        speeds = [f"{speed.gb_per_s:.3g}" for speed in (one.write, one.read)]
        table.add_row(*values, *speeds, style="bold green" if one is best else None)
    Console().print(table)
