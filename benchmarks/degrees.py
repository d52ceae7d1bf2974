"""The calculated cost of each degree of parallelism: bytes held, bytes sent, idle time.

Weights and gradients are bf16, masters and Adam's moments fp32, as with `bf16.enabled`. Every
block is recomputed in backward. Ranks are placed as Hadal places them: those of one layer (tensor)
are neighbours, then those of one sequence, of the same experts, replicas, and stages last.

Sources: ZeRO (Rajbhandari et al. 2020) for states and their passes; Megatron-LM (Shoeybi et al.
2019) and its sequence parallelism (Korthikanti et al. 2022) for tensor slices and activations;
PipeDream-Flush (Narayanan et al. 2021) for stages; GShard (Lepikhin et al. 2020) for experts;
Ulysses (Jacobs et al. 2023) for sequences.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

from hadal.plugins.pipeline.orders import idle_share, order_of

_VALUE = 2  # bytes of a weight, a gradient, an activation in bf16
_OPTIMIZER = 12  # bytes of Adam's state for a parameter: fp32 master and two moments
_LOGIT = 10  # bytes of a logit in the loss: bf16, its fp32 copy and gradient
_TIMES = 4  # a forward's work in a step: forward, recomputed, and twice that in backward


@dataclass(frozen=True)
class Shape:
    """A decoder with grouped queries and gated feed-forward networks, some of them experts."""

    name: str
    layers: int
    width: int
    inner: int
    """Width inside of one feed-forward network."""
    heads: int
    key_heads: int
    head_size: int
    words: int
    experts: int = 1
    chosen: int = 1
    """Experts of a token."""
    shared: int = 0
    """Feed-forward networks for all tokens, in addition to the experts."""

    @property
    def network(self) -> int:
        """Parameters of one feed-forward network."""
        return 3 * self.width * self.inner

    @property
    def dense_block(self) -> int:
        """Parameters of a block that all its tokens use."""
        attention = 2 * self.width * self.head_size * (self.heads + self.key_heads)
        router = self.width * self.experts if self.experts > 1 else 0
        networks = self.shared + (self.experts == 1)
        return attention + router + networks * self.network + 2 * self.width

    @property
    def expert_block(self) -> int:
        """Parameters of a block's experts."""
        return self.experts * self.network if self.experts > 1 else 0

    @property
    def parameters(self) -> int:
        """Parameters of the model."""
        ends = 2 * self.words * self.width + self.width
        return self.layers * (self.dense_block + self.expert_block) + ends

    @property
    def active(self) -> int:
        """Parameters that one token is multiplied by."""
        experts = self.chosen * self.network if self.experts > 1 else 0
        return self.layers * (self.dense_block + experts) + self.words * self.width


# Llama 3 70B; and the blocks of GLM-4.5-Air (106 B), as many as make 104 B in even stages.
DENSE = Shape("70 B dense", 80, 8192, 28672, 64, 8, 128, 128256)
EXPERTS = Shape("104 B experts", 44, 4096, 1408, 96, 8, 128, 151552, 128, 8, 1)


@dataclass(frozen=True)
class Job:
    """The batch and the machine."""

    length: int = 4096
    """Tokens of a sequence."""
    sequences: int = 2048
    """Sequences of an update."""
    node: int = 8
    """Ranks of a node."""
    memory: float = 80e9
    """Bytes of a rank."""
    flops: float = 400e12
    """Operations per second that a rank reaches in bf16."""
    inside: float = 450e9
    """Bytes per second that a rank sends inside its node."""
    between: float = 50e9
    """Bytes per second that a rank sends to other nodes."""


