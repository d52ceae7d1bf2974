"""The activations and the time of pipeline stages: one micro-batch is traced for all of a schedule.

The chunks of a model are traced in its order, each with the values that the one before it sends.
What a stage holds of other micro-batches, and how long it waits for other stages, follows from the
instructions of the schedule.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from hadal.engine.activations import Held, MicroStep, Segment, tensors_in, trace
from hadal.engine.clusters import ComputeCluster
from hadal.engine.memory import PlannedRank
from hadal.engine.precision import Casting, cast_floats
from hadal.engine.step_time import PartTime, StepTime
from hadal.listener import Forward
from hadal.plugins.pipeline.module import PipelineModule
from hadal.plugins.pipeline.orders import JobKind, end_times, order_of, training_schedule
from hadal.plugins.pipeline.schedule import (
    BackwardPass,
    BackwardWeights,
    ForwardPass,
    LoadMicroBatch,
    PipeInstruction,
    RecvActivation,
    RecvGrad,
)
from hadal.plugins.pipeline.wires import ValueLayout, put_together, taken_apart


class ChunkTrace(NamedTuple):
    """One micro-batch's way through one chunk of a model."""

    step: MicroStep
    inputs: int
    """Bytes that are received from the chunk before."""
    outputs: int
    """Bytes that are sent to the next chunk."""
    input_gradients: int
    output_gradients: int


