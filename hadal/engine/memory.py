"""The memory that one rank needs under a configuration, by kind, before anything is made.

It follows the plan that `initialize` would make of the model, which has no values, for ranks that
need not exist. Activations are not counted. What depends on libraries and machines is assumed, and
each line says what was.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from hadal.comm.ranks import size_in_name
from hadal.config import Config, load_config
from hadal.config.optimizer import KINDS
from hadal.engine.activations import Features
from hadal.engine.checks import is_in_stages
from hadal.engine.plan import ModelPlan, ModulesPlan, RankCounts, plan_model, plan_modules
from hadal.engine.policies import (
    disk_steps_of,
    reduction_of,
    tiers_of,
    transport_of,
    weight_buffers_of,
)
from hadal.engine.topology import RequestedRanks, communicators_of, model_parts_of
from hadal.optim.build import build_optimizer
from hadal.optim.workspace import block_numel
from hadal.units import shown_binary, shown_numel
from hadal.zero.estimate import (
    Buffers,
    JobSize,
    ShardTiers,
    States,
    TierBytes,
    portions_of,
    states_of_portions,
)
from hadal.zero.gradients import WAITING_NBYTES
from hadal.zero.grouping import BucketPlan
from hadal.zero.paths import Use, held_along, make_plan
from hadal.zero.policy import STAGES
from hadal.zero.sharing import holders_of

if TYPE_CHECKING:
    from hadal.engine.rank_parts import RankPart

GPU = torch.device("cuda")

# The weights of a layer of which only the size is known: buckets end between weights.
_WEIGHTS = 4
_CONTEXT_NBYTES = 500_000_000
# NCCL (src/include/device.h, src/transport): a connection has 10 MiB of buffers at the receiver,
# which are NCCL_BUFFSIZE of 4 MiB, 4.7 MiB for LL128 and 0.5 MiB for LL in units of 2 MiB, and one
# such unit at the sender. Between GPUs with NVLink a ring uses 24 channels, and a pair of ranks 32.
_CONNECTION_NBYTES = 12 << 20
_RING_CHANNELS, _PAIR_CHANNELS = 24, 32


class MemoryKind(NamedTuple):
    """The memory of one kind."""

    kind: str
    held: TierBytes
    how: str
    """How it was counted, and what was assumed."""


@dataclass(frozen=True, slots=True)
class Memory:
    """The memory of one rank."""

    states: list[MemoryKind]
    """Weights, gradients and optimizer state, and buffers for a disk."""
    rest: list[MemoryKind]
    """Kinds that are needed beside them at the peak, without activations."""
    stage: int
    optimizer: str

    @property
    def total(self) -> TierBytes:
        """The sum of all kinds."""
        return TierBytes().plus(*(need.held for need in [*self.states, *self.rest]))

    @property
    def held(self) -> TierBytes:
        """The sum of the states."""
        return TierBytes().plus(*(need.held for need in self.states))


@dataclass(frozen=True, slots=True)
class PlannedRank:
    """One rank of a job as `initialize` would make it, with nothing made."""

    config: Config
    model: nn.Module
    """The whole model."""
    planned: ModelPlan
    counts: RankCounts
    job: JobSize
    device: torch.device
    optimizer: str
    moments: int
    """How many values the optimizer keeps for each element."""
    whose: str
    """The source of the layers' sizes."""
    part: RankPart | None = None
    """The rank's part of the model; None: it holds all of it."""

    @property
    def held(self) -> nn.Module:
        """The modules that the rank holds."""
        return self.model if self.part is None else self.part.model

    @property
    def world(self) -> AbstractContextManager[None]:
        """A context in which the rank and those beside it exist."""
        return nullcontext() if self.part is None else self.part.world

    @property
    def features(self) -> Features:
        """The features that change the forward of its modules."""
        recomputed, fuses = self.planned.modules.recomputed, self.device.type != "cpu"
        if self.part is None:
            return Features(recomputed, fuses=fuses)
        topology = self.part.topology
        sequence = topology.sequence_parallel
        groups = {"slices": topology.tensor_parallel, "sequences": sequence}
        named: dict[Any, str] = {
            ranks.group.group_name: part for part, ranks in groups.items() if ranks
        }
        if topology.is_from_program:
            # The program cuts sequences itself, and may have made the same groups again.
            sequence = None
            named |= {ranks.numbers: part for part, ranks in groups.items() if ranks}
        defers = is_in_stages(self.held) and self.config.pipeline.schedule == "zero_bubble"
        return Features(recomputed, sequence, named, fuses, defers)


