"""The order of each stage's computations, in schedules that DeepSpeed does not have.

- "gpipe" (Huang et al. 2019): all forwards, then all backwards.
- "interleaved" (Narayanan et al. 2021): a stage has several chunks of the model, so the pipeline
  fills that many times faster; micro-batches run in groups as large as the number of stages.
- "zero_bubble" (ZB-H1, Qi et al. 2024): a backward has two parts. The gradients of weights are
  computed while the stage would otherwise wait, so the next stage gets its gradient sooner.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import Enum
from typing import NamedTuple

from hadal.errors import UsageError
from hadal.plugins.pipeline.schedule import (
    BackwardPass,
    BackwardWeights,
    BufferOpInstruction,
    ForwardPass,
    LoadMicroBatch,
    OptimizerStep,
    PipeInstruction,
    PipeSchedule,
    RecvActivation,
    RecvGrad,
    ReduceGrads,
    ReduceTiedGrads,
    SendActivation,
    SendGrad,
    TrainSchedule,
)


class JobKind(Enum):
    """A computation of a micro-batch."""

    FORWARD = "F"
    BACKWARD = "B"
    """The gradients of the input, and of the weights unless the schedule separates them."""
    WEIGHTS = "W"
    """The gradients of the weights."""


class StageJob(NamedTuple):
    """One computation of a stage."""

    kind: JobKind
    micro_batch: int
    chunk: int = 0
    """Index among this stage's chunks."""


Order = Sequence[StageJob]


def gpipe_order(micro_batches: int, stages: int, stage: int) -> Order:
    """Return all forwards, then all backwards."""
    return _jobs(JobKind.FORWARD, micro_batches) + _jobs(JobKind.BACKWARD, micro_batches)


def one_forward_one_backward_order(micro_batches: int, stages: int, stage: int) -> Order:
    """Return the order of `TrainSchedule` (1F1B)."""
    ahead = min(stages - stage, micro_batches)
    return _alternating(
        _jobs(JobKind.FORWARD, micro_batches), _jobs(JobKind.BACKWARD, micro_batches), ahead
    )


def interleaved_order(micro_batches: int, stages: int, stage: int, chunks: int) -> Order:
    """Return 1F1B over chunks of the model; `stages` divides `micro_batches`."""
    forwards = _in_turns(JobKind.FORWARD, micro_batches, stages, range(chunks))
    backwards = _in_turns(JobKind.BACKWARD, micro_batches, stages, range(chunks)[::-1])
    ahead = 2 * (stages - stage - 1) + (chunks - 1) * stages + 1
    return _alternating(forwards, backwards, min(ahead, len(forwards)))


def zero_bubble_order(micro_batches: int, stages: int, stage: int) -> Order:
    """Return 1F1B with the gradients of weights delayed by one backward per preceding stage."""
    found: list[StageJob] = []
    for job in one_forward_one_backward_order(micro_batches, stages, stage):
        found.append(job)
        if job.kind is JobKind.BACKWARD and job.micro_batch >= stage:
            found.append(StageJob(JobKind.WEIGHTS, job.micro_batch - stage))
    left = range(max(0, micro_batches - stage), micro_batches)
    return [*found, *(StageJob(JobKind.WEIGHTS, number) for number in left)]


def _jobs(kind: JobKind, micro_batches: int) -> list[StageJob]:
    return [StageJob(kind, number) for number in range(micro_batches)]


def _in_turns(
    kind: JobKind, micro_batches: int, size: int, chunks: Sequence[int]
) -> list[StageJob]:
    """Return groups of `size` micro-batches, each through all chunks before the next group."""
    return [
        StageJob(kind, number, chunk)
        for start in range(0, micro_batches, size)
        for chunk in chunks
        for number in range(start, min(start + size, micro_batches))
    ]


def _alternating(forwards: Order, backwards: Order, ahead: int) -> Order:
    """Return this many forwards, then alternate a backward and a forward."""
    found = list(forwards[:ahead])
    left = iter(forwards[ahead:])
    for job in backwards:
        found.append(job)
        found.extend([following] if (following := next(left, None)) else [])
    return found


class OrderedSchedule(PipeSchedule):
    """The instructions of one stage that computes in a given order.

    Args:
        micro_batches, stages, stage_id: as in every schedule.
        order: the stage's computations.
        chunks: the stage's chunks of the model.
    """

    def __init__(
        self, micro_batches: int, stages: int, stage_id: int, order: Order, chunks: int = 1
    ) -> None:
        super().__init__(micro_batches, stages, stage_id)
        self._order, self._chunks = order, chunks
        self._buffers = max(2, _most_at_a_time(order))

    def num_pipe_buffers(self) -> int:
        """Return how many micro-batches this stage stores at a time, for each chunk."""
        return self._buffers

    def steps(self) -> Iterator[list[PipeInstruction]]:
        """Yield the instructions of each computation."""
        for number, job in enumerate(self._order):
            found = self._instructions(job)
            if number == len(self._order) - 1 and job.kind is not JobKind.FORWARD:
                found += [ReduceTiedGrads(), ReduceGrads(), OptimizerStep()]
            yield found

    def _instructions(self, job: StageJob) -> list[PipeInstruction]:
        is_first = self.is_first_stage and job.chunk == 0
        is_last = self.is_last_stage and job.chunk == self._chunks - 1
        kinds = _kinds(job.kind, is_first=is_first, is_last=is_last)
        chunk = {"chunk": job.chunk} if job.chunk else {}
        return [kind(job.micro_batch % self._buffers, **chunk) for kind in kinds]


