"""Estimates of the memory that model states need, before training: pure arithmetic.

For Adam under bf16 or fp16, a parameter costs 2 bytes as a weight, 2 as a gradient and 12 for the
optimizer (fp32 master and two moments), each divided by the ranks if the stage shards it
(Rajbhandari 2020). In fp32 weights are their own masters: 4, 4 and 8. Activations and communication
buffers come on top; `additional_buffer_factor` leaves room for them on the host. While the model is
built, host memory must hold the full model in fp32 for each process of a node, until `initialize`
(with `zero.Init`: its shard, and the largest layer).

Offloaded state is stored in host memory or on a disk (Rajbhandari 2021). An offloaded optimizer has
its gradients, sharded like itself, on the host. If weights are in another tier than the optimizer,
or either is on a disk, the optimizer has its own masters in fp32 training too. A disk holds two
generations of everything: the valid one, and the one that an update is writing. Reads and writes
of the disk go through buffers on the host.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from torch import nn

from hadal.zero.grouping import BucketPlan
from hadal.zero.policy import STAGES, Partition, Tier
from hadal.zero.sharing import HolderGroups

_GB = 1e9
_FP32_NBYTES = 4
# In elements: offloaded values on a disk are aligned to it.
_UNIT_NUMEL = 4096
_GENERATIONS = 2
"""Generations of state on a disk: an update that fails leaves the previous one intact."""


@dataclass(frozen=True, slots=True)
class Cost:
    """The bytes of one element: its weight, its gradient, its master and optimizer state."""

    weight: int
    gradient: int
    master: int
    """0 if weights are their own masters."""
    state: int
    moment: int = _FP32_NBYTES
    """The bytes of one value of the optimizer's state."""


# fp32 master and two moments with 16-bit weights and gradients; in fp32 weights are masters.
HALF = Cost(2, 2, 4, 8)
FULL = Cost(4, 4, 0, 8)