def config_for(source: Any, ranks: int, requested: RequestedRanks | None) -> Config:
    """Load a configuration to plan with, for ranks that need not exist."""
    requested = requested or RequestedRanks()
    return load_config(
        source,
        world_size=ranks,
        sequence_parallel_size=requested.sequence_parallel_size,
        data_parallel_size=requested.data_parallel_size,
        allow_unbuilt=True,
    )


def plan_rank(
    config: Config,
    model: nn.Module,
    devices_per_node: int,
    nodes: int,
    device: torch.device = GPU,
    *,
    stage: int = 0,
    requested: RequestedRanks | None = None,
    with_values: bool = False,
) -> PlannedRank:
    """Plan one rank.

    Args:
        config: the configuration.
        model: the model, which may be on meta.
        devices_per_node: devices, and so ranks, of each node.
        nodes: the nodes.
        device: the kind of device that computes; on a CPU, all its memory is the host's.
        stage: its stage of a pipeline.
        requested: the program's own groups of ranks.
        with_values: the part of a model has values too.

    Raises:
        ConfigError, ModelError: the configuration does not fit the model, as in `initialize`.
    """
    job = job_of(config, devices_per_node, nodes)
    parts, part = model_parts_of(config), None
    modules, whose, ranks = ModulesPlan(), "the model's plan", job.devices // parts
    held = model
    if isinstance(model, SizedModel):
        numel = sum(p.numel() for p in model.parameters())
        held = model if parts == 1 else SizedModel(numel // parts, model.layer_numel)
        whose = f"{model.assumed}{f', in {parts} equal parts' if parts > 1 else ''}"
    elif requested or _is_in_parts(model, config):
        from hadal.engine.rank_parts import RankPart  # for this alone

        requested = requested or RequestedRanks()
        part = RankPart(model, config, job.devices, stage, requested, with_values=with_values)
        held, ranks, modules = part.model, part.topology.sharding.size, part.modules
    else:
        modules = plan_modules(model, config)
    trained = {p: 0 for p in held.parameters() if p.requires_grad}
    counts = RankCounts.of(config, max(1, ranks))
    planned = plan_model(held, modules, config, device, counts, trained)
    name, moments = optimizer_of(config)
    return PlannedRank(config, model, planned, counts, job, device, name, moments, whose, part)


def _is_in_parts(model: nn.Module, config: Config) -> bool:
    """Return True if ranks hold different parts of a model, or of its sequences."""
    degrees = (
        config.tensor_parallel.is_on,
        config.pipeline.auto or is_in_stages(model),
        config.expert_parallel.enabled,
        config.sequence_parallel_size > 1,
    )
    return any(degrees) or any(holders_of(p).experts is not None for p in model.parameters())


def memory_of(rank: PlannedRank) -> Memory:
    """Return the memory of a planned rank."""
    planned, config = rank.planned, rank.config
    states = _states_of(rank, rank.moments)
    away = TierBytes(host=resting_nbytes(rank))
    states = states._replace(optimizer=states.optimizer.plus(away))
    kinds = {
        "weights": rank.whose,
        "gradients": "once the gradients of an update are complete",
        "optimizer": f"{rank.optimizer}: {rank.moments} values per element, beside masters",
        "buffers": "host memory through which a disk is read and written",
    }
    held = [MemoryKind(kind, nbytes, kinds[kind]) for kind, nbytes in states._asdict().items()]
    rest = [
        _gathers(planned),
        _reductions(planned, config, rank.counts),
        *_tables(rank.held),
        *([] if rank.device.type == "cpu" else _of_libraries(rank)),
    ]
    return Memory(held, rest, config.zero_optimization.stage, rank.optimizer)


def _states_of(rank: PlannedRank, moments: int) -> States:
    portions = portions_of(rank.planned.buckets, rank.counts.shards_of, moments)
    return states_of_portions(
        portions, shard_tiers(rank.config, moments), rank.job.second_copy_devices
    )


def resting_nbytes(rank: PlannedRank) -> int:
    """Return the bytes of the optimizer's state that are off the device in forward and backward."""
    section = rank.config.compile
    if not (section.deepcompile and section.offload_opt_states) or rank.device.type == "cpu":
        return 0
    both, masters = (_states_of(rank, moments).optimizer for moments in (rank.moments, 0))
    return both.device - masters.device


def _tables(model: nn.Module) -> list[MemoryKind]:
    """Return the model's buffers, which every rank holds as they are."""
    nbytes = sum(buffer.nbytes for buffer in model.buffers())
    how = "the model's buffers: masks, statistics, frequencies"
    return [MemoryKind("tables", TierBytes(nbytes), how)] if nbytes else []


def job_of(config: Config, devices_per_node: int, nodes: int) -> JobSize:
    """Return the devices that share the states."""
    zero = config.zero_optimization
    second = zero.zero_hpz_partition_size if STAGES[zero.stage].weights else 0
    return JobSize(devices_per_node, nodes, second)


# ---- a model of which only the size is known -----------------------------------------------------


class SizedModel(nn.Sequential):
    """A model of which only the size is known: equal layers of four weights, on meta."""

    def __init__(self, numel: int, largest: int = 0) -> None:
        """Make it; `largest`: the elements of a layer, 0: as transformers of the size have."""
        super().__init__()
        # About as many layers as transformers have: 32 of 7 B, 80 of 70 B.
        depth = max(12, round(32 * math.pow(numel / 7e9, 0.4)))
        self.assumed = (
            f"layers of {shown_numel(largest)} elements"
            if largest
            else f"assumed: {depth} equal layers"
        )
        self.layer_numel = size = largest or max(1, math.ceil(numel / depth))
        for start in range(0, numel, size):
            layer = nn.Module()
            first, remainder = divmod(min(size, numel - start), _WEIGHTS)
            for number in range(_WEIGHTS):
                values = torch.empty(first + (number < remainder), device="meta")
                layer.register_parameter(f"weight{number}", nn.Parameter(values))
            self.append(layer)


# ---- the states ----------------------------------------------------------------------------------


def shard_tiers(config: Config, moments: int) -> ShardTiers:
    """Return the tiers that store shards, and the host memory through which a disk is used."""
    zero = config.zero_optimization
    tiers, steps = tiers_of(config), disk_steps_of(config)
    runs = 1 + moments  # the master, and each value that is remembered
    part = steps.part_numel(runs, block_numel(torch.device("cpu")))
    count, nbytes = weight_buffers_of(config)
    return ShardTiers(
        tiers.weights,
        tiers.optimizer,
        0 if zero.offload_param is None else zero.offload_param.max_in_cpu,
        1.0 if zero.offload_optimizer is None else zero.offload_optimizer.ratio,
        Buffers(runs * steps.overlap.parts, part, count * nbytes),
    )


def optimizer_of(config: Config) -> tuple[str, int]:
    """Return an optimizer's name, and how many values it keeps for each element."""
    if config.optimizer is None:
        return "Adam (none is named)", 2
    name, params = config.optimizer.type, config.optimizer.params
    known = KINDS[name].state_with(params) if name in KINDS else None
    if known is not None:
        return name, len(known)
    weight = nn.Parameter(torch.zeros(8, 8))
    made = build_optimizer(name, params, [weight])
    weight.grad = torch.ones_like(weight)
    made.step()
    kept = [value for value in made.state[weight].values() if isinstance(value, torch.Tensor)]
    return name, sum(value.numel() == weight.numel() for value in kept)


def section_of(optimizer: Any) -> dict[str, Any] | None:
    """Return the section of a program's own optimizer; None if its kind is not known."""
    name = next((c.__name__ for c in type(optimizer).__mro__ if c.__name__ in KINDS), None)
    if name is None:
        return None
    known = optimizer.defaults
    params = {key: known[key] for key in ("momentum", "amsgrad", "centered") if known.get(key)}
    return {"type": name, "params": params}


# ---- beside the states ---------------------------------------------------------------------------


def _gathers(planned: ModelPlan) -> MemoryKind:
    """Return the weights of stage 3 that are gathered at a time, along the planned order."""
    cut = [bucket for bucket in planned.buckets if bucket.partition.weights]
    sizes = [bucket.numel for bucket in cut]
    nbytes = [bucket.numel * bucket.precision.compute.itemsize for bucket in cut]
    forward, backward = _uses(cut), _uses(cut[::-1], len(cut))
    there = make_plan(forward, sizes, planned.limits, following=backward)
    back = make_plan(backward, sizes, planned.limits, there.kept_at_end)
    most = max([0, *held_along(there, nbytes), *held_along(back, nbytes)])
    return MemoryKind(
        "gathers",
        TierBytes(most),
        "weights in use, ahead of use or kept for backward" if cut else "weights are whole",
    )


def _uses(buckets: Sequence[BucketPlan], last: int = 0) -> list[Use]:
    """Return one use of each bucket; those of a unit end together.

    `last`: buckets are numbered down from it; 0: up.
    """
    names = [bucket.units[0].name for bucket in buckets]
    ends = {name: place + 1 for place, name in enumerate(names)}
    numbers = range(last - 1, -1, -1) if last else range(len(buckets))
    return [Use(number, ends[name]) for number, name in zip(numbers, names, strict=True)]


def _reductions(planned: ModelPlan, config: Config, counts: RankCounts) -> MemoryKind:
    """Return gradients that are collected and reduced, beside the sums that `states` has.

    A bucket is collected while the one before it is reduced. If gradients are sharded, both have
    buffers of their own, which are freed when the mean has been added to the shard. Gradients wait
    for their copy into the buffer until many are copied at once.
    """
    reduced = [bucket for bucket in planned.buckets if bucket.trainable]
    if not reduced:
        return MemoryKind("reductions", TierBytes(), "nothing is trained")
    accumulates = config.gradient_accumulation_steps > 1
    before = most = own = 0
    for bucket in reversed(reduced):  # as gradients arrive
        itemsize = bucket.precision.compute.itemsize
        largest = itemsize * max(m.parameter.numel() for m in bucket.members)
        collected = itemsize * bucket.numel
        buffer = collected * bucket.partition.gradients
        # Without a buffer of its own, only the first backward copies: the others add in place.
        waiting = largest + WAITING_NBYTES * (buffer > 0 or not accumulates)
        in_flight = buffer + wire_nbytes(bucket, config, counts)
        most = max(most, before + buffer + min(collected, waiting), in_flight)
        before = in_flight if planned.limits.overlap else 0
        own += 0 if buffer else collected
        if accumulates:
            # No reduction is between the copies of the first backward.
            most = max(most, min(own, largest + WAITING_NBYTES))
    dtypes = {str(bucket.precision.reduce).removeprefix("torch.") for bucket in reduced}
    is_cut = any(bucket.partition.gradients for bucket in reduced)
    said = ["whole buckets"] if is_cut else []
    if any(wire_nbytes(bucket, config, counts) for bucket in reduced):
        said.append(f"copies in {' and '.join(sorted(dtypes))}")
    return MemoryKind(
        "reductions", TierBytes(most), ", ".join([*said, "gradients not yet in a bucket"])
    )


def wire_nbytes(bucket: BucketPlan, config: Config, counts: RankCounts) -> int:
    """Return the bytes that a bucket's reduction takes beside its gradients and their mean."""
    ranks = counts.ranks_of(bucket.holders)
    if ranks == 1:
        return 0
    precision, shards = bucket.precision, counts.shards_of(bucket.holders)
    codec = transport_of(config, shards).reduce
    if codec is not None and bucket.partition.gradients:
        return 2 * codec.wire_bytes(bucket.numel)  # what is sent, and what is received
    factors = reduction_of(config).factors(ranks)
    is_scaled = factors.before != 1.0 or precision.reduce == torch.float16
    own = precision.compute if bucket.partition.gradients else precision.accumulate
    sent = bucket.numel * precision.reduce.itemsize * (is_scaled or precision.reduce != own)
    row = math.ceil(bucket.numel / shards) if bucket.partition.optimizer else 0
    received = row * precision.reduce.itemsize
    if not bucket.partition.gradients:
        return sent + received
    if config.gradient_accumulation_steps > 1:
        # What was received is added to the mean in float32, when it has been sent.
        return max(sent, row * max(4, precision.accumulate.itemsize)) + received
    # The mean of the last bucket is still to be made.
    return max(0, sent + received - row * precision.accumulate.itemsize)


def _of_libraries(rank: PlannedRank) -> list[MemoryKind]:
    """Return what the device's libraries take."""
    planned, config, job = rank.planned, rank.config, rank.job
    topology = None if rank.part is None else rank.part.topology
    named = {bucket.holders.experts for bucket in planned.buckets}
    experts = {size_in_name(name) or 1 for name in named if name is not None}
    if config.expert_parallel.enabled:
        experts.add(config.expert_parallel.autoep_size)
    node = job.devices_per_node
    found = communicators_of(config, job.devices, node, sorted(experts), topology)
    nbytes = [
        _PAIR_CHANNELS * (max(2, min(one.ranks, node)) - 1) if one.is_to_each else _RING_CHANNELS
        for one in found
    ]
    names = Counter(one.purpose for one in found)
    said = ", ".join(name if count == 1 else f"{count} {name}" for name, count in names.items())
    return [
        MemoryKind(
            "communicators",
            TierBytes(_CONNECTION_NBYTES * sum(nbytes)),
            f"assumed: NCCL, {shown_binary(_CONNECTION_NBYTES)} a channel; of {said}"
            if found
            else "there is one rank",
        ),
        MemoryKind(
            "context", TierBytes(_CONTEXT_NBYTES), "assumed: CUDA's context and loaded kernels"
        ),
    ]