def trace_chunks(
    stages: Sequence[PlannedRank],
    batch: Any,
    casting: Casting,
    dtypes: Sequence[Mapping[Any, torch.dtype]],
    *,
    with_values: bool,
) -> list[list[ChunkTrace]]:
    """Trace one micro-batch through all stages; return the chunks of each.

    Args:
        stages: a rank of each stage.
        batch: what the loader yields.
        casting: the casts of the whole model.
        dtypes: the dtypes in which each stage's parameters are computed.
        with_values: compute for real.

    Raises:
        ModelError: a stage cannot run.
        UsageError: the batch is no pair.
    """
    modules = [_module(rank) for rank in stages]
    value, labels = modules[0].halves_of(batch)
    if casting.inputs is not None:
        value = cast_floats(value, casting.inputs)
    found: list[list[ChunkTrace]] = [[] for _ in stages]
    for number in range(sum(len(module.chunks) for module in modules)):
        index = number % len(stages)
        rank, module = stages[index], modules[index]
        is_last = number == len(module.parts) - 2
        ends = _Ends(module, casting, labels if is_last else None, is_last=is_last)
        with rank.world:
            step = trace(
                module,
                rank.planned.units,
                Forward((value,), {"chunk": number // len(stages)}, 0, 0, is_training=True),
                casting._replace(inputs=None, outputs=None),
                dtypes[index],
                rank.features,
                ends.root,
                with_values=with_values,
            )
        given = tensors_in(value) if number else []
        received = sum(t.nbytes for t in given), sum(t.nbytes for t in given if t.requires_grad)
        sent = _nbytes(ends.layout, gradients=False), _nbytes(ends.layout, gradients=True)
        found[index].append(ChunkTrace(step, received[0], sent[0], received[1], sent[1]))
        value = ends.next_value()
    return found


def _module(rank: PlannedRank) -> PipelineModule:
    assert isinstance(rank.held, PipelineModule)
    return rank.held


class _Ends:
    """The end of a chunk's forward: its loss, or what it sends."""

    def __init__(
        self, module: PipelineModule, casting: Casting, labels: Any, *, is_last: bool
    ) -> None:
        self._module, self._casting = module, casting
        self._labels, self._is_last = labels, is_last
        self.layout: ValueLayout | None = None
        self._held: list[Tensor] = []

    def root(self, outputs: Any) -> Tensor:
        """Return the root of backward."""
        if self._is_last:
            if self._casting.outputs is not None:
                outputs = cast_floats(outputs, self._casting.outputs)
            labels = tree_map_only(Tensor, _on_host, self._labels)
            loss = self._module.loss_fn
            found: Tensor = outputs if loss is None else loss(outputs, labels)
            return found
        tensors, self.layout = taken_apart(outputs, "the stage")
        # As the executor's slots, until the micro-batch has left the stage.
        self._held = [tensor.detach().contiguous() for tensor in tensors]
        takers = [tensor for tensor in tensors if tensor.requires_grad]
        root: Tensor = _FromNextChunk.apply(self._held, *takers)  # type: ignore[no-untyped-call]
        return root

    def next_value(self) -> Any:
        """Return what the next chunk receives, on meta."""
        if self.layout is None:
            return None
        made = [
            form.empty(torch.device("meta")).requires_grad_(form.takes_gradient)
            for form in self.layout.tensors
        ]
        return put_together(self.layout.frame, made)


class _FromNextChunk(torch.autograd.Function):
    """A scalar whose backward passes gradients on as they are received."""

    @staticmethod
    def forward(ctx: Any, held: list[Tensor], *outputs: Tensor) -> Tensor:
        ctx.held = held
        ctx.forms = [(tensor.shape, tensor.dtype, tensor.device) for tensor in outputs]
        return outputs[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> Any:
        ctx.found = [torch.empty(s, dtype=dtype, device=device) for s, dtype, device in ctx.forms]
        return None, *ctx.found


def _on_host(value: Tensor) -> Tensor:
    return torch.empty(value.shape, dtype=value.dtype, device="cpu") if value.is_meta else value


def _nbytes(layout: ValueLayout | None, *, gradients: bool) -> int:
    forms = () if layout is None else layout.gradients if gradients else layout.tensors
    meta = torch.device("meta")
    return sum(form.empty(meta).nbytes for form in forms)


# ---- a schedule ----------------------------------------------------------------------------------


def micro_step_of(rank: PlannedRank, chunks: Sequence[ChunkTrace]) -> MicroStep:
    """Return a micro-step of all chunks of a stage, with what is held of other micro-batches.

    Each pass has the most that it meets in an update.
    """
    section, config, module = rank.config.pipeline, rank.config, _module(rank)
    schedule = training_schedule(
        section.schedule,
        config.gradient_accumulation_steps,
        module.num_stages,
        module.stage_id,
        len(chunks),
    )
    beside, alive = _held_beside([one for step in schedule for one in step], chunks)
    forward = [_raised(chunk.step.forward, n) for chunk, n in zip(chunks, beside[0], strict=True)]
    backward = [
        _raised(chunk.step.backward[: chunk.step.later_from], ahead)
        + _raised(chunk.step.backward[chunk.step.later_from :], later)
        for chunk, ahead, later in zip(chunks, *beside[1:], strict=True)
    ]
    steps = [chunk.step for chunk in chunks]
    return MicroStep(
        _joined(forward),
        _joined(backward[::-1]),
        sum(step.kept for step in steps),
        sum(count * step.inputs_of_recomputed for count, step in zip(alive, steps, strict=True)),
        [block for step in steps for block in step.blocks],
        steps[0].later_from,  # a schedule that defers has one chunk
    )


_PASSES = ForwardPass, BackwardPass, BackwardWeights


def _held_beside(
    todo: Sequence[PipeInstruction], chunks: Sequence[ChunkTrace]
) -> tuple[list[list[int]], list[int]]:
    """Return the most bytes beside each chunk's passes of each kind, and its micro-batches.

    As the executor: receives start before the computation ahead of their own; a buffer keeps what
    was sent until another micro-batch is in it.
    """
    slots: dict[tuple[int, int], int] = {}
    alive, most_alive = [0] * len(chunks), [0] * len(chunks)
    beside = [[0] * len(chunks) for _ in _PASSES]
    for place, one in enumerate(todo):
        if not isinstance(one, (LoadMicroBatch, RecvActivation, *_PASSES)):
            continue
        where = one.kwargs.get("chunk", 0), one.buffer_id
        index, chunk = where[0], chunks[where[0]]
        if isinstance(one, LoadMicroBatch | RecvActivation):
            slots[where] = chunk.inputs
            continue
        kind = _PASSES.index(type(one))
        others = sum(nbytes for other, nbytes in slots.items() if other != where)
        coming = _received_next(todo[place + 1 :], chunks)
        beside[kind][index] = max(beside[kind][index], others + coming)
        sent = chunk.outputs + chunk.input_gradients
        slots[where] = (chunk.step.kept, sent + chunk.step.later, sent)[kind]
        alive[index] += (1, -1, 0)[kind]
        most_alive[index] = max(most_alive[index], alive[index])
    return beside, most_alive


def _received_next(todo: Sequence[PipeInstruction], chunks: Sequence[ChunkTrace]) -> int:
    """Return the bytes that are received before the next computation."""
    found = 0
    for one in todo:
        if isinstance(one, ForwardPass | BackwardPass):
            break
        if isinstance(one, RecvActivation | RecvGrad):
            chunk = chunks[one.kwargs.get("chunk", 0)]
            found += chunk.inputs if isinstance(one, RecvActivation) else chunk.output_gradients
    return found


def _raised(segments: Sequence[Segment], nbytes: int) -> list[Segment]:
    return [
        replace(segment, peaks=[Held(held.total + nbytes, held.logits) for held in segment.peaks])
        for segment in segments
    ]


def _joined(passes: Sequence[Sequence[Segment]]) -> list[Segment]:
    """Return the segments of several passes one after another."""
    found: list[Segment] = []
    for segments in passes:
        before = len(found)
        found += [replace(one, until=one.until and one.until + before) for one in segments]
    return found


# ---- time ----------------------------------------------------------------------------------------


def in_stages(
    times: Sequence[StepTime],
    ranks: Sequence[PlannedRank],
    traces: Sequence[Sequence[ChunkTrace]],
    cluster: ComputeCluster,
) -> list[StepTime]:
    """Return the times of a pipeline's stages with their waits for each other, by the schedule.

    Args:
        times: of each stage alone.
        ranks: a rank of each stage.
        traces: the chunks of each.
        cluster: what devices and networks reach.
    """
    config, grid, count = ranks[0].config, _module(ranks[0]).mpu(), len(ranks)
    section, steps, chunks = config.pipeline, config.gradient_accumulation_steps, len(traces[0])
    orders = [order_of(section.schedule, steps, count, stage, chunks) for stage in range(count)]
    node = ranks[0].job.devices_per_node
    apart = grid.stage_to_global(count - 1) - grid.stage_to_global(0)
    is_inside = 2 * apart <= node * max(1, count - 1)
    link = cluster.with_ranks(node).links_of("bf16", 0 if is_inside else 1).all_to_all
    sent = [
        [nbytes for one in own for nbytes in (one.outputs, one.input_gradients) if nbytes]
        for own in traces
    ]
    seconds = [len(one) * link.latency + sum(one) / link.bandwidth for one in sent]
    each = [second / max(1, len(one)) for second, one in zip(seconds, sent, strict=True)]

    def cost(stage: int, kind: JobKind) -> float:
        return times[stage].passes[[*JobKind].index(kind)] / steps / chunks

    alone = max(end_times(orders, cost))
    together = max(end_times(orders, cost, max(each)))
    rest = max(time.seconds - sum(time.passes) for time in times)
    whole = together + rest
    found = []
    for time, own, one in zip(times, seconds, sent, strict=True):
        messages = PartTime(steps * own, together - alone, steps * sum(one))
        waits = whole - time.seconds - messages.exposed
        parts = {**time.parts, "messages": messages, "bubble": PartTime(waits, waits, 0)}
        utilization = time.utilization * time.seconds / whole
        found.append(replace(time, parts=parts, seconds=whole, utilization=utilization))
    return found
