"""`hadal.plan`: the memory of one rank along an update and its time, before the run.

The moments follow the real micro-step of the model, segment by segment. At each one, the states,
the gradients that have arrived, the gathered weights, the reductions under way and the activations
are added up, so that the peak is that of one moment and not the sum of every kind's own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import nn

from hadal.comm import Ranks
from hadal.config import Config
from hadal.config.reading import read
from hadal.engine.activations import (
    BlockMemory,
    Held,
    LossOf,
    MicroStep,
    Segment,
    tensors_in,
    trace,
)
from hadal.engine.checks import is_in_stages
from hadal.engine.clusters import ComputeCluster, cluster_of
from hadal.engine.memory import (
    GPU,
    Memory,
    MemoryKind,
    PlannedRank,
    config_for,
    memory_of,
    plan_rank,
    resting_nbytes,
    wire_nbytes,
)
from hadal.engine.policies import tiers_of, transport_of
from hadal.engine.precision import Casting, casting_of
from hadal.engine.step_time import StepTime, buckets_by_unit, step_time, uses_along
from hadal.engine.topology import RequestedRanks, requested_ranks, stages_of
from hadal.optim.workspace import block_numel
from hadal.zero.estimate import TierBytes
from hadal.zero.gradients import WAITING_NBYTES
from hadal.zero.paths import held_along, make_plan
from hadal.zero.policy import Tier

_MOVING = ("gradients", "gathers", "reductions")
"""Kinds of memory that change along an update, like activations."""
_USED = ("activations", "logits", "workspace")
_FRAGMENTED = 0.02
LIBRARIES = ("communicators", "context")
"""Kinds of memory that are not tensors, of which the plan has to assume the bytes."""


class Moment(NamedTuple):
    """A moment of an update."""

    phase: str
    """forward, backward or step"""
    unit: str
    """The unit that is used."""
    held: Mapping[str, int]
    """The bytes on the device by kind."""

    @property
    def total(self) -> int:
        """The bytes on the device."""
        return sum(self.held.values())


@dataclass(frozen=True, slots=True)
class Foresight:
    """The memory of one rank and the time of one update, before the run."""

    rank: PlannedRank
    memory: Memory
    """The memory without activations, each kind at its own peak."""
    cluster: ComputeCluster
    micro_step: MicroStep | None
    """One forward and backward; None if no batch was given."""
    moments: list[Moment]
    """The memory along the last micro-step of an update, and in the update; empty without batch."""
    time: StepTime | None
    """The time of one update; None without a batch."""
    raw: Mapping[str, Any]
    """The configuration as it was given."""
    batch: Any
    planner: Planner
    """The planner that made it, which knows the micro-step of this batch."""
    stages: tuple[int, ...] = ()
    """The bytes of a device at the peak of each pipeline stage, of which this is the fullest."""
    whole: tuple[nn.Module, ...] = ()
    """The model; all stages of one that a program has split."""

    @property
    def peak(self) -> Moment | None:
        """The moment with the most memory on the device; None without a batch."""
        return max(self.moments, key=lambda moment: moment.total, default=None)

    @property
    def kinds(self) -> list[MemoryKind]:
        """Every kind: on the device at the peak, on host and disk as held between updates."""
        known = {need.kind: need for need in (*self.memory.states, *self.memory.rest)}
        peak = self.peak
        if peak is None or self.micro_step is None:
            return list(known.values())
        found = []
        for kind in dict.fromkeys((*known, *peak.held)):
            before = known.get(kind, MemoryKind(kind, TierBytes(), _HOW.get(kind, "")))
            held = before.held._replace(device=peak.held.get(kind, 0))
            found.append(before._replace(held=held))
        kept = self.micro_step.inputs_of_recomputed * _keeps_inputs_on_host(self.rank.config)
        if kept:
            how = "inputs of recomputed modules (cpu_checkpointing)"
            found.append(MemoryKind("inputs", TierBytes(host=kept), how))
        return found

    @property
    def total(self) -> TierBytes:
        """The bytes of one rank at the peak."""
        return TierBytes().plus(*(need.held for need in self.kinds))

    @property
    def lacks(self) -> TierBytes:
        """The bytes that a device and a node's host have too few; the disk is not limited."""
        total, cluster = self.total, self.cluster
        if cluster.computes_on_host:
            total = TierBytes(0, total.device + total.host)
        return TierBytes(
            max(0, total.device - cluster.device_nbytes) * (not cluster.computes_on_host),
            max(0, self.rank.job.devices_per_node * total.host - cluster.host_nbytes),
        )

    @property
    def blocks(self) -> list[BlockMemory]:
        """Memory of each block if none is recomputed; empty without a batch."""
        step = self.micro_step
        if self.rank.planned.modules.recomputed:
            raw = {k: value for k, value in self.raw.items() if k != "activation_checkpointing"}
            step = self.planner.plan(raw, self.batch).micro_step
        return [] if step is None else step.blocks

    @property
    def fits(self) -> bool:
        """True if device and host have the memory."""
        return not any(self.lacks)


