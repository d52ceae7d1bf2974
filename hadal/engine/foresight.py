"""The memory of one rank along an update, before the run: `memory.py` and `activations.py` in one.

Its moments follow the real micro-step of the model, segment by segment. At each one, the states,
the gradients that have arrived, the gathered weights, the reductions under way and the activations
are added up, so that the peak is that of one moment and not the sum of every kind's own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import nn

from hadal.config import Config
from hadal.engine.activations import LossOf, MicroStep, Segment, trace
from hadal.engine.memory import (
    GPU,
    Memory,
    MemoryKind,
    PlannedRank,
    memory_of_rank,
    plan_rank,
    wire_nbytes,
)
from hadal.engine.policies import tiers_of, transport_of
from hadal.engine.precision import casting_of
from hadal.errors import NotBuiltYetError
from hadal.optim.workspace import block_numel
from hadal.zero.estimate import TierBytes
from hadal.zero.gradients import WAITING_NBYTES
from hadal.zero.paths import Use, held_along, make_plan
from hadal.zero.policy import Tier

_MOVING = ("gradients", "gathers", "reductions")
"""Kinds of memory that change along an update, like activations."""
_FRAGMENTED = 0.02


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
    """The memory of one rank along the last micro-step of an update, and the update."""

    rank: PlannedRank
    memory: Memory
    """The memory without activations, each kind at its own peak."""
    micro_step: MicroStep
    moments: list[Moment]

    @property
    def peak(self) -> Moment:
        """The moment with the most memory on the device."""
        return max(self.moments, key=lambda moment: moment.total)

    @property
    def kinds(self) -> list[MemoryKind]:
        """Every kind at the peak; host and disk as they are held between updates."""
        peak = self.peak.held
        known = {need.kind: need for need in (*self.memory.states, *self.memory.rest)}
        found = []
        for kind in dict.fromkeys((*known, *peak)):
            before = known.get(kind, MemoryKind(kind, TierBytes(), _HOW.get(kind, "")))
            held = before.held._replace(device=peak.get(kind, 0))
            found.append(before._replace(held=held))
        kept = self.micro_step.inputs_of_recomputed * _keeps_inputs_on_host(self.rank.config)
        if kept:
            how = "inputs of recomputed modules (cpu_checkpointing)"
            found.append(MemoryKind("inputs", TierBytes(host=kept), how))
        return found

    @property
    def total(self) -> TierBytes:
        """The bytes of one rank at the peak."""
        total = TierBytes()
        for need in self.kinds:
            total = total.plus(need.held)
        return total


_HOW = {
    "activations": "saved for backward, and temporary tensors of operations, by a trace",
    "workspace": "blocks of gradients in float32, and weights that are gathered in pieces",
    "fragments": f"assumed: {_FRAGMENTED:.0%} of what is allocated and freed in every update",
}


def foresee(
    config: Config,
    model: nn.Module,
    batch: Any,
    devices_per_node: int,
    nodes: int,
    device: torch.device = GPU,
    loss_of: LossOf | None = None,
    *,
    with_values: bool = False,
) -> Foresight:
    """Return the memory of one rank along an update.

    Args:
        config: the configuration.
        model: the model, which may be on meta.
        batch: one micro-batch of one rank (see `activations.trace`).
        devices_per_node: devices, and so ranks, of each node.
        nodes: the nodes.
        device: the kind of device that computes.
        loss_of: returns the loss from the model's output.
        with_values: compute one micro-step on the CPU.

    Raises:
        ConfigError, ModelError: the configuration does not fit the model, as in `initialize`, or
            the model cannot run.
        NotBuiltYetError: the model is split over ranks.
    """
    rank = plan_rank(config, model, devices_per_node, nodes, device)
    if rank.parts > 1:
        raise NotBuiltYetError(
            f"activations of a model in {rank.parts} parts (tensor_parallel, pipeline) are not"
            " built yet; without a batch, all other memory is planned"
        )
    planned, memory = rank.planned, memory_of_rank(rank)
    dtypes = {
        p: one.policy.precision.compute for p, one in planned.parameters.items() if one.policy
    }
    step = trace(
        model,
        planned.units,
        batch,
        casting_of(config, device),
        dtypes,
        planned.modules.recomputed,
        loss_of,
        with_values=with_values,
    )
    return Foresight(rank, memory, step, _moments(rank, memory, step))


# ---- the moments ---------------------------------------------------------------------------------


def _moments(rank: PlannedRank, memory: Memory, step: MicroStep) -> list[Moment]:
    needs = {need.kind: need.held.device for need in (*memory.states, *memory.rest)}
    still = {kind: nbytes for kind, nbytes in needs.items() if kind not in _MOVING}
    # An accelerator frees gradients after each update; those of earlier micro-steps stay.
    accumulates = rank.config.gradient_accumulation_steps > 1
    stays = needs["gradients"] if accumulates or rank.device.type == "cpu" else 0
    host_inputs = step.inputs_of_recomputed * _keeps_inputs_on_host(rank.config)
    there, back = _gathered(rank, step)
    arrivals = [_arrive(rank, step.backward, needs["gradients"], first=not accumulates)]
    if accumulates:
        arrivals.append(_arrive(rank, step.backward, needs["gradients"], first=True))
    found = [
        Moment("forward", s.unit, still | {"gradients": stays, "gathers": g, "activations": s.peak})
        for s, g in zip(step.forward, there, strict=True)
    ]
    for gradients in arrivals:
        for segment, gathers, some in zip(step.backward, back, gradients, strict=True):
            for activations, (landed, sent) in zip(segment.peaks, some, strict=True):
                held = {
                    "gradients": landed,
                    "gathers": gathers,
                    "reductions": sent,
                    "activations": activations,
                }
                found.append(Moment("backward", segment.unit, still | held))
    work = _workspace_nbytes(rank)
    found.append(Moment("step", "", still | {"gradients": needs["gradients"], "workspace": work}))
    return [_with_fragments(rank, _less(moment, host_inputs)) for moment in found]


def _less(moment: Moment, nbytes: int) -> Moment:
    """Return a moment without activations that are on the host."""
    kept = moment.held.get("activations", 0)
    if not nbytes or not kept:
        return moment
    return moment._replace(held={**moment.held, "activations": max(0, kept - nbytes)})


def _with_fragments(rank: PlannedRank, moment: Moment) -> Moment:
    if rank.device.type == "cpu":
        return moment
    moving = sum(moment.held.get(kind, 0) for kind in (*_MOVING, "activations", "workspace"))
    return moment._replace(held={**moment.held, "fragments": round(_FRAGMENTED * moving)})


def _keeps_inputs_on_host(config: Config) -> bool:
    return config.activation_checkpointing.cpu_checkpointing


def _gathered(rank: PlannedRank, step: MicroStep) -> tuple[list[int], list[int]]:
    """Return the bytes of gathered weights in each segment of forward and backward."""
    planned = rank.planned
    cut = [bucket for bucket in planned.buckets if bucket.partition.weights]
    sizes = [bucket.numel for bucket in cut]
    nbytes = [bucket.numel * bucket.precision.compute.itemsize for bucket in cut]
    of_unit: dict[str, list[int]] = {}
    of_parameter = {m.parameter: n for n, bucket in enumerate(cut) for m in bucket.members}
    for unit in planned.units:
        numbers = [of_parameter[m.parameter] for m in unit.members if m.parameter in of_parameter]
        of_unit.setdefault(unit.name, []).extend(numbers)
    forward, starts = _uses(step.forward, of_unit)
    backward, starts_back = _uses(step.backward, of_unit)
    there = make_plan(forward, sizes, planned.limits, following=backward)
    back = make_plan(backward, sizes, planned.limits, there.kept_at_end)
    kept = sum(nbytes[number] for number in back.held)
    return (
        _by_segment(held_along(there, nbytes), starts),
        _by_segment(held_along(back, nbytes), starts_back, kept),
    )


def _uses(
    segments: Sequence[Segment], of_unit: Mapping[str, Sequence[int]]
) -> tuple[list[Use], list[int]]:
    """Return the uses of buckets, and the number of the first use of each segment."""
    numbers = [list(dict.fromkeys(of_unit.get(segment.unit, ()))) for segment in segments]
    starts = [0]
    for some in numbers:
        starts.append(starts[-1] + len(some))
    uses = [
        Use(number, starts[segment.until])
        for segment, some in zip(segments, numbers, strict=True)
        for number in some
    ]
    return uses, starts


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
                if first or is_cut:
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
