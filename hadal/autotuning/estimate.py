"""Estimates of the memory that model states take, before anything is trained: pure arithmetic.

For Adam under bf16 or fp16, a parameter costs 2 bytes as a weight, 2 as a gradient and 12 for the
optimizer (fp32 master and two moments), each kind divided by the ranks where the stage cuts it
(Rajbhandari 2020). In fp32 weights are their own masters: 4, 4 and 8. Activations and the buckets
under way come on top; `additional_buffer_factor` leaves room for them on the host. While the model
is built, host memory is what every process of a node takes that builds it whole, in fp32, before
`initialize` (with `zero.Init`: its shard, and the largest layer).

What rests off the device lies on the host or on a disk (Rajbhandari 2021). An optimizer that does
so has its gradients, cut as it is, on the host. Beside weights that rest in another tier, or where
either is on a disk, it has masters of its own in fp32 too. On a disk there are two generations of
everything: what counts, and what an update is writing. What is read and written there goes through
buffers on the host.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import nn

from hadal.zero.policy import STAGES, Partition, Tier

_GB = 1e9
_FP32_NBYTES = 4
# Elements: parts of what rests on a disk begin at multiples of it.
_UNIT_NUMEL = 4096
_GENERATIONS = 2
"""Of what rests on a disk: an update that fails leaves the last one."""


@dataclass(frozen=True, slots=True)
class Cost:
    """Bytes of one parameter: as a weight, as a gradient, its master's and the optimizer's own."""

    weight: int
    gradient: int
    master: int
    """0 where weights are their own masters."""
    state: int
    moment: int = _FP32_NBYTES
    """Of what the optimizer holds, one value."""

    @property
    def optimizer(self) -> int:
        """What the optimizer holds beside weights and gradients."""
        return self.master + self.state


# fp32 master and two moments beside 16-bit weights and gradients; in fp32 weights are masters.
HALF = Cost(2, 2, 4, 8)
FULL = Cost(4, 4, 0, 8)


@dataclass(frozen=True, slots=True)
class Buffers:
    """Host memory that a rank reads and writes its part of a disk through, at most."""

    state_count: int
    """Buffers for masters and optimizer state; each holds a part of one of these."""
    state_numel: int
    """Elements of one of them."""
    weights_nbytes: int
    """Bytes of all buffers that weights are read into."""

    def state_nbytes(self, numel: int, itemsize: int) -> int:
        """Bytes of those for state, of which a rank has `numel` elements of each kind."""
        whole = -(-numel // _UNIT_NUMEL) * _UNIT_NUMEL
        return self.state_count * min(self.state_numel, whole) * itemsize


# Four sub-groups of 2^24 elements: of a master and two moments, in parts that are read, worked on
# and written; five buffers of 10^8 weights.
DEFAULT_BUFFERS = Buffers(9, 14 << 19, 5 * 100_000_000 * _FP32_NBYTES)


@dataclass(frozen=True, slots=True)
class Rest:
    """Where a rank's shards rest between uses."""

    weights: Tier = Tier.DEVICE
    """Those of stage 3; what is kept whole there stays on the device."""
    optimizer: Tier = Tier.DEVICE
    in_host_numel: int = 0
    """Elements of weights that stay on the host where weights rest on a disk (`max_in_cpu`)."""
    ratio: float = 1.0
    """The share of the optimizer that rests where `optimizer` says; the rest is on the device."""
    buffers: Buffers = field(default_factory=lambda: DEFAULT_BUFFERS)
    """What is used of them where something rests on a disk."""


@dataclass(frozen=True, slots=True)
class Job:
    """How many devices share the model states."""

    devices_per_node: int = 1
    nodes: int = 1
    copy_devices: int = 0
    """Those that share one copy of all states (`mics_shard_size`); 0: all."""
    second_copy_devices: int = 0
    """Stage 3: those that share a second copy of the weights (`zero_hpz_partition_size`)."""

    @property
    def devices(self) -> int:
        """Devices of all nodes."""
        return self.devices_per_node * self.nodes

    @property
    def cuts(self) -> int:
        """In how many shards a copy is cut."""
        return self.copy_devices or self.devices


@dataclass(frozen=True, slots=True)
class Model:
    """Elements of a model's parameters, each counted once."""

    trained: int
    frozen: int = 0
    largest: int = 0
    """Of them, those that one module owns itself, at most."""
    persistent: int = 0
    """Of them, those that stage 3 keeps whole."""

    @property
    def numel(self) -> int:
        """Elements in all."""
        return self.trained + self.frozen


