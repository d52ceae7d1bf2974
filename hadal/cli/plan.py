"""`hadal plan`: whether a model fits, what holds the memory, and how long an update takes.

`hadal estimate` is the same for a model of which no micro-batch is known: without activations.
"""

from __future__ import annotations

import argparse
import inspect
import json
import os
import pkgutil
import re
import runpy
import sys
import textwrap
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from hadal.cli.parser import (
    CONFIG_HELP,
    add_command,
    add_flag,
    add_json,
    device_memory,
    numel,
    positive,
)
from hadal.cli.terminal import (
    COLOURS,
    FAILED,
    FAINT,
    WIDEST,
    CommandError,
    aligned,
    heading,
    note,
    picture_path,
    show,
    show_json,
    table,
    write_picture,
)
from hadal.errors import HadalError, ModelError, UsageError
from hadal.units import shown_nbytes, shown_numel

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from torch import nn

    from hadal.engine.candidates import Change
    from hadal.engine.clusters import ComputeCluster
    from hadal.engine.foresight import Foresight, Planner
    from hadal.zero.estimate import MemoryPlan

_GB = 1e9
_LENGTH = 4096
_STACKED = ("weights", "optimizer", "gradients", "gathers", "activations", "logits")


def add_to(group: Any) -> None:
    """Add the subcommand."""
    parser = add_command(
        group,
        "plan",
        help="Foresee memory and time of a run, and what to change to make it fit",
        description="Foresee the memory of each rank at its peak, by kind, and the time of an"
        " update, by part, on a cluster that need not be here: the model is built without weights"
        " and runs once without values. If it does not fit, show the changes of the configuration"
        " that make it fit, in the order of their cost; without --config, compare the ZeRO stages."
        " In place of --model and --config, a program may be given with its arguments, which runs"
        " up to its first forward.",
        examples=(
            "hadal plan --model meta-llama/ --config ds_config.json --cluster h100x8",
            "hadal plan --model package.module:build --config ds_config.json --nodes 4",
            "hadal plan --cluster h200x8 train.py --deepspeed ds_config.json",
        ),
        words="[PROGRAM [ARGUMENT ...]]",
    )
    _add_model(parser)
    how = parser.add_argument_group("How")
    add_flag(
        how,
        "--sequence-length N",
        f"Tokens of a row, for a model of transformers (default: {_LENGTH}, or the model's most)",
        positive,
    )
    add_flag(how, "--with-values", "Compute on the CPU: for models whose shapes depend on values")
    add_flag(parser, "--output FILE", "Draw the memory of an update, by kind", Path)
    parser.add_argument("program", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    parser.set_defaults(run=run, has_batch=True)


def add_estimate_to(group: Any) -> None:
    """Add the subcommand that plans without activations."""
    parser = add_command(
        group,
        "estimate",
        help="Estimate the memory that training needs beside activations",
        description="Plan the memory of a training run, as `hadal plan` does, without activations:"
        " weights, gradients and optimizer state on devices, hosts and disks, and on devices"
        " gathers, reductions, communicators and the context. Without --config it compares the"
        " ZeRO stages, in bf16 with Adam; with it, it shows that configuration's memory by kind.",
        examples=(
            "hadal estimate --params 7B --devices-per-node 8 --memory 80GB",
            "hadal estimate --model package.module:build --config ds_config.json",
        ),
    )
    _add_model(parser, is_required=True, devices=1)
    parser.set_defaults(
        run=lambda parsed: run(parsed) * 0,
        has_batch=False,
        with_values=False,
        output=None,
        program=[],
    )


def _add_model(parser: Any, *, is_required: bool = False, devices: int | None = None) -> None:
    what = parser.add_mutually_exclusive_group(required=is_required)
    add_flag(
        what,
        "--params N",
        "In place of a model, the elements of all its parameters: 1300000000 or 7B; without"
        " activations",
        numel,
    )
    add_flag(
        what,
        "--model MODEL",
        "A folder with a Hugging Face config.json, or MODULE:FUNCTION, a function that returns the"
        " model, or the model and one micro-batch of a rank",
    )
    add_flag(
        parser,
        "--largest-layer N",
        "With --params: elements of each layer, which is gathered and reduced as a whole (default:"
        " as transformers of the size have; 7B: a 32nd)",
        numel,
        0,
    )
    add_flag(parser, "--config CONFIG", CONFIG_HELP)
    where = parser.add_argument_group("Where")
    add_flag(
        where,
        "--cluster NAME",
        "Devices and their number in a node, such as h200x8, or a file of `hadal bench cluster`",
        default="h100x8",
    )
    add_flag(where, "--nodes N", "Nodes", positive, 1)
    add_flag(where, "--devices-per-node N", "Devices of each node, if not all", positive, devices)
    add_flag(where, "--memory SIZE", "Memory of one device, such as 80GB", device_memory)
    add_flag(where, "--host-memory SIZE", "Memory of a node's host, such as 512GB", device_memory)
    add_json(parser)


def run(parsed: argparse.Namespace) -> int:
    """Show the plan; return 1 if it does not fit.

    Raises:
        HadalError: the model, the configuration or the cluster has faults.
    """
    cluster = _cluster(parsed)  # a wrong name is an error before torch is imported
    if parsed.output is not None:
        parsed.output = picture_path(parsed.output)

    from hadal.comm.imagined import ImaginedWorld

    # Models in stages, and programs, make groups of ranks.
    with ImaginedWorld(0, parsed.nodes * cluster.devices_per_node):
        return _run(parsed, cluster)


def _run(parsed: argparse.Namespace, cluster: ComputeCluster) -> int:
    from hadal.engine.candidates import advise, best_plan, plan_stages
    from hadal.engine.foresight import Planner

    planner_of = partial(
        Planner, cluster=cluster, nodes=parsed.nodes, with_values=parsed.with_values
    )
    if parsed.program:
        found = _of_program(parsed, planner_of, cluster)
    else:
        model, batch = _model(parsed)
        planner = planner_of(model)
        if parsed.config is None:
            plans = plan_stages(planner, batch)
            best = best_plan(plans)
            if parsed.json:
                show_json([{**_plain(found), **one.tiers} for one, found in plans.items()])
                return best is None
            _show_stages(plans, best)
            found = plans[best or next(one for one in plans if one.stage == 3)]
        else:
            found = planner.plan(parsed.config, batch)
    changes = [] if found.fits else advise(found)
    if parsed.json:
        show_json(_plain(found, changes) | {"units": [block._asdict() for block in found.blocks]})
    else:
        _show(found, changes)
        for line in (*found.rank.config.lines, *_odd_rows(found)):
            note(line)
    if parsed.output is not None:
        write_picture(figure_of(found), parsed.output)
    return 0 if found.fits else 1


# ---- what is planned -----------------------------------------------------------------------------


def _cluster(parsed: argparse.Namespace) -> ComputeCluster:
    from hadal.engine.clusters import cluster_of

    found = cluster_of(parsed.cluster, parsed.devices_per_node)
    if parsed.memory is not None:
        name = f"{found.name} with {shown_nbytes(parsed.memory)}"
        found = replace(found, name=name, device_nbytes=parsed.memory)
    return replace(found, host_nbytes=parsed.host_memory or found.host_nbytes)


def _model(parsed: argparse.Namespace) -> tuple[nn.Module, Any]:
    """Return the model and a micro-batch of it; None if none is known.

    Raises:
        CommandError: no model is named.
    """
    if parsed.params is not None:
        from hadal.engine.memory import SizedModel

        return SizedModel(parsed.params, parsed.largest_layer), None
    if parsed.model is None:
        raise CommandError("expected --model or --params, or a program with its arguments")
    device = "cpu" if parsed.with_values else "meta"
    model, batch = model_at(parsed.model, device)
    if not parsed.has_batch:
        return model, None
    return model, _tokens(model, parsed) if batch is None else batch


def model_at(path: str, device: str = "meta") -> tuple[nn.Module, Any]:
    """Build the model of a folder, or that a function returns, by default without memory for it.

    The function may return a batch beside it; None if there is none.

    Raises:
        ModelError: the function cannot be found or called, or returns something else.
    """
    import torch
    from torch import nn

    if os.path.isfile(os.path.join(path, "config.json")):
        return _model_in(path, device), None
    if ":" not in path:
        is_size = re.fullmatch(r"[\d.]+[KMBT]?", path, re.IGNORECASE)
        remedy = f"use --params {path}" if is_size else "the function builds the model"
        raise ModelError(
            f'--model is "{path}", expected a folder with a config.json, of which there is none,'
            f' or "package.module:function"; {remedy}'
        )
    sys.path.insert(0, os.getcwd())  # as `python -m` does
    try:
        with torch.device(device):
            model = pkgutil.resolve_name(path)()
    except Exception as error:  # the user's module may raise any error
        raise ModelError(
            f'--model {path} cannot be used: {error!r}; pass "package.module:function", a'
            " function without arguments that returns a model"
        ) from error
    model, batch = model if isinstance(model, tuple) and len(model) == 2 else (model, None)
    if not isinstance(model, nn.Module):
        raise ModelError(f"--model {path} returned a {type(model).__name__}, expected a model")
    return model, batch


def _model_in(folder: str, device: str) -> nn.Module:
    """Build the model that a config.json of transformers describes.

    Raises:
        ModelError: transformers is missing, or cannot build it.
    """
    import torch

    try:
        import transformers

        config = transformers.AutoConfig.from_pretrained(folder)
        name = (config.architectures or ["of no class"])[0]
        with torch.device(device):
            model: nn.Module = getattr(transformers, name)(config)
    except Exception as error:  # code of the model may raise any error
        raise ModelError(
            f"--model {folder} cannot be used: {error!r}; expected a config.json whose"
            " `architectures` names a class of transformers (pip install transformers)"
        ) from error
    return model


def _tokens(model: nn.Module, parsed: argparse.Namespace) -> Any:
    """Return a micro-batch of a model of transformers that takes tokens; None for other models."""
    import torch

    from hadal.config.reading import read

    known = getattr(model, "config", None)
    if getattr(model, "main_input_name", None) != "input_ids" or known is None:
        return None
    most = getattr(known, "max_position_embeddings", None) or _LENGTH
    length = parsed.sequence_length or min(_LENGTH, most)
    rows = read(parsed.config or {})[1].get("train_micro_batch_size_per_gpu", 1)
    with torch.device("cpu" if parsed.with_values else "meta"):
        ids = torch.zeros(rows if isinstance(rows, int) else 1, length, dtype=torch.long)
    if "labels" not in inspect.signature(type(model).forward).parameters:
        return {"input_ids": ids}
    is_of_rows = type(model).__name__.endswith("ForSequenceClassification")
    return {"input_ids": ids, "labels": ids[:, 0] if is_of_rows else ids}


class _Planned(BaseException):
    """The end of a program that has been planned, at the first forward of its engine."""


def _of_program(
    parsed: argparse.Namespace, planner_of: Callable[..., Planner], cluster: ComputeCluster
) -> Foresight:
    """Run a program, as the first of the ranks, up to the first forward of its engine.

    Raises:
        CommandError: it ended before that.
    """
    import torch.distributed as dist

    import hadal
    from hadal.engine.planned_program import plan_instead

    if any(value is not None for value in (parsed.params, parsed.model, parsed.config)):
        raise CommandError("a program has its own model and configuration; leave out the flags")
    name, *words = parsed.program
    if not Path(name).is_file():
        raise CommandError(f"{name} is no file; expected a Python program")

    def forwarded(model: nn.Module, raw: dict[str, Any], batch: Any, **own: Any) -> NoReturn:
        raise _Planned(planner_of(model, **own).plan(raw, batch))

    plan_instead(forwarded)
    with suppress(UsageError):  # DeepSpeed itself is there
        hadal.install_as_deepspeed()
    dist.init_process_group = lambda *_, **__: None  # its ranks are there
    sizes = {"WORLD_SIZE": dist.get_world_size(), "LOCAL_WORLD_SIZE": cluster.devices_per_node}
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", **{k: str(size) for k, size in sizes.items()}}
    for key, value in (("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", "0")):
        os.environ.setdefault(key, value)
    sys.argv = [name, *words]
    sys.path.insert(0, str(Path(name).resolve().parent))
    try:
        runpy.run_path(name, run_name="__main__")
    except _Planned as end:
        found: Foresight = end.args[0]
        return found
    except SystemExit as end:
        if end.code:
            raise
    except Exception as error:
        _fail_as_program(error, name)
    raise CommandError(f"{name} ended without a forward of an engine that `initialize` returned")


def _fail_as_program(error: Exception, name: str) -> NoReturn:
    """Raise an error of Hadal's, with the program's line; show another as Python does.

    The frames of this command are left out.
    """
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename != name:
        frames = frames.tb_next
    if not isinstance(error, HadalError):
        traceback.print_exception(error.with_traceback(frames))
        raise SystemExit(FAILED) from None
    for frame in traceback.extract_tb(frames, 1):
        note(f"{name}, line {frame.lineno}: {frame.line}")
    raise error


# ---- output --------------------------------------------------------------------------------------


def _said(found: Foresight) -> str:
    """Return the model and the devices."""
    from hadal.engine.memory import SizedModel
    from hadal.zero.estimate import counted

    model, job, sizes = found.rank.model, found.rank.job, counted(*found.whole)
    name = "" if isinstance(model, SizedModel) else f"{type(model).__name__}, "
    frozen = f" ({shown_numel(sizes.frozen)} frozen)" if sizes.frozen else ""
    devices = f"{job.nodes} x {job.devices_per_node} devices of {found.cluster.name}"
    return f"{name}{shown_numel(sizes.numel)} parameters{frozen}, on {devices}"


def _show_stages(plans: Mapping[MemoryPlan, Foresight], best: MemoryPlan | None) -> None:
    one = next(iter(plans.values()))
    room, host = _gb(one.cluster.device_nbytes), shown_nbytes(one.cluster.host_nbytes)
    title = f"of {room} GB,\nhost {host}"
    numbers = ("device,\nstates", "device", "host", "disk", "host of\na node")
    made = table("stage", "offload_\noptimizer", "offload_\nparam", *numbers, title, right=numbers)
    for chosen, found in plans.items():
        in_node = found.cluster.devices_per_node * found.total.host
        sizes = map(_gb, (found.memory.held.device, *found.total, in_node))
        end, style = (", best", "best") if chosen == best else ("", None)
        fit = _verdict(found).removeprefix("does not fit: ").replace(f" of {room}", "")
        cells = (str(chosen.stage), *chosen.tiers.values(), *sizes, fit + end)
        made.add_row(*cells, style=style)
    show(heading(_filled(f"{_said(one)}, bf16 or fp16 with Adam, GB per rank")), "", made, "")


def _show(found: Foresight, changes: Sequence[Change]) -> None:
    from hadal.zero.estimate import counted, host_nbytes

    stage = f"stage {found.memory.stage} with {found.memory.optimizer}"
    numbers = ("device", "host", "disk")
    made = table("GB per rank", *numbers, "", right=numbers)
    made.columns[-1].max_width = 64
    for need in found.kinds:
        if any(need.held):
            made.add_row(need.kind, *map(_gb, need.held), need.how)
    made.add_row("total", *map(_gb, found.total), _verdict(found), style="heading")
    show(heading(_filled(f"{_said(found)}, {stage}")), "", made, "")
    until = "GB each until backward, with recomputation"
    blocks = [(b.kind, f"{_gb(b.kept)} {until} {_gb(b.recomputed)} GB") for b in found.blocks]
    rows = [(f"{len([*same])} x {kind}", each) for (kind, each), same in groupby(blocks)]
    if rows:
        show(aligned(rows), "")
    if found.peak is not None:
        unit = f" of {found.peak.unit}" if found.peak.unit else ""
        batch = " and ".join(" x ".join(map(str, shape)) for shape in _shapes(found.batch))
        where = f"{found.peak.phase}{unit}"
        show(_filled(f"The peak is in {where}, with a micro-batch of {batch} a rank."))
    else:
        show("Without a batch, activations and time are left out.")
    if len(found.stages) > 1:
        show(_filled(_stages(found)))
    show("")
    if len(found.whole) == 1:
        sizes, job = counted(*found.whole), found.rank.job
        whole, parts = (host_nbytes(sizes, job, born_sharded=born) for born in (False, True))
        inside = f";\ninside zero.Init {_gb(parts)} GB" if parts < whole else ""
        show(
            "While every process builds the model in fp32, a node's host holds"
            f" {_gb(whole)} GB{inside}.",
            "",
        )
    if found.time is not None:
        _show_time(found)
    if changes:
        _show_changes(changes)
    elif not found.fits:
        show("No change of the configuration that saves memory is left; use more devices.")


def _shapes(batch: Any) -> list[tuple[int, ...]]:
    """Return the shapes of a micro-batch's tensors, each once."""
    from torch.utils._pytree import tree_leaves

    shapes = (getattr(leaf, "shape", None) for leaf in tree_leaves(batch))
    return list(dict.fromkeys(tuple(shape) for shape in shapes if shape))  # no single numbers


def _odd_rows(found: Foresight) -> Iterator[str]:
    micro, shapes = found.rank.config.train_micro_batch_size_per_gpu, _shapes(found.batch)
    if shapes and all(rows != micro for rows, *_ in shapes):
        yield (
            f"the micro-batch has {shapes[0][0]} rows, but train_micro_batch_size_per_gpu is"
            f" {micro}, which samples per second count"
        )


def _verdict(found: Foresight) -> str:
    from hadal.engine.candidates import MemoryFit

    for lacks, whose in zip(found.lacks, ("a device", "a node's host"), strict=False):
        if lacks:
            return f"does not fit: {whose} lacks {_gb(lacks)} GB"
    if found.cluster.computes_on_host:
        return "fits"
    room = found.cluster.device_nbytes
    left = _gb(room - found.total.device)
    return f"{MemoryFit.of(found).value}, {left} of {_gb(room)} GB left"


def _stages(found: Foresight) -> str:
    number, totals = 1 + found.stages.index(max(found.stages)), ", ".join(map(_gb, found.stages))
    return f"This is stage {number} of {len(found.stages)}, which need {totals} GB."


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
    left_out = f"\nNot counted: {', '.join(time.left_out)}." if time.left_out else ""
    show(made, "", f"{rate}; speeds are {' and '.join(sorted(assumed))}.{left_out}", "")


def _show_changes(changes: Sequence[Change]) -> None:
    last = changes[-1].after
    what = "What would make it fit" if last.fits else "What would help, though it does not suffice"
    show(heading(f"{what}, in the order of its cost:"))
    for change in changes:
        takes = change.after.time
        rate = "" if takes is None else f", {takes.samples_per_second:,.2f} samples/s"
        show(f"{change.what}: saves {_gb(change.saved.device)} GB{rate}")
        show(textwrap.indent(_filled(json.dumps(change.patch)), "  "))
    show("", f"Then: {_verdict(last)}.")


def _filled(text: str) -> str:
    """Return a text, or a JSON, in lines."""
    return textwrap.fill(text, WIDEST - 2, break_long_words=False, break_on_hyphens=False)


def _gb(nbytes: int) -> str:
    if 0 < nbytes < 0.005 * _GB:
        return "<0.01"
    return f"{nbytes / _GB:,.2f}" if nbytes else "-"


def _plain(found: Foresight, changes: Sequence[Change] = ()) -> dict[str, Any]:
    """Return the plan for JSON; bytes and seconds."""
    plain: dict[str, Any] = {
        "fits": found.fits,
        "stage": found.memory.stage,
        "optimizer": found.memory.optimizer,
        "micro_batch": _shapes(found.batch),
        "notes": found.rank.config.notes,
        "states": found.memory.held._asdict(),
        "total": found.total._asdict(),
        "lacks": found.lacks._asdict(),
        "kinds": {n.kind: {**n.held._asdict(), "how": n.how} for n in found.kinds},
    }
    if found.peak is not None and found.time is not None:
        time = found.time
        plain["peak"] = {"phase": found.peak.phase, "unit": found.peak.unit}
        plain["stages"] = found.stages
        plain["moments"] = [{**m._asdict(), "held": dict(m.held)} for m in found.moments]
        plain["time"] = {
            "seconds": time.seconds,
            "samples_per_second": time.samples_per_second,
            "utilization": time.utilization,
            "parts": {name: asdict(part) for name, part in time.parts.items()},
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
    room, peak = found.cluster.device_nbytes, max(moment.total for moment in moments)
    said = _gb(peak)
    if not found.cluster.computes_on_host:
        said += f" of {_gb(room)}"
        if peak > room / 3:  # or the memory is a strip below it
            axis.axhline(room / _GB, color="black", linewidth=1)
            axis.text(0, room / _GB, " a device's memory", va="bottom", fontsize=9)
    phases = [moment.phase for moment in moments]
    starts = [at for at, name in enumerate(phases) if not at or phases[at - 1] != name]
    axis.set_xticks(starts, [phases[at] for at in starts], ha="left")
    axis.set_ylabel("GB on the device")
    axis.set_xlim(0, len(moments) - 1)
    axis.grid(axis="y", color=FAINT, linewidth=0.6)
    axis.spines[["top", "right"]].set_visible(False)
    handles, labels = axis.get_legend_handles_labels()
    axis.legend(
        handles[::-1], labels[::-1], frameon=False, loc="center left", bbox_to_anchor=(1, 0.5)
    )
    name = f"{type(found.rank.model).__name__} on {found.cluster.name}"
    figure.suptitle(f"{name}, {said} GB at the peak", fontsize=12)
    return figure