_HOW = {
    "activations": "saved for backward, and temporary tensors, by a trace",
    "logits": "tensors over the vocabulary, the loss's own included",
    "workspace": "gradients cast to float32, weights gathered in pieces",
    "fragments": f"assumed: {_FRAGMENTED:.0%} of what every update allocates and frees",
}


def plan(
    model: nn.Module,
    config: Any,
    batch: Any = None,
    *,
    cluster: str | ComputeCluster = "h100x8",
    nodes: int = 1,
    devices_per_node: int | None = None,
    loss_of: LossOf | None = None,
    with_values: bool = False,
) -> Foresight:
    """Foresee the memory of each rank and the time of an update, without any device.

    Args:
        model: the model, which may be on the meta device; neither weights nor values are needed.
        config: the configuration, as `initialize` takes it.
        batch: one micro-batch of one rank: a mapping of keyword arguments, a sequence of arguments,
            one tensor or a `Forward`, on meta too; None: activations and time are left out.
        cluster: its name, such as "h200x8", or the path of a file that `hadal bench cluster` wrote.
        nodes: the nodes.
        devices_per_node: the devices of each node; by default those of the cluster.
        loss_of: returns the loss from the model's output; by default its `loss`.
        with_values: compute one micro-step on the CPU, for models whose shapes depend on values.

    Raises:
        ConfigError, ModelError: the configuration does not fit the model, as in `initialize`, or
            the model cannot run.
    """
    cluster = cluster_of(cluster, devices_per_node)
    return Planner(model, cluster, nodes, loss_of, with_values).plan(config, batch)


class Planner:
    """Plans of one model; what is traced once is known for all configurations alike."""

    def __init__(
        self,
        model: nn.Module,
        cluster: ComputeCluster,
        nodes: int,
        loss_of: LossOf | None = None,
        with_values: bool = False,
        requested: RequestedRanks | None = None,
    ) -> None:
        """Plan a model; `requested`: the program's own groups of ranks."""
        if is_in_stages(model):
            requested = requested_ranks(model.mpu(), None, Ranks.world())
        self._requested = requested
        self._model = model
        self._cluster = cluster
        self._nodes = nodes
        self._loss_of = loss_of
        self._with_values = with_values
        self._known: dict[Any, Any] = {}

    def plan(self, given: Any, batch: Any) -> Foresight:
        """Plan a configuration; arguments and errors are those of `plan`."""
        found = self.stages(given, batch)
        totals = tuple(one.total.device for one in found)
        whole = [one.rank.held for one in found] if is_in_stages(self._model) else [self._model]
        return replace(found[totals.index(max(totals))], stages=totals, whole=(*whole,))

    def stages(self, given: Any, batch: Any) -> list[Foresight]:
        """Plan one rank of each stage of a pipeline; without one, the only one."""
        _, raw = read(given)
        cluster, nodes = self._cluster, self._nodes
        on_node = cluster.devices_per_node
        own = self._requested
        config = config_for(given, on_node * nodes, own)
        device = torch.device("cpu") if cluster.computes_on_host else GPU
        stages = self._model.num_stages if is_in_stages(self._model) else stages_of(config)
        stage_rank = partial(plan_rank, config, self._model, on_node, nodes, device)
        ranks = [
            stage_rank(stage=stage, requested=own, with_values=self._with_values)
            for stage in range(stages)
        ]
        found = [
            Foresight(rank, memory_of(rank), cluster, None, [], None, raw, batch, self)
            for rank in ranks
        ]
        return found if batch is None else self._with_time(found, batch)

    def _with_time(self, found: Sequence[Foresight], batch: Any) -> list[Foresight]:
        """Return the plans of all stages with activations and time."""
        ranks, cluster = [one.rank for one in found], self._cluster
        is_staged = is_in_stages(ranks[0].held)
        if is_staged:
            from hadal.engine import stage_traces  # for these alone

            chunks = self._once(ranks, batch, stage_traces.trace_chunks)
            steps = [*map(stage_traces.micro_step_of, ranks, chunks)]
        else:
            steps = [self._once(ranks, batch, self._trace)]
        times = [step_time(step, one, cluster) for one, step in zip(ranks, steps, strict=True)]
        if is_staged:
            times = stage_traces.in_stages(times, ranks, chunks, cluster)
        return [
            replace(one, micro_step=s, moments=_moments(one.rank, one.memory, s), time=time)
            for one, s, time in zip(found, steps, times, strict=True)
        ]

    def on(self, cluster: ComputeCluster) -> Planner:
        """Return a planner for another cluster, which knows the same micro-steps."""
        other = copy(self)
        other._cluster = cluster
        return other

    def _once(self, ranks: Sequence[PlannedRank], batch: Any, run: Callable[..., Any]) -> Any:
        """Return a trace that may be known from another plan."""
        first = ranks[0]
        config, casting = first.config, casting_of(first.config, first.device)
        dtypes = [
            {p: one.policy.precision.compute for p, one in plans if one.policy}
            for plans in (rank.planned.parameters.items() for rank in ranks)
        ]
        sections = config.tensor_parallel, config.expert_parallel, config.pipeline
        degrees = f"{sections} {config.sequence_parallel_size} {first.job}" if first.part else ""
        shapes = [tensor.shape for tensor in tensors_in(batch)]
        recomputed = [tuple(rank.planned.modules.recomputed) for rank in ranks]
        of_all = [tuple(some.values()) for some in dtypes]
        key = (*shapes, casting, *recomputed, *of_all, degrees)
        if key not in self._known:
            self._known[key] = run(ranks, batch, casting, dtypes, with_values=self._with_values)
        return self._known[key]

    def _trace(
        self,
        ranks: Sequence[PlannedRank],
        batch: Any,
        casting: Casting,
        dtypes: Sequence[Mapping[nn.Parameter, torch.dtype]],
        *,
        with_values: bool,
    ) -> MicroStep:
        (rank,) = ranks
        with rank.world:
            return trace(
                rank.held,
                rank.planned.units,
                batch,
                casting,
                dtypes[0],
                rank.features,
                self._loss_of,
                with_values=with_values,
            )


