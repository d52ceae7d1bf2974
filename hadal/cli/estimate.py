"""`hadal estimate`: the memory that model states take, before anything is trained."""

from __future__ import annotations

import argparse
import os
import pkgutil
import re
import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple

from hadal.cli.arguments import positive
from hadal.errors import HadalError, ModelError

if TYPE_CHECKING:
    from torch import nn

    from hadal.autotuning.estimate import Buffers, Cost, Held, Job, Model, Rest, States
    from hadal.config import Config
    from hadal.zero.policy import Tier

_FAULTY = 2
_NUMBER = re.compile(r"(\d+(?:\.\d+)?)([KMBT]?)", re.IGNORECASE)
_POWER = {"": 0, "K": 3, "M": 6, "B": 9, "T": 12}
_GB = 1e9


def add_to(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the subcommand."""
    parser = subparsers.add_parser(
        "estimate",
        help="show what model states take on devices, hosts and disks",
        description="Without --config: every stage in bf16 with Adam. With it: what that"
        " configuration takes, by kind.",
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument(
        "--params", type=numel, metavar="N", help="elements of all parameters, as 1300000000 or 7B"
    )
    what.add_argument(
        "--model", metavar="MODULE:FUNCTION", help="what returns the model; it is built on meta"
    )
    parser.add_argument(
        "--largest-layer",
        type=numel,
        default=0,
        metavar="M",
        help="with --params: elements of the largest layer, which stage 3 makes whole in its turn",
    )
    parser.add_argument("--config", metavar="CONFIG", help="a ds_config.json, or its base64 text")
    parser.add_argument(
        "--devices-per-node", type=positive, default=1, metavar="N", help="(default 1)"
    )
    parser.add_argument("--nodes", type=positive, default=1, metavar="N", help="(default 1)")
    parser.set_defaults(run=run)


def numel(text: str) -> int:
    """Read a number of elements: plain, or with K, M, B or T for powers of 1000."""
    found = _NUMBER.fullmatch(text.strip())
    value = round(float(found[1]) * 10 ** _POWER[found[2].upper()]) if found else 0
    if value < 1:
        raise argparse.ArgumentTypeError(f'expected a number as 1300000000 or "7B", got {text}')
    return value


def run(parsed: argparse.Namespace) -> int:
    """Show the estimate; return 2 where the model or the configuration has faults."""
    try:
        model = _model(parsed.model)
        if parsed.config is None:
            _show_stages(_counted(model, parsed, 0), parsed)
        else:
            _show_config(model, parsed)
    except HadalError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return _FAULTY
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

    sys.path.insert(0, os.getcwd())  # as `python -m` does
    try:
        if ":" not in path:
            raise ValueError("there is no colon in it")
        with torch.device("meta"):
            model = pkgutil.resolve_name(path)()
    except Exception as error:  # whatever the user's module raises
        raise ModelError(
            f'--model {path} gives no model: {error!r}; give "package.module:function" of a'
            " function without arguments that returns one"
        ) from error
    if not isinstance(model, nn.Module):
        raise ModelError(f"--model {path} gives no model: it returned a {type(model).__name__}")
    return model


def _counted(model: nn.Module | None, parsed: argparse.Namespace, persistence: int) -> Model:
    from hadal.autotuning.estimate import Model, counted

    if model is None:
        return Model(parsed.params, largest=parsed.largest_layer)
    return counted(model, persistence)


def _tiers() -> dict[str, Tier]:
    """By the names that the configuration has for them."""
    from hadal.zero.policy import Tier

    return {"none": Tier.DEVICE, "cpu": Tier.HOST, "nvme": Tier.DISK}


# ---- all stages ----------------------------------------------------------------------------------


def _show_stages(model: Model, parsed: argparse.Namespace) -> None:
    from hadal.autotuning.estimate import HALF, Job, Rest, states_of

    job = Job(parsed.devices_per_node, parsed.nodes)
    plans = [(stage, "none", "none") for stage in range(4)]
    plans += [(stage, "cpu", "none") for stage in range(4)]
    plans += [(stage, "nvme", "none") for stage in (1, 2, 3)]
    plans += [(3, "cpu", "cpu"), (3, "nvme", "nvme")]
    tiers = _tiers()
    rows = []
    for stage, optimizer, weights in plans:
        rest = Rest(tiers[weights], tiers[optimizer])
        held = states_of(stage, model, job, HALF, rest).total
        rows.append(((str(stage), optimizer, weights), held))
    titles = ("stage", "offload_optimizer", "offload_param")
    _show(titles, rows, f"{_said(model, job)}, in bf16 or fp16 with Adam: GB of one rank")
    _tell_rest(model, job, HALF, Rest(), stage=3)


# ---- one configuration ---------------------------------------------------------------------------


class _Plan(NamedTuple):
    """What a configuration says of model states."""

    stage: int
    cost: Cost
    rest: Rest
    job: Job
    optimizer: str


def _show_config(model: nn.Module | None, parsed: argparse.Namespace) -> None:
    from hadal.autotuning.estimate import states_of
    from hadal.config import load_config
    from hadal.zero.policy import STAGES

    world_size = parsed.devices_per_node * parsed.nodes
    config = load_config(parsed.config, world_size=world_size, allow_unbuilt=True)
    plan = _plan(config, parsed.devices_per_node, parsed.nodes)
    threshold = config.zero_optimization.stage3_param_persistence_threshold
    elements = _counted(model, parsed, threshold if STAGES[plan.stage].weights else 0)
    found: States = states_of(plan.stage, elements, plan.job, plan.cost, plan.rest)
    rows = [((name,), held) for name, held in found._asdict().items()]
    rows.append((("total",), found.total))
    said = _said(elements, plan.job)
    _show(("",), rows, f"{said}, stage {plan.stage} with {plan.optimizer}: GB of one rank")
    _tell_rest(elements, plan.job, plan.cost, plan.rest, stage=plan.stage, held=found.total)


def held_of(config: Config, model: Model, devices_per_node: int, nodes: int) -> Held:
    """What one rank holds of a model's states under a configuration."""
    from hadal.autotuning.estimate import states_of

    plan = _plan(config, devices_per_node, nodes)
    return states_of(plan.stage, model, plan.job, plan.cost, plan.rest).total


def _plan(config: Config, devices_per_node: int, nodes: int) -> _Plan:
    from hadal.autotuning.estimate import Job, Rest
    from hadal.zero.policy import STAGES

    zero = config.zero_optimization
    weights, optimizer = zero.offload_param, zero.offload_optimizer
    is_sharded = STAGES[zero.stage].weights
    job = Job(
        devices_per_node,
        nodes,
        copy_devices=max(0, zero.mics_shard_size) if is_sharded else 0,
        second_copy_devices=zero.zero_hpz_partition_size if is_sharded else 0,
    )
    off = (optimizer.device, optimizer.ratio) if optimizer is not None else ("none", 1.0)
    away = (weights.device, weights.max_in_cpu) if weights is not None else ("none", 0)
    tiers = _tiers()
    cost = _cost(config)
    rest = Rest(
        tiers[away[0]] if is_sharded else tiers["none"],
        tiers[off[0]],
        away[1],
        off[1],
        _buffers(config, cost),
    )
    name = "Adam (none is named)" if config.optimizer is None else config.optimizer.type
    return _Plan(zero.stage, cost, rest, job, name)


def _buffers(config: Config, cost: Cost) -> Buffers:
    """The host memory through which the engine would read and write a disk."""
    import torch

    from hadal.autotuning.estimate import Buffers
    from hadal.engine.tiers import disk_steps_of, weight_buffers_of
    from hadal.optim.desk import block_numel

    steps = disk_steps_of(config)
    runs = 1 + cost.state // cost.moment  # the master, and each value that is remembered
    part = steps.part_numel(runs, block_numel(torch.device("cpu")))
    count, nbytes = weight_buffers_of(config)
    return Buffers(runs * steps.pace.parts, part, count * nbytes)


def _cost(config: Config) -> Cost:
    """Bytes of one trained element, by the dtypes that the engine would give it."""
    import torch
    from torch import nn

    from hadal.autotuning.estimate import Cost
    from hadal.engine.precision import precisions_of

    module, weight = nn.Linear(8, 8, bias=False), nn.Parameter(torch.zeros(8, 8))
    module.weight = weight
    precision = precisions_of(config, module, torch.device("cpu"))(weight)
    return Cost(
        weight=precision.compute.itemsize,
        gradient=precision.accumulate.itemsize,
        master=precision.master.itemsize if precision.keeps_master else 0,
        state=precision.state_dtype.itemsize * _moments(config, weight),
        moment=precision.state_dtype.itemsize,
    )


def _moments(config: Config, weight: nn.Parameter) -> int:
    """How many values the optimizer remembers of each element: one update says it."""
    import torch

    from hadal.optim.build import build_optimizer

    if config.optimizer is None:
        return 2
    kind = config.optimizer.type
    # Of Muon the matrices are counted; its Adam remembers two values of the rest.
    groups = [{"params": [weight], **({"use_muon": True} if kind == "Muon" else {})}]
    made = build_optimizer(kind, config.optimizer.params, groups)
    weight.grad = torch.ones_like(weight)
    made.step()
    kept = [value for value in made.state[weight].values() if isinstance(value, torch.Tensor)]
    return sum(value.numel() == weight.numel() for value in kept)


# ---- what is printed -----------------------------------------------------------------------------


def _said(model: Model, job: Job) -> str:
    frozen = f" ({model.frozen / 1e6:,.1f} M frozen)" if model.frozen else ""
    return f"{model.numel / 1e6:,.1f} M parameters{frozen} on {job.nodes} x {job.devices_per_node}"


def _show(
    titles: tuple[str, ...], rows: Iterable[tuple[tuple[str, ...], Held]], caption: str
) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    console = Console()
    console.print(caption, highlight=False, soft_wrap=True)
    table = Table(*titles, box=SIMPLE_HEAD, pad_edge=False)
    for title in ("device", "host", "disk"):
        table.add_column(title, justify="right")
    for cells, held in rows:
        table.add_row(*cells, *map(_gb, held), style="bold" if cells == ("total",) else None)
    console.print(table)


def _gb(nbytes: int) -> str:
    if 0 < nbytes < 0.005 * _GB:
        return "<0.01"
    return f"{nbytes / _GB:,.2f}" if nbytes else "-"


def _tell_rest(
    model: Model, job: Job, cost: Cost, rest: Rest, *, stage: int, held: Held | None = None
) -> None:
    """What comes on top, and what a whole node has."""
    from hadal.autotuning.estimate import host_nbytes, layer_nbytes, layers_take_turns
    from hadal.zero.policy import STAGES

    if model.largest and layers_take_turns(stage, job, rest):
        print(
            f"stage {stage}: + {layer_nbytes(model, cost) / _GB:,.2f} GB, the largest layer whole"
        )
    if held is not None:
        host, disk = (job.devices_per_node * nbytes / _GB for nbytes in (held.host, held.disk))
        print(f"a node: {host:,.2f} GB of its host, {disk:,.2f} GB of its disk")
    building = host_nbytes(model, job, born_sharded=False) / _GB
    print(f"a node's host while each process builds the model in fp32: {building:,.2f} GB")
    if STAGES[stage].weights:
        building = host_nbytes(model, job, born_sharded=True) / _GB
        print(f"the same inside zero.Init: {building:,.2f} GB")
    print("activations and buckets under way come on top")
