"""The time of one update, by part, found from plans: nothing runs.

A device computes along the segments of a traced micro-step. What else an update needs (collectives,
copies between device and host, requests to a disk) waits in queues of its own, in the order that
the engine starts it, and is exposed only as far as computation waits for it.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch

from hadal.comm.codecs import Codec
from hadal.config import Config
from hadal.engine.activations import MicroStep, Segment
from hadal.engine.clusters import ComputeCluster, Link, ProductSpeed
from hadal.engine.memory import PlannedRank
from hadal.engine.plan import ModelPlan
from hadal.engine.policies import disk_steps_of, tiers_of, transport_of
from hadal.engine.precision import autocast_dtype
from hadal.zero.grouping import BucketPlan
from hadal.zero.offload import Offload
from hadal.zero.paths import Plan, Use, make_plan
from hadal.zero.policy import STAGES, Tier, Transport

PARTS = (
    "forward",
    "backward",
    "gathers",
    "reductions",
    "update",
    "refresh",
    "offload",
    "slices",
    "sequences",
    "experts",
    "messages",
    "bubble",
)
"""Computation of both passes; gathers of weights at stage 3; reductions of gradients; the update
of masters; gathers of updated weights (stages 1 and 2); traffic with host and disk; exchanges of
ranks with slices of layers, of sequences, and of experts; messages between stages of a pipeline,
and their other waits for each other."""

_DTYPES = {torch.bfloat16: "bf16", torch.float16: "fp16"}
_MASTER_NBYTES = 4


@dataclass(frozen=True, slots=True)
class PartTime:
    """One part of an update on one rank."""

    seconds: float
    """How long its work takes."""
    exposed: float
    """How long nothing is computed meanwhile; for computation itself, all of it."""
    wire_nbytes: int
    """Bytes that the rank sends to others."""


@dataclass(frozen=True, slots=True)
class StepTime:
    """The time of one update."""

    parts: Mapping[str, PartTime]
    """Parts by the names of `PARTS`; what is exposed adds up to `seconds`."""
    seconds: float
    samples: int
    """Samples of all ranks."""
    utilization: float
    """MFU: the products of forward and backward, without recomputation, in proportion to the
    device's peak; for a measured cluster, to the most that it reached."""
    left_out: tuple[str, ...]
    """Work that takes time but is not counted."""
    passes: tuple[float, ...]
    """The seconds of all forwards, of all backwards, and of all gradients that were deferred."""

    @property
    def samples_per_second(self) -> float:
        """Samples of all ranks per second."""
        return self.samples / self.seconds


def step_time(micro_step: MicroStep, rank: PlannedRank, cluster: ComputeCluster) -> StepTime:
    """Return the time of one update in the midst of many.

    Args:
        micro_step: one forward and backward of the rank.
        rank: the rank.
        cluster: what devices and networks reach.
    """
    update = _Update(micro_step, rank, cluster)
    update.run()  # its last gathers may still be under way in the next forward
    update.queues.forget()
    update.run()
    return update.found()


# ---- queues --------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Event:
    """Work that is under way, or was."""

    part: str
    start: float
    end: float
    before: _Event | None
    """The work whose end it began at; None: it began at once."""