class Held(NamedTuple):
    """Bytes that one rank holds in each tier."""

    device: int = 0
    host: int = 0
    disk: int = 0

    @classmethod
    def at(cls, tier: Tier, nbytes: int) -> Held:
        """So many bytes of values, where they rest in one tier."""
        if tier is Tier.DISK:
            return cls(disk=_GENERATIONS * nbytes)
        return cls(host=nbytes) if tier is Tier.HOST else cls(nbytes)

    def plus(self, other: Held) -> Held:
        """Both together."""
        return Held(*map(sum, zip(self, other, strict=True)))


class States(NamedTuple):
    """What one rank holds of each kind."""

    weights: Held
    gradients: Held
    optimizer: Held
    buffers: Held
    """What is read from a disk and written to it goes through them."""

    @property
    def total(self) -> Held:
        """All of them together."""
        return self.weights.plus(self.gradients).plus(self.optimizer).plus(self.buffers)


def counted(model: nn.Module, persistence_numel: int = 0) -> Model:
    """Count a model's parameters; their values are not looked at.

    Args:
        model: what is to be trained.
        persistence_numel: stage 3 keeps parameters with fewer elements whole.
    """
    numels = [(parameter.numel(), parameter.requires_grad) for parameter in model.parameters()]
    own = (sum(p.numel() for p in m.parameters(recurse=False)) for m in model.modules())
    return Model(
        trained=sum(numel for numel, is_trained in numels if is_trained),
        frozen=sum(numel for numel, is_trained in numels if not is_trained),
        largest=max(own, default=0),
        persistent=sum(numel for numel, _ in numels if numel < persistence_numel),
    )


def states_of(
    stage: int, model: Model, job: Job, cost: Cost = HALF, rest: Rest | None = None
) -> States:
    """What one rank holds between the steps, and before them of gradients; within 1 % (padding)."""
    rest, cut = rest or Rest(), STAGES[stage]
    return States(
        _weights(cut, model, job, cost, rest),
        _gradients(cut, model, job, cost, rest),
        _optimizer(cut, model, job, cost, rest),
        _buffers(cut, model, job, cost, rest),
    )


def _weights(cut: Partition, model: Model, job: Job, cost: Cost, rest: Rest) -> Held:
    if not cut.weights:
        return Held(cost.weight * model.numel)
    sharded = model.numel - model.persistent
    second = math.ceil(sharded / job.second_copy_devices) if job.second_copy_devices > 1 else 0
    shard = math.ceil(sharded / job.cuts)
    on_host = min(shard, rest.in_host_numel) if rest.weights is Tier.DISK else 0
    found = Held(cost.weight * (model.persistent + second), cost.weight * on_host)
    return found.plus(Held.at(rest.weights, cost.weight * (shard - on_host)))


def _gradients(cut: Partition, model: Model, job: Job, cost: Cost, rest: Rest) -> Held:
    """Those of an update, when all have arrived."""
    whole, shard = (cost.gradient * math.ceil(model.trained / n) for n in (1, job.cuts))
    landed = _part_off(rest, shard if cut.optimizer else whole)
    if not cut.gradients:
        return Held(whole, landed)
    return Held(shard - landed, landed)


def _optimizer(cut: Partition, model: Model, job: Job, cost: Cost, rest: Rest) -> Held:
    numel = math.ceil(model.trained / (job.cuts if cut.optimizer else 1))
    off = _part_off(rest, numel)
    weights = rest.weights if cut.weights else Tier.DEVICE
    found = Held()
    for part, tier in ((off, rest.optimizer), (numel - off, Tier.DEVICE)):
        master = cost.master or (cost.weight if _parts_master(weights, tier) else 0)
        found = found.plus(Held.at(tier, (master + cost.state) * part))
    return found


def _buffers(cut: Partition, model: Model, job: Job, cost: Cost, rest: Rest) -> Held:
    found = 0
    off = _part_off(rest, math.ceil(model.trained / (job.cuts if cut.optimizer else 1)))
    if off and rest.optimizer is Tier.DISK:
        itemsize = max(cost.master or cost.weight, cost.moment)
        found += rest.buffers.state_nbytes(off, itemsize)
    shard = math.ceil((model.numel - model.persistent) / job.cuts)
    if cut.weights and rest.weights is Tier.DISK and shard > rest.in_host_numel:
        found += rest.buffers.weights_nbytes
    return Held(host=found)


def _part_off(rest: Rest, count: int) -> int:
    """How much of the optimizer's leaves the device."""
    return 0 if rest.optimizer is Tier.DEVICE else round(rest.ratio * count)


