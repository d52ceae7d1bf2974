"""`hadal estimate`: the memory that training needs beside activations, before it begins."""

from __future__ import annotations

import argparse
import os
import pkgutil
import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

from hadal.cli.parser import CONFIG_HELP, add_command, add_json, device_memory, numel, positive
from hadal.cli.terminal import aligned, heading, show, show_json, table
from hadal.errors import ModelError
from hadal.units import numel_of, shown_nbytes, shown_numel

if TYPE_CHECKING:
    from rich.text import Text
    from torch import nn

    from hadal.engine.memory import Memory, MemoryKind, MemoryPlan
    from hadal.zero.estimate import Model, TierBytes

_GB = 1e9
_TITLES = ("stage", "offload_\noptimizer", "offload_\nparam", "device,\nstates")


def add_to(group: Any) -> None:
    """Add the subcommand."""
    parser = add_command(
        group,
        "estimate",
        help="Estimate the memory that training needs, and the configurations that fit",
        description="Estimate the memory of a training run, without activations: weights, gradients"
        " and optimizer state on devices, hosts and disks, and on devices gathers, reductions,"
        " communicators and the context. Without --config it shows every ZeRO stage, in bf16 with"
        " Adam; with it, that configuration's memory by kind. With --memory, --host-memory or both"
        " it marks the rows that fit.",
        examples=(
            "hadal estimate --params 7B --devices-per-node 8 --memory 80GB",
            "hadal estimate --model package.module:build --config ds_config.json",
        ),
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument(
        "--params", type=numel, metavar="N", help="Elements of all parameters: 1300000000 or 7B"
    )
    what.add_argument(
        "--model",
        metavar="MODULE:FUNCTION",
        help="A function that returns the model, or a folder with a Hugging Face config.json; the"
        " model is built without memory, on meta, and its weights are not read",
    )
    parser.add_argument(
        "--largest-layer",
        type=numel,
        default=0,
        metavar="N",
        help="With --params: elements of each layer, which is gathered and reduced as a whole"
        " (default: as transformers of the size have; 7B: a 32nd)",
    )
    parser.add_argument("--config", metavar="CONFIG", help=CONFIG_HELP)
    parser.add_argument(
        "--devices-per-node",
        type=positive,
        default=1,
        metavar="N",
        help="Devices of each node (default: %(default)s)",
    )
    parser.add_argument(
        "--nodes", type=positive, default=1, metavar="N", help="Nodes (default: %(default)s)"
    )
    parser.add_argument(
        "--memory", type=device_memory, metavar="SIZE", help="Memory of one device, such as 80GB"
    )
    parser.add_argument(
        "--host-memory",
        type=device_memory,
        metavar="SIZE",
        help="Host memory of one node, such as 512GB",
    )
    add_json(parser)
    parser.set_defaults(run=run)


def run(parsed: argparse.Namespace) -> int:
    """Show the estimate.

    Raises:
        HadalError: the model or the configuration has faults.
    """
    from hadal.zero.estimate import Model

    model: nn.Module | Model = Model(parsed.params or 0, largest=parsed.largest_layer)
    if parsed.model is not None:
        model, _ = model_at(parsed.model)
    if parsed.config is None:
        _show_stages(model, parsed)
    else:
        _show_config(model, parsed)
    return 0


def model_at(path: str) -> tuple[nn.Module, Any]:
    """Build the model of a folder, or that a function returns, without memory for it.

    The function may return a batch beside it; None if there is none.

    Raises:
        ModelError: the function cannot be found or called, or returns something else.
    """
    import torch
    from torch import nn

    if os.path.isfile(os.path.join(path, "config.json")):
        return _model_in(path), None
    if ":" not in path:
        remedy = f"use --params {path}" if _is_numel(path) else "the function builds the model"
        raise ModelError(
            f'--model is "{path}", expected a folder with a config.json, of which there is none,'
            f' or "package.module:function"; {remedy}'
        )
    sys.path.insert(0, os.getcwd())  # as `python -m` does
    try:
        with torch.device("meta"):
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


def _model_in(folder: str) -> nn.Module:
    """Build the model that a config.json of transformers describes, without memory for it.

    Raises:
        ModelError: transformers is missing, or cannot build it.
    """
    import torch

    try:
        import transformers

        config = transformers.AutoConfig.from_pretrained(folder)
        name = (config.architectures or ["of no class"])[0]
        with torch.device("meta"):
            model: nn.Module = getattr(transformers, name)(config)
    except Exception as error:  # code of the model may raise any error
        raise ModelError(
            f"--model {folder} cannot be used: {error!r}; expected a config.json whose"
            " `architectures` names a class of transformers (pip install transformers)"
        ) from error
    return model


def _is_numel(text: str) -> bool:
    try:
        return bool(numel_of(text))
    except ValueError:
        return False


def _sizes(model: nn.Module | Model) -> Model:
    from hadal.zero.estimate import Model, counted

    return model if isinstance(model, Model) else counted(model)


# ---- all stages ----------------------------------------------------------------------------------


def _show_stages(model: nn.Module | Model, parsed: argparse.Namespace) -> None:
    from hadal.engine.memory import best_plan, memory_of_plans

    limits = _Limits.of(parsed)
    found = memory_of_plans(model, parsed.devices_per_node, parsed.nodes)
    possible = {plan: memory for plan, memory in found.items() if limits.host_holds(memory.total)}
    best = None if limits.device is None else best_plan(possible, limits.device)
    if parsed.json:
        show_json([{**_named(plan), **_plain(memory)} for plan, memory in found.items()])
        return
    rows = [
        _Line((*map(str, _named(plan).values()), _gb(m.held.device)), m.total, True, plan == best)
        for plan, m in found.items()
    ]
    caption = f"{_said(model, parsed)}, bf16 or fp16 with Adam, GB per rank"
    _show(_TITLES, rows, caption, limits)
    last = next(memory for plan, memory in found.items() if plan.stage == 3)
    show("In all, at stage 3 without offloading:")
    _show_kinds(last.rest)
    _show_building(model, last)


def _named(plan: MemoryPlan) -> dict[str, Any]:
    """Return a plan as the configuration names it."""
    section = plan.section("")
    return {"stage": plan.stage} | {
        name: section.get(name, {"device": "none"})["device"]
        for name in ("offload_optimizer", "offload_param")
    }


def _plain(memory: Memory) -> dict[str, Any]:
    """Return the bytes of one rank for JSON."""
    kinds = {
        need.kind: {**need.held._asdict(), "how": need.how}
        for need in [*memory.states, *memory.rest]
    }
    return {"kinds": kinds, "states": memory.held._asdict(), "total": memory.total._asdict()}


# ---- one configuration ---------------------------------------------------------------------------


def _show_config(model: nn.Module | Model, parsed: argparse.Namespace) -> None:
    from hadal.config import load_config
    from hadal.engine.memory import memory_of

    world_size = parsed.devices_per_node * parsed.nodes
    config = load_config(parsed.config, world_size=world_size, allow_unbuilt=True)
    memory = memory_of(config, model, parsed.devices_per_node, parsed.nodes)
    if parsed.json:
        show_json({"stage": memory.stage, "optimizer": memory.optimizer, **_plain(memory)})
        return
    needs = [*memory.states, *memory.rest]
    rows = [_Line((need.kind,), need.held) for need in needs]
    rows.append(_Line(("total",), memory.total, is_whole=True))
    said = _said(model, parsed)
    caption = f"{said}, stage {memory.stage} with {memory.optimizer}, GB per rank"
    _show(("",), rows, caption, _Limits.of(parsed))
    _show_kinds(needs)
    _show_building(model, memory)


# ---- output --------------------------------------------------------------------------------------


class _Line(NamedTuple):
    """One row of a table."""

    cells: tuple[str, ...]
    held: TierBytes
    is_whole: bool = False
    """True: it is all memory of a rank, and not one kind."""
    is_best: bool = False


def _said(model: nn.Module | Model, parsed: argparse.Namespace) -> str:
    sizes = _sizes(model)
    frozen = f" ({shown_numel(sizes.frozen)} frozen)" if sizes.frozen else ""
    nodes = f"{parsed.nodes} node{'s' * (parsed.nodes > 1)} x " if parsed.nodes > 1 else ""
    devices = f"{parsed.devices_per_node} device{'s' * (parsed.devices_per_node > 1)}"
    return f"{shown_numel(sizes.numel)} parameters{frozen} on {nodes}{devices}"


class _Limits(NamedTuple):
    """Memory that there is, as far as it was given."""

    device: int | None
    host: int | None
    """The host memory of a node."""
    devices_per_node: int

    @classmethod
    def of(cls, parsed: argparse.Namespace) -> _Limits:
        return cls(parsed.memory, parsed.host_memory, parsed.devices_per_node)

    def host_holds(self, held: TierBytes) -> bool:
        """Return whether a node's ranks have room on their host."""
        return self.host is None or self.devices_per_node * held.host <= self.host

    def __str__(self) -> str:
        """Return a column's title; empty if nothing was given."""
        device = "" if self.device is None else f"on {shown_nbytes(self.device)}"
        host = "" if self.host is None else f"host {shown_nbytes(self.host)}"
        return ",\n".join(filter(None, (device, host)))


def _show(titles: tuple[str, ...], lines: Iterable[_Line], caption: str, limits: _Limits) -> None:
    numbers = ("device", "host", "disk", "host of\na node")
    made = table(*titles, *numbers, right=(*titles[3:], *numbers))
    if str(limits):
        made.add_column(str(limits))
    for line in lines:
        fit = [_fit(line, limits)] if str(limits) else []
        style = "best" if line.is_best else "heading" if line.cells == ("total",) else None
        sizes = *line.held, limits.devices_per_node * line.held.host
        made.add_row(*line.cells, *map(_gb, sizes), *fit, style=style)
    show(heading(caption), "", made, "")


def _fit(line: _Line, limits: _Limits) -> Text:
    from rich.text import Text

    from hadal.engine.memory import MemoryFit

    if not line.is_whole:
        return Text("")
    if not limits.host_holds(line.held):
        return Text("host too small", "faint")
    if limits.device is None:
        return Text("fits the host", "good")
    fit = MemoryFit.of(line.held.device, limits.device)
    style = {MemoryFit.GOOD: "good", MemoryFit.TIGHT: "warning", MemoryFit.NONE: "faint"}[fit]
    text = fit.value
    if fit is not MemoryFit.NONE:
        text += f", {(limits.device - line.held.device) / _GB:,.1f} GB left"
    return Text(f"{text}, best", "best") if line.is_best else Text(text, style)


def _gb(nbytes: int) -> str:
    if 0 < nbytes < 0.005 * _GB:
        return "<0.01"
    return f"{nbytes / _GB:,.2f}" if nbytes else "-"


def _show_kinds(needs: Iterable[MemoryKind]) -> None:
    """Describe how each kind was counted, or what was assumed."""
    rows = [(n.kind, f"{_gb(sum(n.held))} GB", n.how) for n in needs if sum(n.held)]
    show(aligned(rows), "")


def _show_building(model: nn.Module | Model, memory: Memory) -> None:
    """Describe the memory of a whole node."""
    from hadal.zero.estimate import host_nbytes
    from hadal.zero.policy import STAGES

    sizes, rows = _sizes(model), []
    if memory.total.disk:
        rows.append(("disk of a node", memory.job.devices_per_node * memory.total.disk))
    building = "host memory of a node while every process builds the model in fp32"
    rows.append((building, host_nbytes(sizes, memory.job, born_sharded=False)))
    if STAGES[memory.stage].weights:
        inside = host_nbytes(sizes, memory.job, born_sharded=True)
        rows.append(("the same inside zero.Init", inside))
    show(aligned([(name, f"{nbytes / _GB:,.2f} GB") for name, nbytes in rows]))
    show("Activations come on top.")