class _Queues:
    """The device's own work, and the work beside it.

    Each queue does one thing after the other. If the ranks share a host's cores, the network's
    queue takes the time of those that compute.
    """

    def __init__(self, *, shares_cores: bool) -> None:
        self.now = 0.0
        """The time until which the device has work, or waits."""
        self._shares_cores = shares_cores
        self._last: dict[str, _Event] = {}
        self.forget()

    def forget(self) -> None:
        """Begin to count anew."""
        self.began = self.now
        self.busy: defaultdict[str, float] = defaultdict(float)
        self.exposed: defaultdict[str, float] = defaultdict(float)
        self.sent: Counter[str] = Counter()

    def compute(self, part: str, seconds: float) -> None:
        """Let the device work."""
        self.now += seconds
        self.busy[part] += seconds
        self.exposed[part] += seconds

    def start(self, queue: str, part: str, seconds: float, after: _Event | None = None) -> _Event:
        """Append work to a queue, which begins no earlier than now and than the end of `after`."""
        if queue == "network" and self._shares_cores:
            self.wait(after)
            self.compute(part, seconds)
            return _Event(part, self.now - seconds, self.now, None)
        known = [one for one in (after, self._last.get(queue)) if one is not None]
        before = max(known, key=lambda one: one.end, default=None)
        if before is not None and before.end <= self.now:
            before = None
        start = self.now if before is None else before.end
        event = self._last[queue] = _Event(part, start, start + seconds, before)
        self.busy[part] += seconds
        return event

    def wait(self, event: _Event | None) -> None:
        """Let the device wait; each part is charged for its own share of the wait."""
        if event is None or event.end <= self.now:
            return
        end, now, self.now = event.end, self.now, event.end
        while event is not None and end > now:
            begin = max(now, event.start)
            self.exposed[event.part] += end - begin
            end, event = begin, event.before


# ---- the ranks' collectives ----------------------------------------------------------------------


