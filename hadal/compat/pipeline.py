"""The engine of a model in stages as programs see it, with instructions that they replace."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MethodType
from typing import Any, ClassVar, NoReturn

from hadal.compat.engine import DeepSpeedEngine
from hadal.compat.install import alias
from hadal.compat.log import logger
from hadal.engine import pipeline as engine
from hadal.errors import PipelineError
from hadal.plugins.pipeline import schedule
from hadal.plugins.pipeline.schedule import PipeInstruction, PipeSchedule

Action = Callable[..., Any]


def _action(kind: type[PipeInstruction]) -> Action:
    """Return the function of an instruction about a micro-batch."""

    def execute(self: PipelineEngine, buffer_id: int, **kwargs: Any) -> None:
        self._executor.act(kind(buffer_id=buffer_id, **kwargs))

    return execute


class PipelineEngine(engine.PipelineEngine, DeepSpeedEngine):
    """An engine of stages with the name and the methods of DeepSpeed's."""

    _micro_batches = 0

    @property
    def micro_batches(self) -> int:
        """The micro-batches of one update; programs set another number before `eval_batch`."""
        return self._micro_batches or self.gradient_accumulation_steps()

    @micro_batches.setter
    def micro_batches(self, count: int) -> None:
        self._micro_batches = 0 if count == self.gradient_accumulation_steps() else count

    @property
    def pipeline_parallelism(self) -> bool:
        """True: layers are distributed over ranks."""
        return True

    is_pipe_parallel = property(lambda self: self.num_stages > 1)
    """True if there are several stages."""
    is_data_parallel = property(lambda self: self.grid.data_parallel_size > 1)
    """True if several ranks have the same layers."""
    is_model_parallel = property(lambda self: self.grid.slice_parallel_size > 1)
    """True if several ranks have slices of the same layers."""

    def log_for_device(self, *msg: object) -> None:
        """Log a message with this stage's place, if debug messages are shown."""
        logger.debug(
            "RANK=%d PIPE-ID=%d DATA-ID=%d: %s",
            self.global_rank,
            self.stage_id,
            self.grid.data_parallel_id,
            " ".join(map(str, msg)),
        )

    def tput_log(self, *msg: object) -> None:
        """Log a message on rank 0, in updates that have a progress line."""
        if self.global_rank == 0 and self.global_steps % self.steps_per_print() == 0:
            logger.info("%s", " ".join(map(str, msg)))

    first_output_send = pipe_recv_buf = property(
        lambda self: None, lambda self, _: self.reset_activation_shape()
    )
    """Programs set both on all ranks before micro-batches of another shape."""

    # ---- instructions ----------------------------------------------------------------------------

    def _exec_optimizer_step(self, lr_kwargs: Mapping[str, Any] | None = None) -> None:
        """Average the gradients, and update the weights."""
        engine.PipelineEngine._update(self)

    def _exec_reduce_grads(self) -> None:
        """Do nothing: the update averages the gradients."""

    _exec_reduce_tied_grads = _exec_reduce_grads
    _exec_load_micro_batch = _action(schedule.LoadMicroBatch)
    _exec_forward_pass = _action(schedule.ForwardPass)
    _exec_backward_pass = _action(schedule.BackwardPass)
    _exec_send_activations = _action(schedule.SendActivation)
    _exec_recv_activations = _action(schedule.RecvActivation)
    _exec_send_grads = _action(schedule.SendGrad)
    _exec_recv_grads = _action(schedule.RecvGrad)

    _INSTRUCTION_MAP: ClassVar[dict[type[PipeInstruction], Action]] = {
        schedule.OptimizerStep: _exec_optimizer_step,
        schedule.ReduceGrads: _exec_reduce_grads,
        schedule.ReduceTiedGrads: _exec_reduce_tied_grads,
        schedule.LoadMicroBatch: _exec_load_micro_batch,
        schedule.ForwardPass: _exec_forward_pass,
        schedule.BackwardPass: _exec_backward_pass,
        schedule.SendActivation: _exec_send_activations,
        schedule.RecvActivation: _exec_recv_activations,
        schedule.SendGrad: _exec_send_grads,
        schedule.RecvGrad: _exec_recv_grads,
    }
    """The function of each instruction; a program's own runs in its place."""

    def _own_instructions(self) -> Mapping[type[PipeInstruction], Action]:
        changed = self._INSTRUCTION_MAP.items() - _OWN.items()
        return {kind: MethodType(action, self) for kind, action in changed if kind not in _AT_END}

    def _update(self) -> None:
        for kind in _AT_END:
            self._INSTRUCTION_MAP.get(kind, _OWN[kind])(self)

    def _training_steps(self) -> PipeSchedule:
        """Return the schedule; a class that the program put in its place is used."""
        chosen = alias("deepspeed.runtime.pipe.schedule").TrainSchedule
        is_own = chosen is not schedule.TrainSchedule
        # On all stages alike, also on those whose schedule lacks the instruction.
        for kind, action in self._INSTRUCTION_MAP.items():
            code = getattr(action, "__code__", None)
            runs = is_own or kind in _OWN
            if runs and code is not None and not _BUFFERS.isdisjoint(code.co_names):
                raise _without_buffers(f"{code.co_name}, the program's {kind.__name__}, uses")
        if not is_own:
            return super()._training_steps()
        made: PipeSchedule = chosen(
            micro_batches=self.micro_batches, stages=self.num_stages, stage_id=self.stage_id
        )
        return made

    @property
    def pipe_buffers(self) -> NoReturn:
        """Raise: the buffers of micro-batches are not accessible."""
        raise _without_buffers("the program uses")


def _without_buffers(who: str) -> PipelineError:
    return PipelineError(
        f"{who} the engine's pipe_buffers or grad_layer, which Hadal does not have: it stores"
        " micro-batches in its own form. An instruction of the program's own can call"
        " _exec_forward_pass(buffer_id) and its kin. For a zero-bubble schedule set"
        ' pipeline.schedule to "zero_bubble", and switch off the program\'s own'
    )


_BUFFERS = {"pipe_buffers", "grad_layer"}
_OWN = dict(PipelineEngine._INSTRUCTION_MAP)
_AT_END = (schedule.ReduceTiedGrads, schedule.ReduceGrads, schedule.OptimizerStep)
"""Instructions after the last micro-batch, which the schedules' loop leaves to the engine."""
