"""`hadal plan`: whether a model fits, what holds the memory, and how long an update takes."""

from __future__ import annotations

import argparse
import json
import os
import runpy
import sys
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from hadal.cli.estimate import model_at
from hadal.cli.parser import CONFIG_HELP, add_command, add_flag, add_json, positive
from hadal.cli.terminal import (
    COLOURS,
    FAINT,
    CommandError,
    aligned,
    heading,
    picture_path,
    show,
    show_json,
    table,
    write_picture,
)
from hadal.units import shown_numel

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from torch import nn

    from hadal.engine.foresight import Change, Foresight

_GB = 1e9
_LENGTH = 4096
_STACKED = ("weights", "optimizer", "gradients", "gathers", "reductions", "activations")


def add_to(group: Any) -> None:
    """Add the subcommand."""
    parser = add_command(
        group,
        "plan",
        help="Foresee memory and time of a run, and what to change to make it fit",
        description="Foresee the memory of each rank at its peak, by kind, and the time of an"
        " update, by part, on a cluster that need not be here: the model is built without weights"
        " and runs once without values. If it does not fit, show the changes of the configuration"
        " that make it fit, in the order of their cost. In place of --model and --config, a program"
        " may be given with its arguments, which runs up to its first forward.",
        examples=(
            "hadal plan --model meta-llama/ --config ds_config.json --cluster h100x8",
            "hadal plan --model package.module:build --config ds_config.json --nodes 4",
            "hadal plan --cluster h200x8 train.py --deepspeed ds_config.json",
        ),
        words="[PROGRAM [ARGUMENT ...]]",
    )
    add_flag(
        parser,
        "--model MODEL",
        "A folder with a Hugging Face config.json, or MODULE:FUNCTION, a function that returns the"
        " model, or the model and one micro-batch of a rank",
    )
    parser.add_argument("--config", metavar="CONFIG", help=CONFIG_HELP)
    where = parser.add_argument_group("Where")
    add_flag(
        where,
        "--cluster NAME",
        "Devices and their number in a node, such as h200x8, or a file of `hadal bench cluster`",
        default="h100x8",
    )
    add_flag(where, "--nodes N", "Nodes", positive, 1)
    add_flag(where, "--devices-per-node N", "Devices of each node, if not all", positive)
    how = parser.add_argument_group("How")
    add_flag(
        how,
        "--sequence-length N",
        f"Tokens of a row, for a model of transformers (default: {_LENGTH}, or the model's most)",
        positive,
    )
    add_flag(how, "--with-values", "Compute on the CPU: for models whose shapes depend on values")
    add_flag(parser, "--output FILE", "Draw the memory of an update, by kind", Path)
    add_json(parser)
    parser.add_argument("program", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    parser.set_defaults(run=run)


def run(parsed: argparse.Namespace) -> int:
    """Show the plan; return 1 if it does not fit.

    Raises:
        HadalError: the model, the configuration or the cluster has faults.
    """
    from hadal.engine.foresight import advise

    if parsed.output is not None:
        parsed.output = picture_path(parsed.output)
    model, found = _of_program(parsed) if parsed.program else _of_model(parsed)
    changes = [] if found.fits or found.batch is None else advise(found, model)
    if parsed.json:
        show_json(_plain(found, changes))
    else:
        _show(found, changes)
    if parsed.output is not None:
        write_picture(figure_of(found), parsed.output)
    return 0 if found.fits else 1


# ---- what is planned -----------------------------------------------------------------------------


def _of_model(parsed: argparse.Namespace) -> tuple[nn.Module, Foresight]:
    from hadal.engine.foresight import plan

    if parsed.model is None or parsed.config is None:
        raise CommandError("expected --model and --config, or a program with its arguments")
    model, batch = model_at(parsed.model)
    if batch is None:
        batch = _tokens(model, parsed)
    return model, plan(model, parsed.config, batch, **_where(parsed))


def _where(parsed: argparse.Namespace) -> dict[str, Any]:
    return {
        "cluster": parsed.cluster,
        "nodes": parsed.nodes,
        "devices_per_node": parsed.devices_per_node,
        "with_values": parsed.with_values,
    }


def _tokens(model: nn.Module, parsed: argparse.Namespace) -> Any:
    """Return a micro-batch of a language model of transformers; None for other models."""
    import torch

    from hadal.config.reading import read

    known = getattr(model, "config", None)
    if getattr(model, "main_input_name", None) != "input_ids" or known is None:
        return None
    most = getattr(known, "max_position_embeddings", None) or _LENGTH
    length = parsed.sequence_length or min(_LENGTH, most)
    rows = read(parsed.config)[1].get("train_micro_batch_size_per_gpu", 1)
    ids = torch.zeros(rows if isinstance(rows, int) else 1, length, dtype=torch.long, device="meta")
    return {"input_ids": ids, "labels": ids}


class _Planned(BaseException):
    """The end of a program that has been planned, at the first forward of its engine."""

    def __init__(self, model: nn.Module, found: Foresight) -> None:
        super().__init__()
        self.model = model
        self.found = found


def _of_program(parsed: argparse.Namespace) -> tuple[nn.Module, Foresight]:
    """Run a program, as one rank, up to the first forward of its engine.

    Raises:
        CommandError: it ended before that.
    """
    from hadal.engine.foresight import plan
    from hadal.engine.planned_program import plan_instead

    if parsed.model is not None or parsed.config is not None:
        raise CommandError("a program has its own model and configuration; leave out the flags")
    name, *words = parsed.program
    if not Path(name).is_file():
        raise CommandError(f"{name} is no file; expected a Python program")

    def forwarded(model: nn.Module, raw: dict[str, Any], batch: Any) -> NoReturn:
        raise _Planned(model, plan(model, raw, batch, **_where(parsed)))

    plan_instead(forwarded)
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    for key, value in (alone | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}).items():
        os.environ.setdefault(key, value)
    sys.argv = [name, *words]
    sys.path.insert(0, str(Path(name).resolve().parent))
    try:
        runpy.run_path(name, run_name="__main__")
    except _Planned as end:
        return end.model, end.found
    raise CommandError(f"{name} ended without a forward of an engine that `initialize` returned")


