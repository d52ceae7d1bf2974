"""`hadal bench`: its kinds of benchmarks. `hadal bench io PATH` tunes `aio` for a disk."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hadal.cli import bench_comm
from hadal.cli.arguments import number, size
from hadal.cli.parser import add_actions, add_command
from hadal.cli.terminal import CommandError, progress, show, table, write_file
from hadal.units import shown_binary

if TYPE_CHECKING:
    from hadal.plugins.autotuning.disk import MeasuredSettings, Search


def add_to(group: Any) -> None:
    """Add the subcommand and its own."""
    own = add_actions(
        group,
        "bench",
        help="Measure collectives or a disk",
        description="Measure how fast ranks send to each other, or how fast a disk is.",
        examples=("hadal bench comm", "hadal bench io /nvme"),
    )
    bench_comm.add_to(own)
    disk = add_command(
        own,
        "io",
        help="Find the `aio` section for a disk",
        description="Write and read a file in PATH with one setting of the `aio` section after the"
        " other. Print how fast each is, and the best as JSON for ds_config.json if it is faster"
        " than the defaults.",
        examples=("hadal bench io /nvme --seconds 30 --json aio.json",),
    )
    disk.add_argument(
        "path", metavar="PATH", type=Path, help="An existing directory on the disk (nvme_path)"
    )
    disk.add_argument(
        "--size",
        type=size,
        default="1GB",
        metavar="SIZE",
        help="Size of the file (default: %(default)s)",
    )
    disk.add_argument(
        "--seconds",
        type=number(gt=0),
        default=60.0,
        metavar="S",
        help="How long all measurements take together (default: 60)",
    )
    disk.add_argument("--json", type=Path, metavar="FILE", help="Write the JSON to a file too")
    disk.set_defaults(run=run_io)


def run_io(parsed: argparse.Namespace) -> int:
    """Measure a disk.

    Raises:
        HadalError: that cannot be done.
    """
    from hadal.plugins.autotuning.disk import Search, keys_of, measurer

    if not parsed.path.is_dir():
        what = "is not a directory" if parsed.path.exists() else "does not exist"
        raise CommandError(f"{parsed.path} {what}; name an existing directory on the disk")
    search = Search(measurer(parsed.path, parsed.size, parsed.seconds, Search.turns))
    bar, task = progress(Search.turns, "measuring")
    found = []
    with bar:
        for one in search.run():
            found.append(one)
            bar.advance(task)
    assert search.best is not None  # the defaults are always measured
    _show(found, search)
    text = json.dumps({"aio": keys_of(search.best.settings)}, indent=2) + "\n"
    if search.best is found[0]:
        show(f"keep the defaults: no other setting is faster beyond the noise, {search.noise:.0%}")
    else:
        sys.stdout.write(text)
    if parsed.json is not None:
        write_file(parsed.json, text)
    return 0


def _show(found: list[MeasuredSettings], search: Search) -> None:
    from hadal.plugins.autotuning.disk import keys_of

    # Long names in two lines, so that all fit side by side.
    names = keys_of(found[0].settings)
    titles = [*("_\n".join(name.rsplit("_", 1)) for name in names), "write\nGB/s", "read\nGB/s"]
    made = table(*titles, "", right=titles)
    for one in found:
        values = keys_of(one.settings)
        cells = [json.dumps(value) for value in values.values()]
        cells[list(values).index("block_size")] = shown_binary(one.settings.block_size)
        cells += [f"{speed.gb_per_s:.2f}" for speed in (one.write, one.read)]
        is_best = one is search.best
        remark = "best" if is_best else "within noise" if search.is_as_good(one) else ""
        made.add_row(*cells, remark, style="best" if is_best else None)
    show(made, "")