def _parts_master(weights: Tier, optimizer: Tier) -> bool:
    """Whether masters of the weights' own dtype are kept apart from them."""
    return weights is not optimizer or Tier.DISK in (weights, optimizer)


def device_nbytes(
    stage: int, model: Model, job: Job, cost: Cost = HALF, rest: Rest | None = None
) -> int:
    """Bytes of model states on one device at a stage, within 1 % (padding)."""
    return states_of(stage, model, job, cost, rest).total.device


def layer_nbytes(model: Model, cost: Cost = HALF) -> int:
    """Bytes of the largest layer on a device in its turn: whole, and so is its gradient."""
    return (cost.weight + cost.gradient) * model.largest


def layers_take_turns(stage: int, job: Job, rest: Rest) -> bool:
    """Whether layers are made whole one after the other: alone on a device all of them are."""
    return STAGES[stage].weights and (job.cuts > 1 or rest.weights is not Tier.DEVICE)


def host_nbytes(model: Model, job: Job, *, born_sharded: bool) -> int:
    """Bytes on one node's host while the model is built, in fp32, by every process of the node."""
    if born_sharded:
        rest = math.ceil(model.numel / job.cuts) + model.largest
        return _FP32_NBYTES * job.devices_per_node * rest
    return _FP32_NBYTES * job.devices_per_node * model.numel


# ---- the functions that users know ---------------------------------------------------------------


def estimate_zero2_model_states_mem_needs(
    total_params: int,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    cpu_offload: bool = True,
    additional_buffer_factor: float = 1.5,
) -> tuple[int, int]:
    """Bytes that ZeRO-2 takes in bf16 or fp16: of the host for each node, and of each device.

    Args:
        total_params: elements of the model's parameters.
        num_gpus_per_node: devices, and so processes, of one node.
        num_nodes: nodes of the job.
        cpu_offload: whether the optimizer rests on the host.
        additional_buffer_factor: what host memory is multiplied with, for what else goes on there.
    """
    job = Job(num_gpus_per_node, num_nodes)
    row = _row(2, Model(total_params), job, HALF, Rest(optimizer=_host_if(cpu_offload)))
    return int(additional_buffer_factor * row.host_whole), row.device


def estimate_zero3_model_states_mem_needs(
    total_params: int,
    largest_layer_params: int,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    cpu_offload: bool = True,
    cpu_offload_params: bool = True,
    zero_init: bool = True,
    additional_buffer_factor: float = 1.5,
) -> tuple[int, int, int]:
    """Bytes that ZeRO-3 takes in bf16 or fp16: host for each node, each device, largest layer.

    Args:
        total_params: elements of the model's parameters.
        largest_layer_params: those that one module owns itself, at most.
        num_gpus_per_node: devices, and so processes, of one node.
        num_nodes: nodes of the job.
        cpu_offload: whether the optimizer rests on the host.
        cpu_offload_params: whether weights do too.
        zero_init: whether the model is built inside `zero.Init`.
        additional_buffer_factor: what host memory is multiplied with, for what else goes on there.
    """
    model, job = Model(total_params, 0, largest_layer_params), Job(num_gpus_per_node, num_nodes)
    rest = Rest(_host_if(cpu_offload and cpu_offload_params), _host_if(cpu_offload))
    row = _row(3, model, job, HALF, rest)
    host = row.host_born_sharded if zero_init else row.host_whole
    return int(additional_buffer_factor * host), row.device, layer_nbytes(model)


def _host_if(is_off: bool) -> Tier:
    return Tier.HOST if is_off else Tier.DEVICE


def estimate_zero2_model_states_mem_needs_all_live(
    model: nn.Module,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    additional_buffer_factor: float = 1.5,
) -> None:
    """Print what ZeRO-2 takes to train `model`, for each node and device.

    Args:
        model: its parameters are counted, and not touched; frozen ones cost their weights only.
        num_gpus_per_node: devices, and so processes, of one node.
        num_nodes: nodes of the job.
        additional_buffer_factor: what host memory is multiplied with, for what else goes on there.
    """
    job = Job(num_gpus_per_node, num_nodes)
    _print_zero2(counted(model), job, additional_buffer_factor)


def estimate_zero2_model_states_mem_needs_all_cold(
    total_params: int,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    additional_buffer_factor: float = 1.5,
) -> None:
    """As `estimate_zero2_model_states_mem_needs_all_live`, for a number of parameters alone."""
    job = Job(num_gpus_per_node, num_nodes)
    _print_zero2(Model(total_params), job, additional_buffer_factor)