@dataclass(frozen=True, slots=True)
class Buffers:
    """The most host memory that a rank uses as buffers for the disk."""

    state_count: int
    """The number of buffers for masters and optimizer state; each holds a slice of one of these."""
    state_numel: int
    """The elements of one such buffer."""
    weights_nbytes: int
    """The bytes of all buffers for weights."""

    def state_nbytes(self, numel: int, itemsize: int) -> int:
        """Return the bytes of the state buffers for a rank with `numel` elements of each kind."""
        whole = -(-numel // _UNIT_NUMEL) * _UNIT_NUMEL
        return self.state_count * min(self.state_numel, whole) * itemsize


# Four sub-groups of 2^24 elements: a master and two moments, in slices that are read, stepped
# and written; five buffers of 10^8 weights.
DEFAULT_BUFFERS = Buffers(9, 14 << 19, 5 * 100_000_000 * _FP32_NBYTES)


@dataclass(frozen=True, slots=True)
class ShardTiers:
    """The tiers in which a rank's shards are stored between uses."""

    weights: Tier = Tier.DEVICE
    """The tier of stage 3's weight shards; persistent parameters stay on the device."""
    optimizer: Tier = Tier.DEVICE
    in_host_numel: int = 0
    """Elements of weights kept on the host if weights are offloaded to a disk (`max_in_cpu`)."""
    ratio: float = 1.0
    """The fraction of the optimizer stored in `optimizer`; the rest is on the device."""
    buffers: Buffers = field(default_factory=lambda: DEFAULT_BUFFERS)
    """The host buffers, used if anything is offloaded to a disk."""


@dataclass(frozen=True, slots=True)
class JobSize:
    """The devices that share the model states."""

    devices_per_node: int = 1
    nodes: int = 1
    second_copy_devices: int = 0
    """The devices that share a second copy of stage 3's weights (`zero_hpz_partition_size`)."""

    @property
    def devices(self) -> int:
        """The number of devices of all nodes."""
        return self.devices_per_node * self.nodes


@dataclass(frozen=True, slots=True)
class Model:
    """Elements of a model's parameters, each counted once."""

    trained: int
    frozen: int = 0
    largest: int = 0
    """The most elements that one module owns directly."""

    @property
    def numel(self) -> int:
        """The total number of elements."""
        return self.trained + self.frozen


class TierBytes(NamedTuple):
    """The bytes that one rank holds in each tier."""

    device: int = 0
    host: int = 0
    disk: int = 0

    @classmethod
    def at(cls, tier: Tier, nbytes: int) -> TierBytes:
        """Return `nbytes` of values stored in one tier."""
        if tier is Tier.DISK:
            return cls(disk=_GENERATIONS * nbytes)
        return cls(host=nbytes) if tier is Tier.HOST else cls(nbytes)

    def plus(self, *others: TierBytes) -> TierBytes:
        """Return the sum of both."""
        return TierBytes(*map(sum, zip(self, *others, strict=True)))


class States(NamedTuple):
    """The bytes of one rank for each kind of state."""

    weights: TierBytes
    gradients: TierBytes
    optimizer: TierBytes
    buffers: TierBytes
    """Host buffers for reading from and writing to a disk."""

    @property
    def total(self) -> TierBytes:
        """The sum of all kinds."""
        return TierBytes().plus(*self)


def counted(*parts: nn.Module) -> Model:
    """Count the parameters of a model, or of all its stages, without reading their values."""
    found = (p for part in parts for p in part.parameters())
    parameters = [p for p in found if not getattr(p, "ds_pipe_replicated", False)]
    trained = sum(p.numel() for p in parameters if p.requires_grad)
    modules = (module for part in parts for module in part.modules())
    own = (sum(p.numel() for p in module.parameters(recurse=False)) for module in modules)
    return Model(trained, sum(p.numel() for p in parameters) - trained, max(own))


class Portion(NamedTuple):
    """Elements of a model that are sharded and computed with alike."""

    cut: Partition
    cost: Cost
    shards: int
    trained: int = 0
    frozen: int = 0

    @property
    def stepped(self) -> int:
        """The elements that a rank updates."""
        return math.ceil(self.trained / (self.shards if self.cut.optimizer else 1))


def portions_of(
    buckets: Iterable[BucketPlan], shards_of: Callable[[HolderGroups], int], moments: int
) -> list[Portion]:
    """Return the portions of a planned model.

    Args:
        buckets: all of its buckets.
        shards_of: returns the number of shards of a copy, by the ranks that hold it.
        moments: how many values the optimizer keeps for each element.
    """
    found: dict[Portion, Portion] = {}
    for bucket in buckets:
        kind = Portion(bucket.partition, _cost(bucket, moments), shards_of(bucket.holders))
        old, trained = found.get(kind, kind), bucket.trainable * bucket.numel
        found[kind] = old._replace(
            trained=old.trained + trained, frozen=old.frozen + bucket.numel - trained
        )
    return list(found.values())


def _cost(bucket: BucketPlan, moments: int) -> Cost:
    precision = bucket.precision
    moment = precision.state_dtype.itemsize
    return Cost(
        weight=precision.compute.itemsize,
        gradient=precision.accumulate.itemsize,
        master=precision.master.itemsize if precision.keeps_master else 0,
        state=moment * moments,
        moment=moment,
    )


def states_of(
    stage: int, model: Model, job: JobSize, cost: Cost = HALF, rest: ShardTiers | None = None
) -> States:
    """Return a rank's state between steps, with the gradients before one; within 1 % (padding)."""
    portion = Portion(STAGES[stage], cost, job.devices, model.trained, model.frozen)
    return states_of_portions([portion], rest or ShardTiers(), job.second_copy_devices)


def states_of_portions(
    portions: Iterable[Portion], rest: ShardTiers, second_copy_devices: int = 0
) -> States:
    """Return a rank's state between steps, as `states_of` does, of several portions."""
    weights, gradients, optimizer = TierBytes(), TierBytes(), TierBytes()
    off = itemsize = host = 0
    for one in portions:
        held = _weights(one, rest, second_copy_devices)
        rest = replace(rest, in_host_numel=rest.in_host_numel - held.host // one.cost.weight)
        weights = weights.plus(held)
        gradients = gradients.plus(_gradients(one, rest))
        optimizer = optimizer.plus(_optimizer(one, rest))
        off += _part_off(rest, one.stepped)
        itemsize = max(itemsize, one.cost.master or one.cost.weight, one.cost.moment)
    if rest.optimizer is Tier.DISK and off:
        host += rest.buffers.state_nbytes(off, itemsize)
    host += rest.buffers.weights_nbytes * bool(weights.disk)
    return States(weights, gradients, optimizer, TierBytes(host=host))


def _weights(one: Portion, rest: ShardTiers, second_copy_devices: int) -> TierBytes:
    numel, nbytes = one.trained + one.frozen, one.cost.weight
    if not one.cut.weights:
        return TierBytes(nbytes * numel)
    second = math.ceil(numel / second_copy_devices) if second_copy_devices > 1 else 0
    shard = math.ceil(numel / one.shards)
    on_host = min(shard, rest.in_host_numel) if rest.weights is Tier.DISK else 0
    found = TierBytes(nbytes * second, nbytes * on_host)
    return found.plus(TierBytes.at(rest.weights, nbytes * (shard - on_host)))


def _gradients(one: Portion, rest: ShardTiers) -> TierBytes:
    """Return the gradients of an update, once all are accumulated."""
    landed = _part_off(rest, one.cost.gradient * one.stepped)
    if not one.cut.gradients:
        return TierBytes(one.cost.gradient * one.trained, landed)
    return TierBytes(one.cost.gradient * one.stepped - landed, landed)


def _optimizer(one: Portion, rest: ShardTiers) -> TierBytes:
    off = _part_off(rest, one.stepped)
    weights = rest.weights if one.cut.weights else Tier.DEVICE
    found = TierBytes()
    for part, tier in ((off, rest.optimizer), (one.stepped - off, Tier.DEVICE)):
        # Masters of the weights' own dtype may be separate from the weights.
        is_apart = weights is not tier or tier is Tier.DISK
        master = one.cost.master or one.cost.weight * is_apart
        found = found.plus(TierBytes.at(tier, (master + one.cost.state) * part))
    return found


def _part_off(rest: ShardTiers, count: int) -> int:
    """Return how many of the optimizer's elements are offloaded."""
    return 0 if rest.optimizer is Tier.DEVICE else round(rest.ratio * count)


def layer_nbytes(model: Model, cost: Cost = HALF) -> int:
    """Return the bytes of the largest layer while it is unsharded, with its gradient."""
    return (cost.weight + cost.gradient) * model.largest


def host_nbytes(model: Model, job: JobSize, *, born_sharded: bool) -> int:
    """Return a node's host bytes while each of its processes builds the model in fp32."""
    if born_sharded:
        rest = math.ceil(model.numel / job.devices) + model.largest
        return _FP32_NBYTES * job.devices_per_node * rest
    return _FP32_NBYTES * job.devices_per_node * model.numel


# ---- the usual plans -----------------------------------------------------------------------------


class MemoryPlan(NamedTuple):
    """A ZeRO stage, and the tiers of the optimizer and of the weights."""

    stage: int
    optimizer: Tier = Tier.DEVICE
    weights: Tier = Tier.DEVICE

    @property
    def tiers(self) -> dict[str, str]:
        """The tiers by the configuration's names."""
        return {
            "offload_optimizer": self.optimizer.value,
            "offload_param": self.weights.value,
        }

    def section(self, folder: str) -> dict[str, Any]:
        """Return `zero_optimization` for it; `folder` is on the disk."""
        section: dict[str, Any] = {"stage": self.stage}
        for key, device in self.tiers.items():
            if device != "none":
                path = {"nvme_path": folder} if device == "nvme" else {}
                section[key] = {"device": device, **path, "pin_memory": True}
        return section


PLANS = (
    *(MemoryPlan(stage) for stage in range(4)),
    *(MemoryPlan(stage, Tier.HOST) for stage in range(4)),
    *(MemoryPlan(stage, Tier.DISK) for stage in (1, 2, 3)),
    MemoryPlan(3, Tier.HOST, Tier.HOST),
    MemoryPlan(3, Tier.DISK, Tier.DISK),
)
"""The usual plans, fastest first."""


# ---- the functions that users know ---------------------------------------------------------------


def estimate_zero2_model_states_mem_needs(
    total_params: int,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    cpu_offload: bool = True,
    additional_buffer_factor: float = 1.5,
) -> tuple[int, int]:
    """Return the bytes that ZeRO-2 needs in bf16 or fp16: (host memory per node, device memory).

    Args:
        total_params: elements of the model's parameters.
        num_gpus_per_node: devices, and so processes, of one node.
        num_nodes: nodes of the job.
        cpu_offload: whether the optimizer is offloaded to the host.
        additional_buffer_factor: factor on host memory, to leave room for other uses.
    """
    job = JobSize(num_gpus_per_node, num_nodes)
    row = _row(2, Model(total_params), job, HALF, ShardTiers(optimizer=_host_if(cpu_offload)))
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
    """Return the bytes of ZeRO-3 in bf16 or fp16: (host per node, device, largest layer).

    Args:
        total_params: elements of the model's parameters.
        largest_layer_params: the most elements that one module owns directly.
        num_gpus_per_node: devices, and so processes, of one node.
        num_nodes: nodes of the job.
        cpu_offload: whether the optimizer is offloaded to the host.
        cpu_offload_params: whether weights are offloaded too.
        zero_init: whether the model is built inside `zero.Init`.
        additional_buffer_factor: factor on host memory, to leave room for other uses.
    """
    model, job = Model(total_params, 0, largest_layer_params), JobSize(num_gpus_per_node, num_nodes)
    rest = ShardTiers(_host_if(cpu_offload and cpu_offload_params), _host_if(cpu_offload))
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
    """Print the memory that ZeRO-2 needs to train `model`, per node and device.

    Args:
        model: the model, which is only counted; frozen parameters cost only their weights.
        num_gpus_per_node: devices, and so processes, of one node.
        num_nodes: nodes of the job.
        additional_buffer_factor: factor on host memory, to leave room for other uses.
    """
    _print_needs(2, counted(model), JobSize(num_gpus_per_node, num_nodes), additional_buffer_factor)


def estimate_zero2_model_states_mem_needs_all_cold(
    total_params: int,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    additional_buffer_factor: float = 1.5,
) -> None:
    """Print the memory that ZeRO-2 needs for a number of parameters, per node and device."""
    job = JobSize(num_gpus_per_node, num_nodes)
    _print_needs(2, Model(total_params), job, additional_buffer_factor)


def estimate_zero3_model_states_mem_needs_all_live(
    model: nn.Module,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    additional_buffer_factor: float = 1.5,
) -> None:
    """Print the memory that ZeRO-3 needs to train `model`, per node and device.

    Args:
        model: the model, which is only counted; frozen parameters cost only their weights.
        num_gpus_per_node: devices, and so processes, of one node.
        num_nodes: nodes of the job.
        additional_buffer_factor: factor on host memory, to leave room for other uses.
    """
    _print_needs(3, counted(model), JobSize(num_gpus_per_node, num_nodes), additional_buffer_factor)


def estimate_zero3_model_states_mem_needs_all_cold(
    total_params: int,
    largest_layer_params: int,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    additional_buffer_factor: float = 1.5,
) -> None:
    """Print the memory that ZeRO-3 needs for numbers of parameters, per node and device."""
    job = JobSize(num_gpus_per_node, num_nodes)
    _print_needs(3, Model(total_params, 0, largest_layer_params), job, additional_buffer_factor)


def _print_needs(stage: int, model: Model, job: JobSize, factor: float) -> None:
    is_3 = stage == 3
    born = "host, per node | no zero.Init  " if is_3 else "host, per node"
    lines = [f"  per device     | {born} | disk, per node | options"]
    for precision, cost in (("bf16 or fp16", HALF), ("fp32", FULL)):
        for plan in (plan for plan in PLANS if plan.stage == stage):
            row = _row(stage, model, job, cost, ShardTiers(plan.weights, plan.optimizer))
            hosts = (factor * row.host_born_sharded, factor * row.host_whole)
            cells = (row.device, *hosts[0 if is_3 else 1 :], row.disk)
            shown = " | ".join(f"{nbytes / _GB:11.2f} GB" for nbytes in cells)
            off = [f"{key} {device}" for key, device in plan.tiers.items() if device != "none"]
            lines.append(f"  {shown} | {', '.join([precision, *off])}")
    frozen = f" ({_millions(model.frozen)} of them frozen)" if model.frozen else ""
    title = "ZeRO-3, with the largest layer whole," if is_3 else "ZeRO-2"
    head = [
        f"Model states of {_millions(model.numel)} parameters{frozen} under {title}",
        f"with Adam, on {job.nodes} x {job.devices_per_node} devices; activations come on top.",
    ]
    print("\n".join([*head, *lines]))  # noqa: T201 - the function's purpose is to print


class _Row(NamedTuple):
    """The bytes of one device, and of one node's host and disk."""

    device: int
    host_whole: int
    """The peak: while each process builds the whole model, or with offloaded state."""
    host_born_sharded: int
    """The peak with `zero.Init`."""
    disk: int


def _row(stage: int, model: Model, job: JobSize, cost: Cost, rest: ShardTiers) -> _Row:
    held = states_of(stage, model, job, cost, rest).total
    # Layers are unsharded one at a time, rather than all being on one device.
    in_turn = STAGES[stage].weights and (job.devices > 1 or rest.weights is not Tier.DEVICE)
    resting = job.devices_per_node * held.host
    return _Row(
        held.device + in_turn * layer_nbytes(model, cost),
        max(resting, host_nbytes(model, job, born_sharded=False)),
        max(resting, host_nbytes(model, job, born_sharded=True)),
        job.devices_per_node * held.disk,
    )


def _millions(numel: int) -> str:
    return f"{numel / 1e6:.1f} M"
