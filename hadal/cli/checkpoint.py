"""`hadal checkpoint`: commands on checkpoints and pickles, without training."""

from __future__ import annotations

import argparse
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hadal.cli.parser import add_actions, add_command, add_flag, add_json, integer, size
from hadal.cli.terminal import (
    FAILED,
    CommandError,
    aligned,
    heading,
    key,
    progress,
    show,
    show_json,
    table,
)
from hadal.units import shown_nbytes

if TYPE_CHECKING:
    from rich.table import Table
    from rich.text import Text

    from hadal.checkpoint.inspection import CheckpointReport
    from hadal.checkpoint.scanning import Scan
    from hadal.checkpoint.source import Source
    from hadal.checkpoint.storage import Location

_DTYPES = ("fp32", "bf16", "fp16")
_DIR = "The directory or URL given to save_checkpoint, or one checkpoint; also DeepSpeed's"


def add_to(group: Any) -> None:
    """Add the subcommand and its own."""
    own = add_actions(
        group,
        "checkpoint",
        help="Inspect, verify, export or convert checkpoints; scan pickles",
        description="Inspect, verify, export or convert checkpoints of Hadal and of DeepSpeed"
        " without the program that wrote them, and scan other pickles for code.",
        examples=("hadal checkpoint inspect checkpoints",),
    )
    exporting = add_command(
        own,
        "export",
        help="Write a checkpoint in another library's format",
        description="Write a checkpoint for other libraries: its weights as safetensors in the"
        " layout of Hugging Face (hf), weights and optimizer state as torch.distributed.checkpoint"
        " reads them (dcp), or all of it in DeepSpeed's universal format (deepspeed-universal).",
        examples=(
            "hadal checkpoint export checkpoints exported --dtype bf16",
            "hadal checkpoint export checkpoints exported --format dcp",
        ),
    )
    _add_output(exporting)
    add_flag(exporting, "--format", "The format", default="hf", choices=tuple(_EXPORTS))
    add_flag(
        exporting,
        "--dtype",
        "dtype of the weights (default: hf: the one they compute in; dcp: exact values, as"
        " the masters have)",
        choices=_DTYPES,
    )
    add_flag(exporting, "--no-optimizer", "Leave out the optimizer's state (hf never has it)")
    exporting.set_defaults(run=run_export)
    converting = add_command(
        own,
        "to-fp32",
        help="Write the fp32 weights in Hugging Face layout",
        description="Write the fp32 master weights of a checkpoint as safetensors, in the layout of"
        " Hugging Face.",
        examples=("hadal checkpoint to-fp32 checkpoints exported --tag global_step1000",),
    )
    _add_output(converting)
    converting.set_defaults(run=run_export, dtype="fp32", format="hf")
    inspecting = add_command(
        own,
        "inspect",
        help="Show the contents of a checkpoint, and verify them",
        description="Show the contents of the checkpoints in a directory, and compare every byte"
        " with its checksum. The exit code is 1 if one is damaged.",
        examples=("hadal checkpoint inspect checkpoints --quick",),
    )
    _add_input(inspecting)
    add_json(inspecting)
    add_flag(inspecting, "--quick", "Do not compare every byte with its checksum")
    inspecting.set_defaults(run=run_inspect)
    _add_checks(own)


def _add_checks(own: Any) -> None:
    verifying = add_command(
        own,
        "verify",
        help="Compare every byte of checkpoints with their checksums",
        description="Compare every byte of a checkpoint, or of all in a directory, with its"
        " checksum. The exit code is 1 if one is damaged.",
        examples=(
            "hadal checkpoint verify checkpoints",
            "hadal checkpoint verify checkpoints best",
        ),
    )
    add_flag(verifying, "dir DIR", _DIR)
    add_flag(verifying, "tag TAG", "Which one (default: all in DIR)", nargs="?")
    verifying.set_defaults(run=run_verify)
    cleaning = add_command(
        own,
        "clean",
        help="Remove what killed saves have left",
        description="List the files that killed jobs have left in a directory of checkpoints, with"
        " the time since their last write, and remove them with --yes. Checkpoints and saves in"
        " progress are kept.",
        examples=("hadal checkpoint clean checkpoints", "hadal checkpoint clean checkpoints --yes"),
    )
    add_flag(cleaning, "dir DIR", "The directory or URL given to save_checkpoint")
    add_flag(cleaning, "--yes", "Remove them")
    add_flag(
        cleaning,
        "--older-than HOURS",
        "Keep younger files that no save claims, as they may belong to a checkpoint that is being"
        " copied",
        integer(ge=0),
        1,
    )
    cleaning.set_defaults(run=run_clean)
    scanning = add_command(
        own,
        "scan",
        help="List the code that pickles would import and run, without running it",
        description="List the globals that pickles and .pt files of others would import and call if"
        " they were loaded, without loading them. The exit code is 1 if one is not known to be"
        " harmless, or if a file cannot be read.",
        examples=("hadal checkpoint scan downloads", "hadal checkpoint scan model.pt --all"),
    )
    add_flag(scanning, "path PATH", "A file or a directory", Path)
    add_flag(scanning, "--all", "List harmless globals too")
    add_json(scanning)
    scanning.set_defaults(run=run_scan)


