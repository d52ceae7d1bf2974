"""`hadal checkpoint export|to-fp32|inspect`: what to do with a checkpoint without training."""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from hadal.errors import HadalError

if TYPE_CHECKING:
    from rich.table import Table

    from hadal.checkpoint.inspection import CheckpointReport

_FAULTY = 1
_DTYPES = ("fp32", "bf16", "fp16")
_DIR = "the folder that save_checkpoint wrote to, or one checkpoint; Hadal's or DeepSpeed's"


def add_to(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the subcommand and its own."""
    parser = subparsers.add_parser("checkpoint", help="export, convert or inspect checkpoints")
    own = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    exporting = own.add_parser("export", help="write the weights in Hugging Face layout")
    _add_output(exporting)
    exporting.add_argument(
        "--dtype", choices=_DTYPES, help="dtype of the weights (default: their own)"
    )
    exporting.set_defaults(run=run_export)
    converting = own.add_parser("to-fp32", help="write the fp32 weights in Hugging Face layout")
    _add_output(converting)
    converting.set_defaults(run=run_export, dtype="fp32")
    inspecting = own.add_parser("inspect", help="show what is inside, and whether it is whole")
    _add_input(inspecting)
    inspecting.add_argument("--json", action="store_true", help="print JSON")
    inspecting.add_argument(
        "--quick", action="store_true", help="do not compare every byte with its checksum"
    )
    inspecting.set_defaults(run=run_inspect)


def _add_input(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("dir", metavar="DIR", type=Path, help=_DIR)
    parser.add_argument("-t", "--tag", help="which checkpoint in DIR (default: the latest)")


def _add_output(parser: argparse.ArgumentParser) -> None:
    _add_input(parser)
    parser.add_argument("out", metavar="OUT", type=Path, help="the folder to write to")
    parser.add_argument(
        "--max-shard-size", default="5GB", metavar="SIZE", help="longest file (default 5GB)"
    )
    parser.add_argument(
        "--exclude-frozen-parameters", action="store_true", help="leave out what was not trained"
    )
    parser.add_argument(
        "--part", type=int, metavar="N", help="which part of a model in model-parallel parts"
    )


# ---- out of a checkpoint -------------------------------------------------------------------------


def run_export(parsed: argparse.Namespace) -> int:
    """Write the weights of a checkpoint; return 1 where that cannot be done."""
    from hadal.checkpoint.export import DTYPES, export
    from hadal.checkpoint.huggingface import NAME, nbytes_of
    from hadal.checkpoint.opening import opened

    try:
        written = export(
            opened(parsed.dir, parsed.tag, parsed.part),
            parsed.out,
            NAME,
            dtype=None if parsed.dtype is None else DTYPES[parsed.dtype],
            max_shard_nbytes=nbytes_of(parsed.max_shard_size),
            exclude_frozen=parsed.exclude_frozen_parameters,
        )
    except (HadalError, ValueError) as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return _FAULTY
    for path in written:
        print(f"{path}  {_size(path.stat().st_size)}")
    return 0


# ---- what is inside ------------------------------------------------------------------------------


def run_inspect(parsed: argparse.Namespace) -> int:
    """Show checkpoints; return 1 where one is damaged."""
    from hadal.checkpoint.inspection import inspected

    try:
        reports = inspected(parsed.dir, parsed.tag, verify=not parsed.quick)
    except HadalError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return _FAULTY
    if parsed.json:
        print(json.dumps([asdict(report) for report in reports], indent=2))
    else:
        _show(reports)
    return _FAULTY if any(report.faults for report in reports) else 0


def _show(reports: list[CheckpointReport]) -> None:
    from rich.console import Console

    console = Console()
    console.print(_overview(reports))
    for report in reports:
        if report.holdings:
            console.print(_contents(report))
    for report in reports:
        for fault in report.faults:
            print(f"damaged: {fault}")


def _overview(reports: list[CheckpointReport]) -> Table:
    from rich.box import SIMPLE_HEAD
    from rich.markup import escape
    from rich.table import Table

    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("checkpoint", overflow="fold")
    for title in ("written by", "stage", "ranks", "steps", "saved", "files", "health"):
        table.add_column(title)
    for report in reports:
        name = f"{escape(report.tag)}{' (latest)' * report.is_latest}"
        files = f"{report.file_count}, {_size(report.file_nbytes)}"
        row = (report.stage, report.world_size, report.global_steps)
        shown = ["?" if value is None else str(value) for value in row]
        saved = "?" if report.saved_at is None else _moment(report.saved_at)
        table.add_row(name, report.writer, *shown, saved, files, _health(report))
    return table


def _contents(report: CheckpointReport) -> Table:
    from rich.box import SIMPLE_HEAD
    from rich.markup import escape
    from rich.table import Table

    title = f"{escape(report.tag)}: {report.parameters:,} elements of weights"
    if report.parts > 1:
        title += f" in {report.parts} parts"
    table = Table("what", "dtype", box=SIMPLE_HEAD, pad_edge=False, title=title)
    for column in ("tensors", "elements", "bytes"):
        table.add_column(column, justify="right")
    for one in report.holdings:
        table.add_row(one.kind, one.dtype, str(one.tensors), f"{one.numel:,}", _size(one.nbytes))
    return table


def _health(report: CheckpointReport) -> str:
    if report.faults:
        return "[red]damaged[/red]"
    return "[green]whole[/green]" if report.checked else "not checked"


def _moment(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds))


def _size(nbytes: int) -> str:
    size, units = float(nbytes), ["B", "kB", "MB", "GB", "TB"]
    while size >= 1000 and len(units) > 1:
        size /= 1000
        units.pop(0)
    return f"{size:.0f} B" if units[0] == "B" else f"{size:.1f} {units[0]}"