# ---- output --------------------------------------------------------------------------------------


def _show(found: Foresight, changes: Sequence[Change]) -> None:
    rank, cluster = found.rank, found.cluster
    numel = sum(p.numel() for p in rank.model.parameters())
    nodes = f"{rank.job.nodes} x {rank.job.devices_per_node}"
    said = f"{type(rank.model).__name__}, {shown_numel(numel)} parameters, on {nodes} devices of"
    stage = f"{cluster.name}, stage {found.memory.stage} with {found.memory.optimizer}"
    numbers = ("device", "host", "disk")
    made = table("GB per rank", *numbers, "", right=numbers)
    for need in found.kinds:
        if any(need.held):
            made.add_row(need.kind, *map(_gb, need.held), need.how)
    made.add_row("total", *map(_gb, found.total), _verdict(found), style="heading")
    show(heading(f"{said} {stage}"), "", made, "")
    if found.peak is not None:
        unit = f" of {found.peak.unit}" if found.peak.unit else ""
        show(f"The peak is in {found.peak.phase}{unit}, with {_batch(found.batch)} a rank.", "")
    else:
        show("Without a batch, activations and time are left out.", "")
    if found.time is not None:
        _show_time(found)
    if changes:
        _show_changes(changes)
    elif not found.fits:
        show("No change of the configuration that saves memory is left; use more devices.")


def _batch(batch: Any) -> str:
    from torch.utils._pytree import tree_leaves

    shapes = (getattr(leaf, "shape", None) for leaf in tree_leaves(batch))
    known = dict.fromkeys(" x ".join(map(str, shape)) for shape in shapes if shape is not None)
    return f"a micro-batch of {' and '.join(known)}"


def _verdict(found: Foresight) -> str:
    room, lacks = found.cluster.device_nbytes, found.lacks
    if lacks.device:
        return f"does not fit: {_gb(lacks.device)} GB more than a device has"
    if lacks.host:
        return f"does not fit: {_gb(lacks.host)} GB more than a node's host has"
    if found.cluster.computes_on_host:
        return "fits"
    return f"fits, {_gb(room - found.total.device)} of {_gb(room)} GB left"