def estimate_zero3_model_states_mem_needs_all_live(
    model: nn.Module,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    additional_buffer_factor: float = 1.5,
) -> None:
    """Print what ZeRO-3 takes to train `model`, for each node and device.

    Args:
        model: its parameters are counted, and not touched; frozen ones cost their weights only.
        num_gpus_per_node: devices, and so processes, of one node.
        num_nodes: nodes of the job.
        additional_buffer_factor: what host memory is multiplied with, for what else goes on there.
    """
    job = Job(num_gpus_per_node, num_nodes)
    _print_zero3(counted(model), job, additional_buffer_factor)


def estimate_zero3_model_states_mem_needs_all_cold(
    total_params: int,
    largest_layer_params: int,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    additional_buffer_factor: float = 1.5,
) -> None:
    """As `estimate_zero3_model_states_mem_needs_all_live`, for numbers of parameters alone."""
    job = Job(num_gpus_per_node, num_nodes)
    _print_zero3(Model(total_params, 0, largest_layer_params), job, additional_buffer_factor)


def _print_zero2(model: Model, job: Job, factor: float) -> None:
    lines = ["  per device     | host, per node | disk, per node | options"]
    for precision, cost in _PRECISIONS:
        for tier in _TIERS:
            row = _row(2, model, job, cost, Rest(optimizer=tier))
            cells = (row.device, factor * row.host_whole, row.disk)
            lines.append(_line(cells, precision, optimizer=tier))
    _print("ZeRO-2", model, job, lines)


def _print_zero3(model: Model, job: Job, factor: float) -> None:
    lines = ["  per device     | host, per node | no zero.Init   | disk, per node | options"]
    for precision, cost in _PRECISIONS:
        for weights, optimizer in _RESTS:
            row = _row(3, model, job, cost, Rest(weights, optimizer))
            hosts = (factor * row.host_born_sharded, factor * row.host_whole)
            cells = (row.device, *hosts, row.disk)
            lines.append(_line(cells, precision, optimizer=optimizer, param=weights))
    _print("ZeRO-3, with the largest layer whole,", model, job, lines)


_PRECISIONS: Sequence[tuple[str, Cost]] = (("bf16 or fp16", HALF), ("fp32", FULL))
# As the configuration calls them.
_TIERS = {Tier.DEVICE: "none", Tier.HOST: "cpu", Tier.DISK: "nvme"}
_RESTS: Sequence[tuple[Tier, Tier]] = (
    (Tier.DEVICE, Tier.DEVICE),
    (Tier.DEVICE, Tier.HOST),
    (Tier.DEVICE, Tier.DISK),
    (Tier.HOST, Tier.HOST),
    (Tier.DISK, Tier.DISK),
)


class _Row(NamedTuple):
    """Bytes of one device, and of one node's host and disk."""

    device: int
    host_whole: int
    """At the most: while every process builds the whole model, or with what rests there."""
    host_born_sharded: int
    """The same with `zero.Init`."""
    disk: int


def _row(stage: int, model: Model, job: Job, cost: Cost, rest: Rest) -> _Row:
    held = states_of(stage, model, job, cost, rest).total
    in_turn = layers_take_turns(stage, job, rest)
    resting = job.devices_per_node * held.host
    return _Row(
        held.device + in_turn * layer_nbytes(model, cost),
        max(resting, host_nbytes(model, job, born_sharded=False)),
        max(resting, host_nbytes(model, job, born_sharded=True)),
        job.devices_per_node * held.disk,
    )


def _line(cells: Iterable[float], precision: str, **rests: Tier) -> str:
    shown = " | ".join(f"{nbytes / _GB:11.2f} GB" for nbytes in cells)
    off = [
        f"offload_{name} {_TIERS[tier]}" for name, tier in rests.items() if tier is not Tier.DEVICE
    ]
    return f"  {shown} | {', '.join([precision, *off])}"


def _millions(numel: int) -> str:
    return f"{numel / 1e6:.1f} M"


def _print(title: str, model: Model, job: Job, lines: Iterable[str]) -> None:
    frozen = f" ({_millions(model.frozen)} of them frozen)" if model.frozen else ""
    head = [
        f"Model states of {_millions(model.numel)} parameters{frozen} under {title}",
        f"with Adam, on {job.nodes} x {job.devices_per_node} devices; activations come on top.",
    ]
    print("\n".join([*head, *lines]))  # noqa: T201 - a table for people is what was asked for