@dataclass(frozen=True)
class Layout:
    """The degrees of parallelism, and the micro-batch."""

    data: int
    """Replicas, which read different samples."""
    stage: int
    """The ZeRO stage."""
    tensor: int = 1
    pipeline: int = 1
    experts: int = 1
    """Ranks that share the experts of a layer; they see different samples."""
    sequence: int = 1
    micro_batch: int = 1
    """Sequences of a micro-batch."""

    @property
    def world(self) -> int:
        """All ranks."""
        return self.data * self.sequence * self.tensor * self.pipeline

    def micro_batches(self, job: Job) -> int:
        """Return the micro-batches of an update."""
        return job.sequences // (self.data * self.micro_batch)

    def fault(self, shape: Shape, job: Job) -> str | None:
        """Return the reason that a layout is impossible; None if it is possible."""
        holders = self.data * self.sequence
        if shape.experts > 1 and self.tensor > 1:
            return "tensor slices leave experts whole: each of these ranks would compute the same"
        if job.sequences % (self.data * self.micro_batch):
            return f"{job.sequences} sequences for {self.data} replicas"
        for what, total, ranks in (
            ("layers for stages", shape.layers, self.pipeline),
            ("key heads for tensor ranks", shape.key_heads, self.tensor),
            ("heads for sequence ranks", shape.heads, self.sequence),
            ("experts for expert ranks", shape.experts, self.experts),
            ("replicas for expert ranks", holders, self.experts),
        ):
            if total % ranks:
                return f"{total} {what} are not divisible by {ranks}"
        return None


class Wire(NamedTuple):
    """Bytes that one rank sends in a step, by destination."""

    inside: float = 0.0
    """To ranks of its node."""
    between: float = 0.0
    """To other nodes."""

    def times(self, factor: float) -> Wire:
        """Return a multiple."""
        return Wire(self.inside * factor, self.between * factor)

    def plus(self, other: Wire) -> Wire:
        """Return the sum."""
        return Wire(self.inside + other.inside, self.between + other.between)

    def seconds(self, job: Job) -> float:
        """Return the seconds; the two kinds of links are used at the same time."""
        return max(self.inside / job.inside, self.between / job.between)


@dataclass(frozen=True)
class Held:
    """Bytes that one rank holds."""

    weights: float
    gradients: float
    optimizer: float
    activations: float
    gathered: float
    """Blocks that stage 3 gathers, and their gradients before they are reduced."""

    @property
    def total(self) -> float:
        """The sum."""
        states = self.weights + self.gradients + self.optimizer
        return states + self.activations + self.gathered


@dataclass(frozen=True)
class Cost:
    """The cost of a layout for one rank."""

    held: Held
    sent: Mapping[str, Wire]
    """Bytes sent, by degree."""
    idle: float
    """Share of the time in which stages wait for each other."""
    seconds: float
    """Seconds of a step at the job's rates, if ZeRO's traffic is hidden behind computation."""

    @property
    def wire(self) -> Wire:
        """Bytes of all degrees."""
        found = Wire()
        for one in self.sent.values():
            found = found.plus(one)
        return found