def _show_time(found: Foresight) -> None:
    time = found.time
    assert time is not None  # asked for only then
    numbers = ("ms", "exposed ms", "GB sent")
    made = table("an update", *numbers, right=numbers)
    for name, part in time.parts.items():
        if part.seconds:
            cells = f"{1e3 * part.seconds:,.1f}", f"{1e3 * part.exposed:,.1f}"
            made.add_row(name, *cells, _gb(part.wire_nbytes))
    made.add_row("total", "", f"{1e3 * time.seconds:,.1f}", "", style="heading")
    rate = f"{time.samples_per_second:,.2f} samples per second, MFU {time.utilization:.0%}"
    assumed = {text.split(":")[0] for text in found.cluster.sources.values()}
    left_out = f" Not counted: {', '.join(time.left_out)}." if time.left_out else ""
    show(made, "", f"{rate}; speeds are {' and '.join(sorted(assumed))}.{left_out}", "")


def _show_changes(changes: Sequence[Change]) -> None:
    last = changes[-1].after
    what = "What would make it fit" if last.fits else "What would help, though it does not suffice"
    rows = []
    for change in changes:
        saved = f"saves {_gb(change.saved.device)} GB"
        takes = change.after.time
        rate = "" if takes is None else f"{takes.samples_per_second:,.2f} samples/s"
        rows.append((change.what, saved, rate, json.dumps(change.patch)))
    show(heading(f"{what}, in the order of its cost:"), aligned(rows), "")
    show(f"Then: {_verdict(last)}.")


def _gb(nbytes: int) -> str:
    if 0 < nbytes < 0.005 * _GB:
        return "<0.01"
    return f"{nbytes / _GB:,.2f}" if nbytes else "-"


def _plain(found: Foresight, changes: Sequence[Change]) -> dict[str, Any]:
    """Return the plan for JSON; bytes and seconds."""
    plain: dict[str, Any] = {
        "fits": found.fits,
        "total": found.total._asdict(),
        "lacks": found.lacks._asdict(),
        "kinds": {n.kind: {**n.held._asdict(), "how": n.how} for n in found.kinds},
    }
    if found.peak is not None and found.time is not None:
        time = found.time
        plain["peak"] = {"phase": found.peak.phase, "unit": found.peak.unit}
        plain["moments"] = [{**m._asdict(), "held": dict(m.held)} for m in found.moments]
        plain["time"] = {
            "seconds": time.seconds,
            "samples_per_second": time.samples_per_second,
            "utilization": time.utilization,
            "parts": {
                name: {
                    "seconds": part.seconds,
                    "exposed": part.exposed,
                    "wire_nbytes": part.wire_nbytes,
                }
                for name, part in time.parts.items()
            },
        }
    plain["changes"] = [
        {
            "what": change.what,
            "patch": change.patch,
            "saved": change.saved._asdict(),
            "fits": change.after.fits,
        }
        for change in changes
    ]
    return plain


def figure_of(found: Foresight) -> Figure:
    """Draw the device's memory along an update, stacked by kind.

    Raises:
        CommandError: there was no batch.
    """
    from matplotlib.figure import Figure

    if not found.moments:
        raise CommandError("without a batch there is no memory of an update to draw")
    figure = Figure(figsize=(9, 4.5), layout="constrained")
    axis = figure.subplots()
    # The most of each unit's use.
    moments = [
        max(same, key=lambda moment: moment.total)
        for _, same in groupby(found.moments, key=lambda moment: (moment.phase, moment.unit))
    ]
    values = [[m.held.get(kind, 0) / _GB for m in moments] for kind in _STACKED]
    values.append([m.total / _GB - sum(own) for m, *own in zip(moments, *values, strict=True)])
    axis.stackplot(
        range(len(moments)),
        values,
        labels=[*_STACKED, "others"],
        colors=[*COLOURS, FAINT],
        step="mid",
    )
    if not found.cluster.computes_on_host:
        axis.axhline(found.cluster.device_nbytes / _GB, color="black", linewidth=1)
    _mark_phases(axis, [moment.phase for moment in moments])
    axis.set_ylabel("GB on the device")
    axis.set_xlim(0, len(moments) - 1)
    axis.grid(axis="y", color=FAINT, linewidth=0.6)
    axis.spines[["top", "right"]].set_visible(False)
    handles, labels = axis.get_legend_handles_labels()
    axis.legend(
        handles[::-1], labels[::-1], frameon=False, loc="center left", bbox_to_anchor=(1, 0.5)
    )
    figure.suptitle(f"{type(found.rank.model).__name__} on {found.cluster.name}", fontsize=12)
    return figure


def _mark_phases(axis: Any, phases: Sequence[str]) -> None:
    starts = [at for at, name in enumerate(phases) if not at or phases[at - 1] != name]
    axis.set_xticks(starts, [phases[at] for at in starts], ha="left")