def _add_input(parser: argparse.ArgumentParser) -> None:
    add_flag(parser, "dir DIR", _DIR)
    add_flag(parser, "-t --tag TAG", "Which checkpoint in DIR (default: the latest)")


def _add_output(parser: argparse.ArgumentParser) -> None:
    _add_input(parser)
    add_flag(parser, "out OUT", "The directory or URL to write to")
    add_weights(parser)


def add_weights(parser: argparse.ArgumentParser) -> None:
    """Add the flags that choose weights and divide them into files."""
    add_flag(parser, "--max-shard-size SIZE", "Size of the largest file", size, "5GB")
    add_flag(parser, "--exclude-frozen-parameters", "Leave out parameters that were not trained")
    add_flag(
        parser,
        "--part N",
        "Which part of a model that was trained in model-parallel parts",
        integer(ge=0),
    )


# ---- out of a checkpoint -------------------------------------------------------------------------


def run_export(parsed: argparse.Namespace) -> int:
    """Write a checkpoint in another format."""
    from hadal.checkpoint.files import location_of, nbytes_at
    from hadal.checkpoint.opening import opened

    parsed.out = location_of(parsed.out)
    source = opened(parsed.dir, parsed.tag, parsed.part)
    written = _EXPORTS[parsed.format](source, parsed)
    source.close()
    rows = [(key(str(path)), shown_nbytes(nbytes_at(path))) for path in written]
    show(aligned(rows))
    return 0


def _export_hf(source: Source, parsed: argparse.Namespace) -> list[Location]:
    from hadal.checkpoint.export import DTYPES, export, nbytes_of_export
    from hadal.checkpoint.rules import NAME

    dtype = None if parsed.dtype is None else DTYPES[parsed.dtype]
    exclude_frozen = parsed.exclude_frozen_parameters
    total = nbytes_of_export(source, dtype, exclude_frozen=exclude_frozen)
    with progress(total, "exporting", is_bytes=True) as advance:
        return export(
            source,
            parsed.out,
            NAME,
            dtype=dtype,
            max_shard_nbytes=parsed.max_shard_size,
            exclude_frozen=exclude_frozen,
            progress=advance,
        )


def _export_dcp(source: Source, parsed: argparse.Namespace) -> list[Location]:
    from hadal.checkpoint.export import DTYPES
    from hadal.checkpoint.formats.dcp import export_dcp, nbytes_of_dcp

    dtype = None if parsed.dtype is None else DTYPES[parsed.dtype]
    options = {
        "with_optimizer": not parsed.no_optimizer,
        "exclude_frozen": parsed.exclude_frozen_parameters,
    }
    total = nbytes_of_dcp(source, dtype, **options)
    with progress(total, "exporting", is_bytes=True) as advance:
        return export_dcp(
            source,
            parsed.out,
            dtype=dtype,
            max_file_nbytes=parsed.max_shard_size,
            progress=advance,
            **options,
        )


def _export_universal(source: Source, parsed: argparse.Namespace) -> list[Location]:
    from hadal.checkpoint.formats.universal import export_universal, nbytes_of_universal

    if parsed.dtype not in (None, "fp32") or parsed.no_optimizer:
        raise CommandError(
            "DeepSpeed's universal format is fp32 and has the optimizer's state; leave out --dtype"
            " and --no-optimizer, or choose --format dcp"
        )
    if parsed.exclude_frozen_parameters:
        raise CommandError(
            "DeepSpeed's universal format has all parameters; leave out --exclude-frozen-parameters"
        )
    folder = parsed.out / f"{source.path.name}_universal"
    with progress(nbytes_of_universal(source), "exporting", is_bytes=True) as advance:
        return [export_universal(source, folder, progress=advance)]


_EXPORTS = {"hf": _export_hf, "dcp": _export_dcp, "deepspeed-universal": _export_universal}


# ---- contents ------------------------------------------------------------------------------------


def run_inspect(parsed: argparse.Namespace) -> int:
    """Show checkpoints; return 1 if one is damaged."""
    from hadal.checkpoint.inspection import inspected

    reports = inspected(parsed.dir, parsed.tag, verify=not parsed.quick)
    if parsed.json:
        show_json([asdict(report) for report in reports])
    else:
        _show(reports)
    return FAILED if any(report.faults for report in reports) else 0


