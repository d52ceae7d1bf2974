"""The steps of each stage of a pipeline, as lists of instructions.

Training is 1F1B (PipeDream-Flush, Narayanan et al. 2021): a stage alternates between the forward of
one micro-batch and the backward of an earlier one, so it stores the inputs of no more micro-batches
than there are stages from it on. Sends and receives of neighbours are ordered such that each may
block until its counterpart has started.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any

from hadal.errors import UsageError


class PipeInstruction:
    """One action of a stage; its arguments are attributes, too."""

    def __init__(self, **kwargs: Any) -> None:
        self.name = type(self).__name__
        self.kwargs = kwargs
        vars(self).update(kwargs)

    def __repr__(self) -> str:
        return f"{self.name}({', '.join(f'{key}={value!r}' for key, value in self.kwargs.items())})"


class OptimizerStep(PipeInstruction):
    """Update the weights, after all gradients were averaged."""


class ReduceGrads(PipeInstruction):
    """Average the gradients over the ranks of this stage."""


class ReduceTiedGrads(PipeInstruction):
    """Sum the gradients of weights that several stages share."""


class CommitP2P(PipeInstruction):
    """Start the sends and receives that were collected."""


class BufferOpInstruction(PipeInstruction):
    """An instruction about the micro-batch in one buffer."""

    buffer_id: int

    def __init__(self, buffer_id: int, **kwargs: Any) -> None:
        super().__init__(buffer_id=buffer_id, **kwargs)


class LoadMicroBatch(BufferOpInstruction):
    """Read a micro-batch: its inputs on the first stage, its labels on the last."""


class ForwardPass(BufferOpInstruction):
    """Compute the stage's output."""


class BackwardPass(BufferOpInstruction):
    """Compute the gradients of the stage's weights and of its input."""


class BackwardWeights(BufferOpInstruction):
    """Compute the gradients of the stage's weights that `BackwardPass` has left out."""


class SendActivation(BufferOpInstruction):
    """Send an output to the next stage."""


class RecvActivation(BufferOpInstruction):
    """Receive an input from the previous stage."""


class SendGrad(BufferOpInstruction):
    """Send the gradient of an input to the previous stage."""


class RecvGrad(BufferOpInstruction):
    """Receive the gradient of an output from the next stage."""


class PipeSchedule(ABC):
    """The steps of one stage. Iterating yields each step's list of instructions.

    Args:
        micro_batches: the number of micro-batches of one update.
        stages: the number of stages.
        stage_id: this stage, from 0.

    Raises:
        UsageError: there are no micro-batches, no stages or no such stage.
    """

    def __init__(self, micro_batches: int, stages: int, stage_id: int) -> None:
        if micro_batches < 1 or not 0 <= stage_id < stages:
            raise UsageError(
                f"{type(self).__name__} got {micro_batches} micro-batches for stage {stage_id} of"
                f" {stages}: expected at least one micro-batch, and a stage from 0 on"
            )
        self.micro_batches = micro_batches
        self.stages = stages
        self.stage_id = stage_id
        self.prev_stage = stage_id - 1
        self.next_stage = stage_id + 1

    @abstractmethod
    def steps(self) -> Iterator[list[PipeInstruction]]:
        """Yield the instructions of each step; none if this stage is idle in it."""

    def num_pipe_buffers(self) -> int:
        """Return how many micro-batches this stage stores at a time."""
        return self.micro_batches

    def __iter__(self) -> Iterator[list[PipeInstruction]]:
        return self.steps()

    @property
    def stage(self) -> int:
        """The number of this stage."""
        return self.stage_id

    @property
    def num_stages(self) -> int:
        """The number of stages."""
        return self.stages

    @property
    def num_micro_batches(self) -> int:
        """The number of micro-batches of one update."""
        return self.micro_batches

    @property
    def is_first_stage(self) -> bool:
        """Return True if no stage precedes this one."""
        return self.stage_id == 0

    @property
    def is_last_stage(self) -> bool:
        """Return True if no stage follows this one."""
        return self.stage_id == self.stages - 1

    # Programs whose `steps` replaces the one below call these.

    def _valid_stage(self, stage_id: int) -> bool:
        return 0 <= stage_id < self.stages

    def _valid_micro_batch(self, micro_batch_id: int) -> bool:
        return 0 <= micro_batch_id < self.micro_batches

    def _buffer_idx(self, micro_batch_id: int) -> int:
        return micro_batch_id % self.num_pipe_buffers()

    def _buffer(self, micro_batch: int) -> int | None:
        """Return the buffer of a micro-batch; None if there is no such micro-batch."""
        return self._buffer_idx(micro_batch) if self._valid_micro_batch(micro_batch) else None

    def _loads(self, buffer: int) -> list[PipeInstruction]:
        return [LoadMicroBatch(buffer)] if self.is_first_stage or self.is_last_stage else []