# ---- the moments ---------------------------------------------------------------------------------


def _moments(rank: PlannedRank, memory: Memory, step: MicroStep) -> list[Moment]:
    needs = {need.kind: need.held.device for need in (*memory.states, *memory.rest)}
    still = {kind: nbytes for kind, nbytes in needs.items() if kind not in _MOVING}
    passing = still | {"optimizer": needs["optimizer"] - resting_nbytes(rank)}
    # An accelerator frees gradients after each update; those of earlier micro-steps stay.
    accumulates = rank.config.gradient_accumulation_steps > 1
    stays = needs["gradients"] if accumulates or rank.device.type == "cpu" else 0
    host_inputs = step.inputs_of_recomputed * _keeps_inputs_on_host(rank.config)
    there, back = _gathered(rank, step)
    arrivals = [_arrive(rank, step.backward, needs["gradients"], first=not accumulates)]
    if accumulates:
        arrivals.append(_arrive(rank, step.backward, needs["gradients"], first=True))
    found = [
        Moment("forward", s.unit, passing | {"gradients": stays, "gathers": g} | _used(s.peak))
        for s, g in zip(step.forward, there, strict=True)
    ]
    for gradients in arrivals:
        for segment, gathers, some in zip(step.backward, back, gradients, strict=True):
            for activations, (landed, sent) in zip(segment.peaks, some, strict=True):
                held = {"gradients": landed, "gathers": gathers, "reductions": sent}
                held |= _used(activations)
                found.append(Moment("backward", segment.unit, passing | held))
    work = _workspace_nbytes(rank)
    found.append(Moment("step", "", still | {"gradients": needs["gradients"], "workspace": work}))
    return [_with_fragments(rank, _less(moment, host_inputs)) for moment in found]


def _used(held: Held) -> dict[str, int]:
    return {"activations": held.total - held.logits, "logits": held.logits}


def _less(moment: Moment, nbytes: int) -> Moment:
    """Return a moment without activations that are on the host."""
    kept = moment.held.get("activations", 0)
    if not nbytes or not kept:
        return moment
    return moment._replace(held={**moment.held, "activations": max(0, kept - nbytes)})


def _with_fragments(rank: PlannedRank, moment: Moment) -> Moment:
    if rank.device.type == "cpu":
        return moment
    moving = sum(moment.held.get(kind, 0) for kind in (*_MOVING, *_USED))
    return moment._replace(held={**moment.held, "fragments": round(_FRAGMENTED * moving)})