def _kinds(kind: JobKind, *, is_first: bool, is_last: bool) -> Iterator[type[BufferOpInstruction]]:
    """Yield the instructions of a computation of the model's first, last or another chunk."""
    if kind is JobKind.WEIGHTS:
        yield BackwardWeights
    elif kind is JobKind.FORWARD:
        if not is_first:
            yield RecvActivation
        if is_first or is_last:
            yield LoadMicroBatch
        yield ForwardPass
        if not is_last:
            yield SendActivation
    else:
        if not is_last:
            yield RecvGrad
        yield BackwardPass
        if not is_first:
            yield SendGrad


def _most_at_a_time(order: Order) -> int:
    """Return how many micro-batches of one chunk are between their first and last computation."""
    last = {(job.chunk, job.micro_batch): number for number, job in enumerate(order)}
    alive: dict[int, int] = {}
    most = 0
    for number, job in enumerate(order):
        if job.kind is JobKind.FORWARD:
            alive[job.chunk] = alive.get(job.chunk, 0) + 1
            most = max(most, alive[job.chunk])
        if last[job.chunk, job.micro_batch] == number:
            alive[job.chunk] -= 1
    return most


def order_of(schedule: str, micro_batches: int, stages: int, stage: int, chunks: int = 1) -> Order:
    """Return a stage's computations by the schedule's name."""
    if schedule == "interleaved":
        return interleaved_order(micro_batches, stages, stage, chunks)
    orders = {
        "1f1b": one_forward_one_backward_order,
        "gpipe": gpipe_order,
        "zero_bubble": zero_bubble_order,
    }
    return orders[schedule](micro_batches, stages, stage)


def training_schedule(
    name: str, micro_batches: int, stages: int, stage: int, chunks: int = 1
) -> PipeSchedule:
    """Return a stage's schedule of one update by its name."""
    if name == "1f1b":
        return TrainSchedule(micro_batches, stages, stage)
    order = order_of(name, micro_batches, stages, stage, chunks)
    return OrderedSchedule(micro_batches, stages, stage, order, chunks)


def check_schedule(schedule: str, micro_batches: int, stages: int) -> None:
    """Raise `UsageError` if a schedule cannot run this number of micro-batches."""
    if schedule == "interleaved" and micro_batches % stages:
        raise UsageError(
            f"gradient_accumulation_steps is {micro_batches}, but pipeline.schedule is"
            f" 'interleaved', which runs groups of {stages} micro-batches, one for each stage:"
            f" choose a multiple of {stages}, or another schedule"
        )


def forward_order(micro_batches: int, stages: int, chunks: int) -> Order:
    """Return only forwards, of several chunks."""
    return _in_turns(JobKind.FORWARD, micro_batches, stages, range(chunks))


def idle_share(orders: Sequence[Order], cost: Mapping[JobKind, float] = {}) -> float:
    """Return the fraction of time that stages spend waiting (the bubble).

    Args:
        orders: of all stages, the first one first.
        cost: the time of each computation of a chunk; by default a backward takes twice as long as
            a forward, and each of its parts half of that if they are separate.

    Raises:
        ValueError: the stages wait for each other in a circle.
    """
    apart = any(job.kind is JobKind.WEIGHTS for order in orders for job in order)
    usual = {JobKind.FORWARD: 1.0, JobKind.BACKWARD: 1.0 if apart else 2.0, JobKind.WEIGHTS: 1.0}
    times = {**usual, **cost}
    busy = sum(times[job.kind] for order in orders for job in order)
    return 1 - busy / (len(orders) * max(end_times(orders, lambda _, kind: times[kind])))


def end_times(
    orders: Sequence[Order], cost: Callable[[int, JobKind], float], message: float = 0.0
) -> list[float]:
    """Return when each stage has done its last computation.

    Args:
        orders: of all stages, the first one first.
        cost: returns the time of a stage's computation.
        message: the time from the end of a computation until the next stage has its result.

    Raises:
        ValueError: the stages wait for each other in a circle.
    """
    stages, chunks = len(orders), 1 + max(job.chunk for order in orders for job in order)
    last = stages * chunks - 1
    todo = [deque(order) for order in orders]
    clocks, ends = [0.0] * stages, dict[tuple[JobKind, int, int], float]()
    while any(todo):
        has_moved = False
        for stage, jobs in enumerate(todo):
            while jobs:
                kind, number, chunk = jobs[0]
                place = chunk * stages + stage
                ready = _ready(ends, kind, number, place, last, message)
                if ready is None:
                    break
                clocks[stage] = max(clocks[stage], ready) + cost(stage, kind)
                ends[kind, number, place] = clocks[stage]
                jobs.popleft()
                has_moved = True
        if not has_moved:
            raise ValueError(f"stages wait for each other: {[jobs[0] for jobs in todo if jobs]}")
    return clocks


def _ready(
    ends: Mapping[tuple[JobKind, int, int], float],
    kind: JobKind,
    number: int,
    place: int,
    last: int,
    message: float,
) -> float | None:
    """Return when a computation may begin; None: not known yet."""
    if kind is JobKind.FORWARD:
        sent = -message if place == 0 else ends.get((kind, number, place - 1))
        return None if sent is None else sent + message
    if kind is JobKind.WEIGHTS:
        return ends.get((JobKind.BACKWARD, number, place))
    own = ends.get((JobKind.FORWARD, number, place))
    received = own if place == last else ends.get((kind, number, place + 1))
    if own is None or received is None:
        return None
    return own if place == last else max(own, received + message)