def ring(ranks: Sequence[int], node: int, nbytes: float) -> Wire:
    """Return an equal share of a buffer's pass around a ring: a gather or a reduce-scatter.

    Args:
        ranks: their numbers, in the ring's order; nodes hold consecutive ones.
        node: ranks of a node.
        nbytes: the whole buffer.
    """
    nodes = [number // node for number in ranks]
    borders = sum(one != nodes[place - 1] for place, one in enumerate(nodes))
    sent = nbytes * (len(ranks) - 1) / len(ranks)
    between = sent * borders / len(ranks)
    return Wire(sent - between, between)


def exchange(ranks: Sequence[int], node: int, nbytes: float) -> Wire:
    """Return the bytes that the first of some ranks sends if it sends each an equal part."""
    here = sum(number // node == ranks[0] // node for number in ranks)
    share = nbytes / len(ranks)
    return Wire(share * (here - 1), share * (len(ranks) - here))


def zero_passes(stage: int, micro_batches: int, blocks: int) -> float:
    """Return how often an update moves all parameters of a rank around its ring.

    Stages 0 and 1 reduce once and gather once. From stage 2 on no whole gradient is kept, so each
    micro-batch reduces. Stage 3 gathers in forward and in backward, but for the block between.
    """
    if stage < 2:
        return 2.0
    return micro_batches + 1.0 if stage == 2 else micro_batches * (3 - 1 / blocks)


def tensor_sums(blocks: int, *, recomputes: bool, ends: int) -> int:
    """Return the all-reduces of a micro-batch's activations by tensor-parallel ranks.

    A block has two in forward and two in backward; a recomputation has one, as the second one's
    result is not needed. Each end of the model has one: the embedding in forward, the output layer
    in backward.
    """
    return (5 if recomputes else 4) * blocks + ends


def expert_exchanges(blocks: int, *, recomputes: bool) -> int:
    """Return the exchanges of a micro-batch's tokens: there and back, in each computation."""
    return (6 if recomputes else 4) * blocks


def held_by(shape: Shape, layout: Layout, job: Job) -> Held:
    """Return the bytes of the ranks of the fullest stage."""
    ends = {0, layout.pipeline - 1}
    stages = (_held_by_stage(shape, layout, job, stage) for stage in ends)
    return max(stages, key=lambda held: held.total)


def _states(shape: Shape, layout: Layout, *, first: bool, last: bool) -> tuple[float, float]:
    """Return the dense and the expert parameters of one rank's stage, before ZeRO shards them."""
    blocks = shape.layers // layout.pipeline
    ends = (first + last) * shape.words * shape.width + last * shape.width
    dense = (blocks * shape.dense_block + ends) / layout.tensor
    return dense, blocks * shape.expert_block / layout.experts


def _held_by_stage(shape: Shape, layout: Layout, job: Job, stage: int) -> Held:
    is_last = stage == layout.pipeline - 1
    dense, experts = _states(shape, layout, first=stage == 0, last=is_last)
    ranks = layout.data * layout.sequence

    def states(nbytes: int, cut_from: int) -> float:
        is_cut = layout.stage >= cut_from
        return nbytes * (
            dense / (ranks if is_cut else 1) + experts / (ranks // layout.experts if is_cut else 1)
        )

    alive = min(layout.pipeline - stage, layout.micro_batches(job))
    tokens = layout.micro_batch * job.length / layout.sequence / layout.tensor
    blocks = shape.layers // layout.pipeline
    inputs = alive * blocks * tokens * shape.width * _VALUE
    attention = 2 * (shape.heads + shape.key_heads) * shape.head_size
    networks = shape.shared + shape.chosen
    inner = 5 * shape.width + attention + networks * (3 * shape.inner + shape.width)
    in_use = 2 * tokens * inner * _VALUE  # the values of one block, and their gradients
    logits = tokens * shape.words * _LOGIT * is_last
    block = shape.dense_block + shape.expert_block / layout.experts
    gathered = 3 * block / layout.tensor * _VALUE * (layout.stage == 3)
    return Held(
        states(_VALUE, 3),
        states(_VALUE, 2),
        states(_OPTIMIZER, 1),
        inputs + max(in_use, logits),
        gathered,
    )


def sent_by(shape: Shape, layout: Layout, job: Job) -> dict[str, Wire]:
    """Return the bytes that a rank of the first stage (last, for tensor sums) sends, by degree."""
    tensor, sequence, pipeline = layout.tensor, layout.sequence, layout.pipeline
    together, count = tensor * sequence, layout.micro_batches(job)
    blocks, ranks = shape.layers // pipeline, layout.data * sequence
    tokens = layout.micro_batch * job.length / sequence
    values = tokens * shape.width * _VALUE

    dense, experts = _states(shape, layout, first=True, last=pipeline == 1)
    passes = zero_passes(layout.stage, count, blocks)
    replicas = range(0, ranks * tensor, tensor)
    zero = ring(replicas, job.node, dense * _VALUE).plus(
        ring(replicas[:: layout.experts], job.node, experts * _VALUE)
    )
    sums = tensor_sums(blocks, recomputes=True, ends=2 if pipeline == 1 else 1)
    heads = 2 * (shape.heads + shape.key_heads) * shape.head_size
    exchanges = expert_exchanges(blocks, recomputes=True)
    rows = values * shape.chosen
    message = 2 * values / tensor * (pipeline > 1)  # an activation, or its gradient: middle stages
    is_near = ranks * tensor < job.node
    found = {
        "ZeRO": zero.times(passes),
        "tensor": ring(range(tensor), job.node, values).times(2 * sums * count),
        "pipeline": Wire(message * is_near, message * (not is_near)).times(count),
        "experts": exchange(range(layout.experts), job.node, rows).times(exchanges * count),
        "sequence": exchange(
            range(0, together, tensor), job.node, tokens * heads * _VALUE / tensor
        ).times(3 * blocks * count),
    }
    return {degree: wire for degree, wire in found.items() if sum(wire)}


@cache
def idle_of(stages: int, micro_batches: int, schedule: str = "1f1b") -> float:
    """Return the share of the time in which stages wait for each other."""
    orders = [order_of(schedule, micro_batches, stages, stage) for stage in range(stages)]
    return idle_share(orders)


def cost_of(shape: Shape, layout: Layout, job: Job) -> Cost:
    """Return the cost of a layout.

    Raises:
        ValueError: the layout is impossible.
    """
    fault = layout.fault(shape, job)
    if fault is not None:
        raise ValueError(fault)
    sent = sent_by(shape, layout, job)
    idle = idle_of(layout.pipeline, layout.micro_batches(job))
    attention = 2 * shape.layers * job.length * shape.heads * shape.head_size  # causal: half
    work = job.sequences * job.length * _TIMES * (2 * shape.active + attention)
    waits = sum(wire.seconds(job) for degree, wire in sent.items() if degree != "ZeRO")
    busy = (work / layout.world / job.flops + waits) / (1 - idle)
    seconds = max(busy, sent.get("ZeRO", Wire()).seconds(job))
    return Cost(held_by(shape, layout, job), sent, idle, seconds)


class Way(NamedTuple):
    """A set of degrees, from which the fastest layout that fits is chosen."""

    name: str
    stages: tuple[int, ...]
    tensor: tuple[int, ...] = (1,)
    pipeline: tuple[int, ...] = (1,)
    experts: tuple[int, ...] = (1,)
    sequence: tuple[int, ...] = (1,)

    def layouts(self, world: int) -> list[Layout]:
        """Return all layouts of a number of ranks."""
        return [
            Layout(
                world // (tensor * pipeline * sequence),
                stage,
                tensor,
                pipeline,
                experts,
                sequence,
                rows,
            )
            for stage in self.stages
            for tensor in self.tensor
            for pipeline in self.pipeline
            for experts in self.experts
            for sequence in self.sequence
            for rows in (1, 2, 4, 8, 16)
            if world % (tensor * pipeline * sequence) == 0
        ]


_STAGES = (2, 4, 8, 16)
WAYS: dict[Shape, tuple[Way, ...]] = {
    DENSE: (
        Way("ZeRO 1", (1,)),
        Way("ZeRO 3", (3,)),
        Way("ZeRO 3, sequence", (3,), sequence=(2, 4, 8)),
        Way("tensor, ZeRO 1", (1,), (2, 4, 8)),
        Way("tensor, ZeRO 3", (3,), (2, 4, 8)),
        Way("pipeline, ZeRO 1", (1,), pipeline=_STAGES),
        Way("tensor, pipeline, ZeRO 1", (1,), (2, 4, 8), _STAGES),
    ),
    EXPERTS: (
        Way("ZeRO 1", (1,)),
        Way("ZeRO 3", (3,)),
        Way("experts, ZeRO 1", (1,), experts=(2, 4, 8, 16, 32, 64)),
        Way("experts, ZeRO 3", (3,), experts=(2, 4, 8, 16, 32, 64)),
        Way("experts, sequence, ZeRO 3", (3,), experts=(2, 4, 8, 16, 32, 64), sequence=(2, 4, 8)),
        Way("pipeline, ZeRO 1", (1,), pipeline=(2, 4, 11)),
        Way("experts, pipeline, ZeRO 1", (1,), (1,), (2, 4, 11), (2, 4, 8, 16, 32, 64)),
    ),
}


def best_of(shape: Shape, way: Way, world: int, job: Job) -> tuple[Layout, Cost] | str:
    """Return the fastest layout that fits a rank's memory, else the smallest, else the reason."""
    layouts = way.layouts(world)
    possible = [layout for layout in layouts if layout.fault(shape, job) is None]
    if not possible:
        faults = [layout.fault(shape, job) for layout in layouts]
        return faults[0] or "" if faults else f"no such degrees of {world} ranks"
    found = [(layout, cost_of(shape, layout, job)) for layout in possible]
    fitting = [one for one in found if one[1].held.total <= job.memory]
    if fitting:
        return min(fitting, key=lambda one: one[1].seconds)
    return min(found, key=lambda one: one[1].held.total)