class _Group(NamedTuple):
    """Ranks that make collectives."""

    ranks: int
    cluster: ComputeCluster
    joined: int = 0
    """How many of them are on each node; 0: all are on one."""

    def seconds(self, kind: str, nbytes: int, dtype: torch.dtype) -> float:
        """Return the time of a collective over a message."""
        if self.ranks == 1:
            return 0.0
        links = self.cluster.links_of(_DTYPES.get(dtype, "fp32"), self.joined)
        link: Link = getattr(links, kind)
        return link.latency * math.log2(self.ranks) + self.sent(kind, nbytes) / link.bandwidth

    def sent(self, kind: str, nbytes: int) -> int:
        """Return the bytes that each rank sends."""
        rounds = 2 if kind == "all_reduce" else 1
        return rounds * (nbytes - nbytes // self.ranks)


@dataclass(slots=True)
class _Bucket:
    """A bucket, its ranks, and what goes on with it."""

    plan: BucketPlan
    shards: _Group
    copies: _Group
    """The ranks with the same shard."""
    transport: Transport
    offload: Offload
    steps: int
    """Elements that a rank steps."""
    ready: _Event | None = None
    """The last event that uses of the weights have to wait for."""
    is_near: bool = False
    """True: the node has a copy of the current weights."""
    missing: int = 0
    """Gradients that have not arrived in this backward."""

    @property
    def weight_nbytes(self) -> int:
        """The bytes of its weights."""
        return self.plan.numel * self.plan.precision.compute.itemsize

    @property
    def gather_codec(self) -> Codec | None:
        """The codec of its weights on the wire."""
        is_frozen = not self.plan.trainable and self.transport.frozen is not None
        return self.transport.frozen if is_frozen else self.transport.gather


# ---- one update ----------------------------------------------------------------------------------


class _Update:
    """A simulated update."""

    def __init__(self, micro_step: MicroStep, rank: PlannedRank, cluster: ComputeCluster) -> None:
        planned = rank.planned
        self._config, self._job, self._counts = rank.config, rank.job, rank.counts
        self._cluster = cluster.with_ranks(rank.job.devices_per_node)
        self._micro_step = micro_step
        self._moments = rank.moments
        self._limits = planned.limits
        self._speeds = self._cluster.speeds_of(_product_dtype(planned, rank.config, cluster))
        self._buckets = [self._bucket(plan) for plan in planned.buckets]
        self._of_gradient = {
            member.name: bucket
            for bucket in self._buckets
            if bucket.plan.trainable
            for member in bucket.plan.members
        }
        self._whole = buckets_by_unit(planned, cut=False)
        cut = buckets_by_unit(planned, cut=True)
        self._forward, self._starts = uses_along(micro_step.forward, cut)
        self._backward, self._starts_back = uses_along(micro_step.backward, cut)
        self._numels = {m.name: m.parameter.numel() for u in planned.units for m in u.members}
        self.queues = _Queues(shares_cores=cluster.computes_on_host)

    def _bucket(self, plan: BucketPlan) -> _Bucket:
        ranks, shards = self._counts.ranks_of(plan.holders), self._counts.shards_of(plan.holders)
        apart = max(1, self._job.devices // ranks)
        return _Bucket(
            plan,
            self._group(shards, apart),
            self._group(max(1, ranks // shards), apart * shards),
            transport_of(self._config, shards),
            tiers_of(self._config),
            math.ceil(plan.numel / shards) if plan.partition.optimizer else plan.numel,
        )

    def _group(self, ranks: int, apart: int) -> _Group:
        """Return a group whose neighbours' numbers are so far apart."""
        on_node = self._job.devices_per_node
        is_inside = ranks * apart <= on_node
        return _Group(ranks, self._cluster, 0 if is_inside else max(1, on_node // apart))

    # ---- passes ----------------------------------------------------------------------------------

    def run(self) -> None:
        """Run one update."""
        self._passes = [0.0, 0.0, 0.0]
        steps = self._config.gradient_accumulation_steps
        for bucket in self._buckets:
            bucket.is_near = False
        held: frozenset[int] = frozenset()
        sizes = [bucket.plan.numel for bucket in self._buckets]
        for step in range(steps):
            is_last = step == steps - 1
            there = make_plan(self._forward, sizes, self._limits, held, following=self._backward)
            following = () if is_last else self._forward
            back = make_plan(
                self._backward, sizes, self._limits, there.kept_at_end, following=following
            )
            held = back.kept_at_end
            begun = self.queues.now
            self.queues.compute("forward", self._cluster.micro_step_start)
            self._pass("forward", self._micro_step.forward, self._starts, there)
            turned = self.queues.now
            self._begin_backward(step == 0, is_last)
            starts = self._pass("backward", self._micro_step.backward, self._starts_back, back)
            self._end_backward()
            ended = self.queues.now
            parted = [*starts[self._micro_step.later_from :], ended][0]
            for number, seconds in enumerate((turned - begun, parted - turned, ended - parted)):
                self._passes[number] += seconds
        self._step()

    def _pass(
        self, part: str, segments: Sequence[Segment], uses: Sequence[int], plan: Plan
    ) -> list[float]:
        """Run a pass, and return when each segment began; `uses`: those begun before each."""
        arriving: dict[int, _Event] = {}
        gathered, starts = 0, []
        for segment, (first, stop) in zip(segments, pairwise(uses), strict=True):
            starts.append(self.queues.now)
            for number in self._whole.get(segment.unit, ()):
                self.queues.wait(self._buckets[number].ready)
            for position in range(first, stop):
                for number in plan.gathers[gathered : plan.started[position]]:
                    arriving[number] = self._gather(self._buckets[number])
                gathered = plan.started[position]
                self.queues.wait(arriving.get(plan.uses[position].bucket))
            self.queues.compute(part, self._seconds(segment))
            self._exchange(segment)
            if part == "backward":
                self._take(segment.arrived)
        return starts

    def _exchange(self, segment: Segment) -> None:
        """Wait for collectives of the model itself, on whose values it computes."""
        for (part, kind, ranks, dtype), messages in segment.exchanges.items():
            if len(ranks) == 1:
                continue
            group = self._group(len(ranks), ranks[1] - ranks[0])
            seconds = sum(group.seconds(kind, nbytes, dtype) for nbytes in messages)
            self.queues.sent[part] += sum(group.sent(kind, nbytes) for nbytes in messages)
            # Inside a node it does not wait for traffic between nodes.
            queue = "network" if group.joined or self._cluster.computes_on_host else "node"
            self.queues.wait(self.queues.start(queue, part, seconds))

    def _seconds(self, segment: Segment) -> float:
        """Return how long the device computes."""
        speeds, on_host = self._speeds, self._cluster.computes_on_host
        work, launches = segment.moved / speeds.bandwidth, segment.kernels * speeds.launch
        for kind, (calls, nbytes, flops) in segment.products.items():
            speed: ProductSpeed = getattr(speeds, kind)
            moved, multiplied = nbytes / speed.bandwidth, flops / speed.flops
            # A host reads values into its caches first; an accelerator multiplies meanwhile.
            work += moved + multiplied if on_host else max(moved, multiplied)
            launches += calls * speed.start
        # An accelerator computes while its host starts the next operations.
        return work + launches if on_host else max(work, launches)

    def _gather(self, bucket: _Bucket) -> _Event:
        """Start to gather sharded weights, which may have to be fetched first."""
        fetched = self._fetch(bucket)
        shards = bucket.shards
        near = self._config.zero_optimization.zero_hpz_partition_size
        if bucket.is_near:
            shards = _Group(near, self._cluster)
        bucket.is_near = 1 < near < bucket.shards.ranks
        nbytes = bucket.weight_nbytes
        # This rank's own shard is copied into the whole.
        self._pass_over("gathers", 2 * nbytes // shards.ranks)
        if bucket.gather_codec is not None:
            nbytes = bucket.gather_codec.wire_bytes(bucket.plan.numel)
            self._pass_over("gathers", bucket.weight_nbytes + nbytes)
        dtype = bucket.plan.precision.compute
        return self._send("gathers", "all_gather", nbytes, dtype, shards, fetched)

    def _fetch(self, bucket: _Bucket) -> _Event | None:
        tier, event = bucket.offload.weights, None
        nbytes = bucket.weight_nbytes // bucket.shards.ranks
        if tier is Tier.DISK:
            event = self._disk(nbytes, writes=False)
        if tier is not Tier.DEVICE:
            event = self._cross("to device", nbytes, event)
        return event

    def _send(
        self,
        part: str,
        kind: str,
        nbytes: int,
        dtype: torch.dtype,
        group: _Group,
        after: _Event | None = None,
    ) -> _Event:
        self.queues.sent[part] += group.sent(kind, nbytes)
        return self.queues.start("network", part, group.seconds(kind, nbytes, dtype), after)

    def _pass_over(self, part: str, nbytes: int) -> None:
        """Let the device read and write so many bytes."""
        self.queues.compute(part, nbytes / self._speeds.bandwidth)

    # ---- reductions ------------------------------------------------------------------------------

    def _begin_backward(self, is_first: bool, is_last: bool) -> None:
        reduced = [bucket for bucket in reversed(self._buckets) if bucket.plan.trainable]
        for bucket in reduced:
            bucket.missing = len(bucket.plan.members)
            self.queues.wait(bucket.ready)
        self._is_first, self._is_last = is_first, is_last
        self._turns = [one for one in reduced if is_last or one.plan.partition.gradients]
        is_cut = any(bucket.plan.partition.gradients for bucket in reduced)
        self._reduces_inside = is_cut or self._config.zero_optimization.grad_hooks
        self._in_flight: _Event | None = None

    def _take(self, arrived: Sequence[str]) -> None:
        """Collect gradients, and start every reduction whose turn has come."""
        for name in arrived:
            bucket = self._of_gradient.get(name)
            if bucket is not None:
                bucket.missing -= 1
                # It is copied into the bucket, or added to what is there.
                touched = 2 if self._is_first or bucket.plan.partition.gradients else 3
                nbytes = self._numels[name] * bucket.plan.precision.compute.itemsize
                self._pass_over("backward", touched * nbytes)
        while self._reduces_inside and self._turns and self._turns[0].missing <= 0:
            self._reduce(self._turns.pop(0))

    def _end_backward(self) -> None:
        while self._turns:
            self._reduce(self._turns.pop(0))
        self.queues.wait(self._in_flight)

    def _reduce(self, bucket: _Bucket) -> None:
        """Start a reduction; the one before it must be over."""
        self.queues.wait(self._in_flight)
        partition, precision = bucket.plan.partition, bucket.plan.precision
        nbytes, codec = bucket.plan.numel * precision.reduce.itemsize, bucket.transport.reduce
        if codec is not None and partition.gradients:
            nbytes = codec.wire_bytes(bucket.plan.numel)
            # It is encoded and decoded, each with a pass over values in float32.
            self._pass_over("reductions", 2 * (nbytes + _MASTER_NBYTES * bucket.plan.numel))
        kind = "reduce_scatter" if partition.optimizer else "all_reduce"
        event = self._send("reductions", kind, nbytes, precision.reduce, bucket.shards)
        if bucket.copies.ranks > 1 and self._is_last:
            shard, dtype = bucket.steps * precision.accumulate.itemsize, precision.accumulate
            event = self._send("reductions", "all_reduce", shard, dtype, bucket.copies, event)
        self._in_flight = event
        bucket.ready = event
        if self._is_last and self._steps_off(bucket):
            bucket.ready = self._cross("to host", bucket.steps * precision.accumulate.itemsize)
        if not self._limits.overlap:
            self.queues.wait(event)

    # ---- the update ------------------------------------------------------------------------------

    def _steps_off(self, bucket: _Bucket) -> bool:
        """Return whether a bucket is updated in another memory than the device's."""
        tier = bucket.offload.optimizer
        return tier is Tier.DISK or (tier is Tier.HOST and not self._cluster.computes_on_host)

    def _step(self) -> None:
        """Update masters and write the weights, once all gradients have arrived."""
        stepped = [bucket for bucket in self._buckets if bucket.plan.trainable]
        self.queues.compute("update", self._cluster.update_start)
        # Buckets of the device come first: it works while the host updates the others.
        off = self._on_host(stepped)
        for bucket in stepped:
            if bucket not in off:
                self.queues.compute("update", self._stepping(bucket, self._speeds.update))
        for bucket in stepped:
            if bucket not in off:
                self._refresh(bucket, None)
        for bucket in reversed(off):
            self._step_on_host(bucket)
        for bucket in off:
            self.queues.wait(bucket.ready)
        if not (self._limits.overlap and not self._cluster.computes_on_host):
            for bucket in stepped:
                self.queues.wait(bucket.ready)

    def _on_host(self, stepped: Sequence[_Bucket]) -> list[_Bucket]:
        """Return the buckets that the host updates: a share of them if `ratio` says so."""
        section = self._config.zero_optimization.offload_optimizer
        off = [bucket for bucket in stepped if self._steps_off(bucket)]
        room = sum(b.plan.numel for b in off) * (1.0 if section is None else section.ratio)
        seen = accumulate(bucket.plan.numel for bucket in off)
        return [bucket for bucket, numel in zip(off, seen, strict=True) if numel <= room]

    def _stepping(self, bucket: _Bucket, rate: float) -> float:
        """Return how long an update takes at AdamW's rate, in proportion to what it moves."""
        return bucket.steps / rate * (3 + 2 * self._moments) / 7

    def _step_on_host(self, bucket: _Bucket) -> None:
        ranks = self._job.devices_per_node
        after = bucket.ready
        nbytes = bucket.steps * _MASTER_NBYTES * (1 + self._moments)
        is_on_disk = bucket.offload.optimizer is Tier.DISK
        overlap = disk_steps_of(self._config).overlap
        if is_on_disk:
            after = self._disk(nbytes, writes=False, after=after)
            if not overlap.reads_ahead:
                self.queues.wait(after)
        seconds = self._stepping(bucket, self._cluster.host_update / ranks)
        event: _Event | None = self.queues.start("host", "update", seconds, after)
        if is_on_disk:
            written = self._disk(nbytes, writes=True, after=event)
            if not overlap.writes_behind:
                self.queues.wait(written)
        if bucket.offload.weights is Tier.DEVICE:
            sent = bucket.steps * bucket.plan.precision.compute.itemsize
            event = self._cross("to device", sent, event)
        self._refresh(bucket, event)

    def _refresh(self, bucket: _Bucket, after: _Event | None) -> None:
        """Gather whole weights that were updated in shards."""
        bucket.ready = after
        if not bucket.plan.partition.optimizer or bucket.plan.partition.weights:
            return
        largest, dtype = bucket.transport.refresh_numel, bucket.plan.precision.compute
        for start in range(0, bucket.plan.numel, largest):
            numel = min(largest, bucket.plan.numel - start)
            nbytes = numel * dtype.itemsize
            bucket.ready = self._send("refresh", "all_gather", nbytes, dtype, bucket.shards, after)

    # ---- host and disk ---------------------------------------------------------------------------

    def _cross(self, queue: str, nbytes: int, after: _Event | None = None) -> _Event | None:
        """Copy between device and host, which are one if the host computes."""
        if self._cluster.computes_on_host:
            return after
        return self.queues.start(queue, "offload", nbytes / self._cluster.host_link, after)

    def _disk(self, nbytes: int, *, writes: bool, after: _Event | None = None) -> _Event:
        rate = self._cluster.disk_write if writes else self._cluster.disk_read
        seconds = nbytes / rate * self._job.devices_per_node
        return self.queues.start("writes" if writes else "reads", "offload", seconds, after)

    # ---- the result ------------------------------------------------------------------------------

    def found(self) -> StepTime:
        """Return what the last update took."""
        queues, seconds = self.queues, self.queues.now - self.queues.began
        parts = {
            part: PartTime(queues.busy[part], queues.exposed[part], queues.sent[part])
            for part in PARTS
        }
        forward = sum(segment.flops for segment in self._micro_step.forward)
        backward = sum(segment.flops for segment in self._micro_step.backward)
        steps = self._config.gradient_accumulation_steps
        # A backward has twice the products of its forward: more are recomputation.
        products = min(3 * forward, forward + backward) * steps
        micro = self._config.train_micro_batch_size_per_gpu
        return StepTime(
            parts,
            seconds,
            micro * steps * (self._counts.dense // self._config.sequence_parallel_size),
            products / seconds / self._speeds.peak_flops,
            _left_out(self._config),
            (*self._passes,),
        )


def _left_out(config: Config) -> tuple[str, ...]:
    zero = config.zero_optimization
    if STAGES[zero.stage].weights and zero.divergent_ranks is True:  # "auto" plans them
        return ("announcements of gathers (zero_optimization.divergent_ranks)",)
    return ()


def _product_dtype(planned: ModelPlan, config: Config, cluster: ComputeCluster) -> str:
    """Return the dtype of most products: autocast's, or that of most weights."""
    device = torch.device("cpu" if cluster.computes_on_host else "cuda")
    chosen = autocast_dtype(config, device)
    if chosen is None:
        numels: Counter[torch.dtype] = Counter()
        for bucket in planned.buckets:
            numels[bucket.precision.compute] += bucket.numel
        chosen = max(numels, key=lambda dtype: numels[dtype], default=torch.float32)
    return _DTYPES.get(chosen, "fp32")


def buckets_by_unit(planned: ModelPlan, *, cut: bool) -> dict[str, list[int]]:
    """Return the numbers of the buckets that each unit uses, with sharded weights or whole ones."""
    buckets = [(n, b) for n, b in enumerate(planned.buckets) if b.partition.weights is cut]
    number_of = {member.parameter: n for n, bucket in buckets for member in bucket.members}
    found: dict[str, dict[int, None]] = defaultdict(dict)
    for unit in planned.units:
        mine = (number_of.get(member.parameter) for member in unit.members)
        found[unit.name] |= {number: None for number in mine if number is not None}
    return {unit: [*used] for unit, used in found.items()}


def uses_along(
    segments: Sequence[Segment], used: Mapping[str, Sequence[int]]
) -> tuple[list[Use], list[int]]:
    """Return the uses of buckets along a pass, and how many begin before each segment.

    Args:
        segments: those of the pass.
        used: the numbers of the buckets that each unit uses.
    """
    numbers = [used.get(segment.unit, ()) for segment in segments]
    starts = [0, *accumulate(map(len, numbers))]
    uses = [
        Use(number, starts[segment.until])
        for segment, some in zip(segments, numbers, strict=True)
        for number in some
    ]
    return uses, starts