def _keeps_inputs_on_host(config: Config) -> bool:
    return config.activation_checkpointing.cpu_checkpointing


def _gathered(rank: PlannedRank, step: MicroStep) -> tuple[list[int], list[int]]:
    """Return the bytes of gathered weights in each segment of forward and backward."""
    planned = rank.planned
    sizes = [bucket.numel for bucket in planned.buckets]
    nbytes = [bucket.numel * bucket.precision.compute.itemsize for bucket in planned.buckets]
    used = buckets_by_unit(planned, cut=True)
    forward, starts = uses_along(step.forward, used)
    backward, starts_back = uses_along(step.backward, used)
    there = make_plan(forward, sizes, planned.limits, following=backward)
    back = make_plan(backward, sizes, planned.limits, there.kept_at_end)
    kept = sum(nbytes[number] for number in back.held)
    return (
        _by_segment(held_along(there, nbytes), starts),
        _by_segment(held_along(back, nbytes), starts_back, kept),
    )


def _by_segment(held: Sequence[int], starts: Sequence[int], before: int = 0) -> list[int]:
    found = []
    for first, stop in pairwise(starts):
        here = held[first:stop]
        found.append(max(here, default=before))
        before = here[-1] if here else before
    return found


def _arrive(
    rank: PlannedRank, segments: Sequence[Segment], total: int, *, first: bool
) -> list[list[tuple[int, int]]]:
    """Return the bytes of gradients and of reductions before and after each arrival of backward.

    A bucket's buffer exists from its first gradient on. If gradients are sharded, it is freed when
    its mean has been added to the shard, which is the case when the next bucket is complete, or at
    once if nothing overlaps. New gradients wait for their copy into the buffer.

    Args:
        rank: the rank.
        segments: the segments of backward.
        total: the bytes of all gradients.
        first: it is the first backward of an update.
    """
    planned = rank.planned
    reduces = not first or rank.config.gradient_accumulation_steps == 1
    trained = [bucket for bucket in planned.buckets if bucket.trainable]
    place = {m.name: (bucket, m) for bucket in trained for m in bucket.members}
    numel = sum(bucket.numel for bucket in trained)
    left = {bucket.name: len(bucket.members) for bucket in trained}
    landed = 0 if first else total
    in_flight = waiting = 0
    opened: dict[str, int] = {}
    found = []
    for segment in segments:
        here = [(landed, in_flight + sum(opened.values()) + waiting)]
        for name in segment.arrived:
            if name in place:
                bucket, member = place[name]
                itemsize, is_cut = bucket.precision.compute.itemsize, bucket.partition.gradients
                share = round(total * bucket.numel / numel) if first else 0
                if bucket.name not in opened:
                    opened[bucket.name] = itemsize * bucket.numel * is_cut
                    landed += 0 if is_cut else share
                if waiting >= WAITING_NBYTES:
                    waiting = 0
                if (first or is_cut) and rank.device.type != "cpu":
                    waiting += itemsize * member.parameter.numel()
                left[bucket.name] -= 1
            sent = in_flight + sum(opened.values()) + waiting
            if name in place and not left[bucket.name] and (reduces or is_cut):
                landed += share if is_cut else 0
                flight = opened.pop(bucket.name) + wire_nbytes(bucket, rank.config, rank.counts)
                sent = max(sent, flight + sum(opened.values()))
                in_flight = flight if planned.limits.overlap else 0
                waiting = 0
            here.append((landed, sent))
        found.append(here)
    return found


def _workspace_nbytes(rank: PlannedRank) -> int:
    """Return the bytes of an update beside states and gradients.

    Blocks of gradients are cast for the optimizer. Weights that are gathered again in pieces, as
    their bucket is larger than `allgather_bucket_size`, pass through a copy.
    """
    trained = [bucket for bucket in rank.planned.buckets if bucket.trainable]
    cast = refreshed = 0
    for bucket in trained:
        shards = rank.counts.shards_of(bucket.holders) if bucket.partition.optimizer else 1
        if bucket.precision.accumulate != torch.float32:
            cast += bucket.numel // shards
        piece = transport_of(rank.config, shards).refresh_numel
        is_gathered = shards > 1 and not bucket.partition.weights
        if is_gathered and bucket.numel > piece:
            refreshed += piece * bucket.precision.compute.itemsize
    if tiers_of(rank.config).optimizer is not Tier.DEVICE:
        cast = 0
    return 4 * min(cast, block_numel(rank.device)) + refreshed
