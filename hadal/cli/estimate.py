"""`hadal estimate`: the memory that model states take, before anything is trained."""

from __future__ import annotations

import argparse
import os
import pkgutil
import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

from hadal.cli.arguments import CONFIG_HELP, device_memory, numel, positive
from hadal.cli.parser import add_command
from hadal.cli.terminal import aligned, heading, show, table
from hadal.config.optimizer import KINDS
from hadal.errors import ModelError
from hadal.units import numel_of, shown_nbytes, shown_numel

if TYPE_CHECKING:
    from rich.text import Text
    from torch import nn

    from hadal.config import Config
    from hadal.zero.estimate import (
        Buffers,
        Cost,
        JobSize,
        Model,
        Portion,
        ShardTiers,
        States,
        TierBytes,
    )
    from hadal.zero.policy import Tier

_GB = 1e9
_TITLES = ("stage", "offload_\noptimizer", "offload_\nparam")


def add_to(group: Any) -> None:
    """Add the subcommand."""
    parser = add_command(
        group,
        "estimate",
        help="Estimate the memory of model states, and the configurations that fit",
        description="Estimate the bytes of weights, gradients and optimizer state on devices, hosts"
        " and disks. Without --config it shows every ZeRO stage, in bf16 with Adam; with it, that"
        " configuration's states by kind. With --memory, --host-memory or both it marks the rows"
        " that fit.",
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
        help="A function that returns the model, which is built without memory, on meta",
    )
    parser.add_argument(
        "--largest-layer",
        type=numel,
        default=0,
        metavar="N",
        help="With --params: elements of the largest layer, which stage 3 gathers as a whole",
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
    parser.set_defaults(run=run)


def run(parsed: argparse.Namespace) -> int:
    """Show the estimate.

    Raises:
        HadalError: the model or the configuration has faults.
    """
    model = _model(parsed.model)
    if parsed.config is None:
        _show_stages(_counted(model, parsed), parsed)
    else:
        _show_config(model, parsed)
    return 0


def _model(path: str | None) -> nn.Module | None:
    """Build the model that a function returns, without memory for it.

    Raises:
        ModelError: the function cannot be found or called, or returns something else.
    """
    if path is None:
        return None
    import torch
    from torch import nn

    if ":" not in path:
        remedy = f"use --params {path}" if _is_numel(path) else "the function builds the model"
        raise ModelError(f'--model is "{path}", expected "package.module:function"; {remedy}')
    sys.path.insert(0, os.getcwd())  # as `python -m` does
    try:
        with torch.device("meta"):
            model = pkgutil.resolve_name(path)()
    except Exception as error:  # the user's module may raise any error
        raise ModelError(
            f'--model {path} cannot be used: {error!r}; pass "package.module:function", a'
            " function without arguments that returns a model"
        ) from error
    if not isinstance(model, nn.Module):
        raise ModelError(f"--model {path} returned a {type(model).__name__}, expected a model")
    return model


def _is_numel(text: str) -> bool:
    try:
        return bool(numel_of(text))
    except ValueError:
        return False


def _counted(model: nn.Module | None, parsed: argparse.Namespace) -> Model:
    from hadal.zero.estimate import Model, counted

    if model is None:
        return Model(parsed.params, largest=parsed.largest_layer)
    return counted(model)


def _tiers() -> dict[str, Tier]:
    """Name them as the configuration does."""
    from hadal.zero.policy import Tier

    return {"none": Tier.DEVICE, "cpu": Tier.HOST, "nvme": Tier.DISK}


# ---- all stages ----------------------------------------------------------------------------------


def _show_stages(model: Model, parsed: argparse.Namespace) -> None:
    from hadal.zero.estimate import (
        PLANS,
        JobSize,
        ShardTiers,
        best_plan,
        held_by,
        layer_nbytes,
        layers_take_turns,
        peak_nbytes,
    )

    job, limits = JobSize(parsed.devices_per_node, parsed.nodes), _Limits.of(parsed)
    held = {plan: held_by(plan, model, job) for plan in PLANS}
    possible = [plan for plan in PLANS if limits.host_holds(held[plan])]
    best = None if limits.device is None else best_plan(model, job, limits.device, plans=possible)
    tiers = {tier: name for name, tier in _tiers().items()}
    rows = [
        _Line(
            (str(plan.stage), tiers[plan.optimizer], tiers[plan.weights]),
            held[plan],
            peak_nbytes(plan, model, job),
            plan == best,
        )
        for plan in PLANS
    ]
    _show(_TITLES, rows, f"{_said(model, job)}, bf16 or fp16 with Adam, GB per rank", limits)
    layer = layer_nbytes(model) * layers_take_turns(3, job, ShardTiers())
    _print_rest(model, job, layer, stage=3)


# ---- one configuration ---------------------------------------------------------------------------


class _Plan(NamedTuple):
    """The part of a configuration that rules model states."""

    stage: int
    cost: Cost
    rest: ShardTiers
    job: JobSize
    optimizer: str


def _show_config(model: nn.Module | None, parsed: argparse.Namespace) -> None:
    from hadal.config import load_config
    from hadal.zero.estimate import (
        layer_nbytes,
        layers_take_turns,
        states_of,
        states_of_portions,
    )

    world_size = parsed.devices_per_node * parsed.nodes
    config = load_config(parsed.config, world_size=world_size, allow_unbuilt=True)
    plan, elements = _plan(config, parsed.devices_per_node, parsed.nodes), _counted(model, parsed)
    if model is None:
        found: States = states_of(plan.stage, elements, plan.job, plan.cost, plan.rest)
        layer = layer_nbytes(elements, plan.cost)
    else:
        moments = plan.cost.state // plan.cost.moment
        portions, layer = _portions(model, config, plan.job.devices, moments)
        found = states_of_portions(portions, plan.rest, plan.job.second_copy_devices)
    layer *= layers_take_turns(plan.stage, plan.job, plan.rest)
    rows = [_Line((name,), held) for name, held in found._asdict().items()]
    rows.append(_Line(("total",), found.total, found.total.device + layer))
    said = _said(elements, plan.job)
    caption = f"{said}, stage {plan.stage} with {plan.optimizer}, GB per rank"
    _show(("",), rows, caption, _Limits.of(parsed))
    _print_rest(elements, plan.job, layer, stage=plan.stage, held=found.total)


def _portions(
    model: nn.Module, config: Config, ranks: int, moments: int
) -> tuple[list[Portion], int]:
    """Return the portions of a model that an engine trains, and the bytes that it gathers at once.

    `moments`: how many values the optimizer keeps for each element.
    """
    import torch

    from hadal.engine.plan import RankCounts, plan_model
    from hadal.zero.estimate import gathered_nbytes, portions_of

    counts, device = RankCounts.of(config, ranks), torch.device("cuda")
    trained = {parameter: 0 for parameter in model.parameters() if parameter.requires_grad}
    buckets = plan_model(model, config, device, counts, trained).buckets
    return portions_of(buckets, counts.shards_of, moments), gathered_nbytes(buckets)


def held_of(config: Config, model: Model, devices_per_node: int, nodes: int) -> TierBytes:
    """Return the bytes of a model's states on one rank under a configuration."""
    from hadal.zero.estimate import states_of

    plan = _plan(config, devices_per_node, nodes)
    return states_of(plan.stage, model, plan.job, plan.cost, plan.rest).total


def _plan(config: Config, devices_per_node: int, nodes: int) -> _Plan:
    from hadal.zero.estimate import JobSize, ShardTiers
    from hadal.zero.policy import STAGES

    zero = config.zero_optimization
    weights, optimizer = zero.offload_param, zero.offload_optimizer
    is_sharded = STAGES[zero.stage].weights
    job = JobSize(
        devices_per_node,
        nodes,
        copy_devices=max(0, zero.mics_shard_size) if is_sharded else 0,
        second_copy_devices=zero.zero_hpz_partition_size if is_sharded else 0,
    )
    off = (optimizer.device, optimizer.ratio) if optimizer is not None else ("none", 1.0)
    away = (weights.device, weights.max_in_cpu) if weights is not None else ("none", 0)
    tiers = _tiers()
    cost = _cost(config)
    rest = ShardTiers(
        tiers[away[0]] if is_sharded else tiers["none"],
        tiers[off[0]],
        away[1],
        off[1],
        _buffers(config, cost),
    )
    name = "Adam (none is named)" if config.optimizer is None else config.optimizer.type
    return _Plan(zero.stage, cost, rest, job, name)


def _buffers(config: Config, cost: Cost) -> Buffers:
    """Return the host memory through which the engine would read and write a disk."""
    import torch

    from hadal.engine.policies import disk_steps_of, weight_buffers_of
    from hadal.optim.workspace import block_numel
    from hadal.zero.estimate import Buffers

    steps = disk_steps_of(config)
    runs = 1 + cost.state // cost.moment  # the master, and each value that is remembered
    part = steps.part_numel(runs, block_numel(torch.device("cpu")))
    count, nbytes = weight_buffers_of(config)
    return Buffers(runs * steps.overlap.parts, part, count * nbytes)


def _cost(config: Config) -> Cost:
    """Return the bytes of one trained element, in the dtypes that the engine would use."""
    import torch
    from torch import nn

    module, weight = nn.Linear(8, 8, bias=False), nn.Parameter(torch.zeros(8, 8))
    module.weight = weight
    portions, _ = _portions(module, config, 1, _moments(config, weight))
    return portions[0].cost


def _moments(config: Config, weight: nn.Parameter) -> int:
    """Return how many values the optimizer keeps for each element: known, or found by an update."""
    import torch

    from hadal.optim.build import build_optimizer

    name, params = "Adam", {}
    if config.optimizer is not None:
        name, params = config.optimizer.type, config.optimizer.params
    known = KINDS[name].state_with(params) if name in KINDS else None
    if known is not None:
        return len(known)
    made = build_optimizer(name, params, [weight])
    weight.grad = torch.ones_like(weight)
    made.step()
    kept = [value for value in made.state[weight].values() if isinstance(value, torch.Tensor)]
    return sum(value.numel() == weight.numel() for value in kept)


# ---- output --------------------------------------------------------------------------------------


class _Line(NamedTuple):
    """One row of a table."""

    cells: tuple[str, ...]
    held: TierBytes
    peak: int | None = None
    """The device's maximum bytes; None if a row is not a whole plan."""
    is_best: bool = False


def _said(model: Model, job: JobSize) -> str:
    frozen = f" ({shown_numel(model.frozen)} frozen)" if model.frozen else ""
    nodes = f"{job.nodes} node{'s' * (job.nodes > 1)} x " if job.nodes > 1 else ""
    devices = f"{job.devices_per_node} device{'s' * (job.devices_per_node > 1)}"
    return f"{shown_numel(model.numel)} parameters{frozen} on {nodes}{devices}"


class _Limits(NamedTuple):
    """Memory that there is, as far as it was given."""

    device: int | None
    host: int | None
    """Of a node."""
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
    made = table(*titles, *numbers, right=numbers)
    if str(limits):
        made.add_column(str(limits))
    for line in lines:
        fit = [_fit(line, limits)] if str(limits) else []
        is_total = line.cells == ("total",)
        style = "best" if line.is_best else "heading" if is_total else None
        sizes = *line.held, limits.devices_per_node * line.held.host
        made.add_row(*line.cells, *map(_gb, sizes), *fit, style=style)
    show(heading(caption), "", made, "")


def _fit(line: _Line, limits: _Limits) -> Text:
    from rich.text import Text

    from hadal.zero.estimate import MemoryFit

    if line.peak is None:
        return Text("")
    if not limits.host_holds(line.held):
        return Text("host too small", "faint")
    if limits.device is None:
        return Text("fits the host", "good")
    fit = MemoryFit.of(line.peak, limits.device)
    style = {MemoryFit.GOOD: "good", MemoryFit.TIGHT: "warning", MemoryFit.NONE: "faint"}[fit]
    text = fit.value
    if fit is not MemoryFit.NONE:
        text += f", {(limits.device - line.peak) / _GB:,.1f} GB left"
    return Text(f"{text}, best", "best") if line.is_best else Text(text, style)


def _gb(nbytes: int) -> str:
    if 0 < nbytes < 0.005 * _GB:
        return "<0.01"
    return f"{nbytes / _GB:,.2f}" if nbytes else "-"


def _print_rest(
    model: Model,
    job: JobSize,
    layer: int,
    *,
    stage: int,
    held: TierBytes | None = None,
) -> None:
    """Describe the memory beyond model states, and that of a whole node."""
    from hadal.zero.estimate import host_nbytes
    from hadal.zero.policy import STAGES

    rows = []
    if layer:
        rows.append((f"stage {stage}, the largest layer as a whole", layer))
    if held is not None:
        rows.append(("disk of a node", job.devices_per_node * held.disk))
    building = "host memory of a node while every process builds the model in fp32"
    rows.append((building, host_nbytes(model, job, born_sharded=False)))
    if STAGES[stage].weights:
        rows.append(("the same inside zero.Init", host_nbytes(model, job, born_sharded=True)))
    show(aligned([(name, f"{nbytes / _GB:,.2f} GB") for name, nbytes in rows]))
    show(
        "Activations, and buckets under way (twice their bytes where 16-bit gradients are sent in"
        " fp32), come on top;\non a GPU also its context (about 0.5 GB) and buffers of"
        " communicators (0.2 to 1.5 GB)."
    )