def run_verify(parsed: argparse.Namespace) -> int:
    """Verify checkpoints; return 1 if one is damaged."""
    from rich.text import Text

    from hadal.checkpoint.inspection import inspected

    total = sum(one.file_nbytes for one in inspected(parsed.dir, parsed.tag, verify=False))
    with progress(total, "verifying", is_bytes=True) as advance:
        reports = inspected(parsed.dir, parsed.tag, progress=advance)
    for report in reports:
        count = report.file_count
        noun = "file" if count == 1 else "files"
        size = f"{count} {noun}, {shown_nbytes(report.file_nbytes)}"
        show(Text.assemble((report.tag, "key"), f": {size}: ", _health(report)))
        for fault in report.faults:
            show(Text.assemble(("damaged: ", "error"), fault))
    return FAILED if any(report.faults for report in reports) else 0


def run_clean(parsed: argparse.Namespace) -> int:
    """List what killed saves have left, and remove it if asked to."""
    from hadal.checkpoint.files import is_folder, location_of
    from hadal.checkpoint.folders import clean, put_beside

    folder = location_of(parsed.dir)
    if not is_folder(folder):
        raise CommandError(f"{folder} is not a directory; pass the one given to save_checkpoint")
    found = clean(folder, parsed.older_than * 3600, is_dry=not parsed.yes)
    if found:
        show(aligned([(key(str(path)), f"{age_s / 3600:.1f} h old") for path, age_s in found]))
    count = f"{len(found)} leftover{'s' * (len(found) != 1)}"
    show(f"{count} removed" if parsed.yes else f"{count}; add --yes to remove" if found else count)
    for checkpoint in put_beside(folder, is_dry=not parsed.yes):
        done = "are in place now" if parsed.yes else "are not in place; add --yes to put them there"
        show(f"{checkpoint}: files for DeepSpeed's tools {done}")
    return 0


# ---- others' files -------------------------------------------------------------------------------


def run_scan(parsed: argparse.Namespace) -> int:
    """Scan pickles; return 1 if one may run code."""
    from hadal.checkpoint.scanning import files_below, scan_all

    files = len(files_below(parsed.path)) if parsed.path.is_dir() else 1
    with progress(files, "scanning") as advance:
        scans = scan_all(parsed.path, lambda _: advance(1))
    if parsed.json:
        show_json([asdict(scan) for scan in scans])
    else:
        _show_scans(scans, parsed.all)
    return 0 if all(scan.is_harmless for scan in scans) else FAILED


def _show_scans(scans: list[Scan], shows_all: bool) -> None:
    from rich.text import Text

    styles = {"harmless": "good", "unknown": "warning", "dangerous": "error"}
    made = table("file", "global", "verdict")
    for scan in scans:
        for one in scan.findings:
            if shows_all or one.verdict != "harmless":
                made.add_row(scan.path, one.name, Text(one.verdict, styles[one.verdict]))
    if made.row_count:
        show(made)
    for scan in scans:
        for fault in scan.faults:
            show(Text.assemble(("not readable: ", "error"), f"{scan.path}: {fault}"))
    clean = sum(scan.is_harmless for scan in scans)
    noun = "file" if len(scans) == 1 else "files"
    show(f"{len(scans)} {noun} with pickles, {clean} of them known to be harmless")


def _show(reports: list[CheckpointReport]) -> None:
    from rich.text import Text

    show(_overview(reports))
    for report in reports:
        if report.holdings:
            show("", heading(_title(report)), _contents(report))
    for report in reports:
        for fault in report.faults:
            show(Text.assemble(("damaged: ", "error"), fault))


def _overview(reports: list[CheckpointReport]) -> Table:
    right = ("stage", "ranks", "steps")
    made = table("checkpoint", "saved", *right, "size", "health", right=(*right, "size"))
    for report in reports:
        name = f"{report.tag}{' (latest)' * report.is_latest}"
        row = (report.stage, report.world_size, report.global_steps)
        shown = ["?" if value is None else f"{value:,}" for value in row]
        saved = "?" if report.saved_at is None else _moment(report.saved_at)
        made.add_row(name, saved, *shown, shown_nbytes(report.file_nbytes), _health(report))
    for column in made.columns[1:]:
        column.no_wrap = True
    return made


def _title(report: CheckpointReport) -> str:
    parts = f" in {report.parts} parts" if report.parts > 1 else ""
    files = f"{report.file_count} file{'s' * (report.file_count != 1)}"
    return (
        f"{report.tag}: {report.parameters:,} elements of weights{parts}, {files} written by"
        f" {report.writer}"
    )


def _contents(report: CheckpointReport) -> Table:
    right = ("tensors", "elements", "size")
    made = table("kind", "dtype", *right, right=right)
    for one in report.holdings:
        # Weights that are the rounding of their masters are not stored twice.
        stored = shown_nbytes(one.nbytes) if one.nbytes or not one.numel else "in the masters"
        made.add_row(one.kind, one.dtype, str(one.tensors), f"{one.numel:,}", stored)
    return made


def _health(report: CheckpointReport) -> Text:
    from rich.text import Text

    if report.faults:
        return Text("damaged", "error")
    return Text("whole", "good") if report.checked else Text("not checked", "faint")


def _moment(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds))