class TrainSchedule(PipeSchedule):
    """One update: in 2 * (micro-batches + stages - 1) steps, of which even stages and odd ones take
    turns with forwards and backwards."""

    def num_pipe_buffers(self) -> int:
        """Return how many micro-batches this stage stores at a time."""
        return max(2, min(self.stages - self.stage_id, self.micro_batches))

    def steps(self) -> Iterator[list[PipeInstruction]]:
        """Yield the instructions of each step."""
        total = 2 * (self.micro_batches + self.stages - 1)
        before = None
        for step in range(total):
            due, is_forward = self._step_to_micro_batch(step)
            buffer = self._buffer(due)
            make = self._forward if is_forward else self._backward
            instructions = make(buffer, before)
            if step == total - 1:
                instructions += [ReduceTiedGrads(), ReduceGrads(), OptimizerStep()]
            yield instructions
            before = buffer

    def _step_to_micro_batch(self, step_id: int) -> tuple[int, bool]:
        """Return the micro-batch that is due, which may not exist, and True for its forward."""
        if step_id % 2 == self.stage_id % 2:
            return step_id // 2 - self.stage_id // 2, True
        # The last stage starts backwards right after its first forward; each stage before it starts
        # one step later than the next one.
        return (step_id + self.stage_id + 1) // 2 - self.stages, False

    def _forward(self, buffer: int | None, before: int | None) -> list[PipeInstruction]:
        """Send the gradient of the step before, then compute an output."""
        found: list[PipeInstruction] = []
        if before is not None and not self.is_first_stage:
            found.append(SendGrad(before))
        if buffer is not None:
            if not self.is_first_stage:
                found.append(RecvActivation(buffer))
            found += [*self._loads(buffer), ForwardPass(buffer)]
        return found

    def _backward(self, buffer: int | None, before: int | None) -> list[PipeInstruction]:
        """Send the output of the step before, and compute gradients."""
        found: list[PipeInstruction] = []
        if buffer is not None and not self.is_last_stage:
            found.append(RecvGrad(buffer))
        if before is not None and not self.is_last_stage:
            found.append(SendActivation(before))
        if buffer is not None:
            found.append(BackwardPass(buffer))
        return found


class InferenceSchedule(PipeSchedule):
    """Only forwards: in micro-batches + stages - 1 steps, with two buffers."""

    def num_pipe_buffers(self) -> int:
        """Return 2: one is sent while the other is filled."""
        return 2

    def steps(self) -> Iterator[list[PipeInstruction]]:
        """Yield the instructions of each step."""
        before = None
        for step in range(self.micro_batches + self.stages - 1):
            buffer = self._buffer(step - self.stage_id)
            talks: list[PipeInstruction] = []
            if before is not None and not self.is_last_stage:
                talks.append(SendActivation(before))
            if buffer is not None and not self.is_first_stage:
                talks.append(RecvActivation(buffer))
            if self.stage_id % 2:
                talks.reverse()  # so that of two neighbours one sends while the other receives
            loads = [] if buffer is None else self._loads(buffer)
            computes = [] if buffer is None else [ForwardPass(buffer)]
            yield [*loads, *talks, *computes]
            before = buffer


class DataParallelSchedule(PipeSchedule):
    """One update without a pipeline: each micro-batch forward and backward, one after the other."""

    def num_pipe_buffers(self) -> int:
        """Return 1."""
        return 1

    def steps(self) -> Iterator[list[PipeInstruction]]:
        """Yield the instructions of each step."""
        for number in range(self.micro_batches):
            instructions = [LoadMicroBatch(0), ForwardPass(0), BackwardPass(0)]
            is_last = number == self.micro_batches - 1
            yield [*instructions, *([ReduceGrads(), OptimizerStep()] if is_last else [])]
