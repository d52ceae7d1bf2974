"""State of one engine between its calls, which the engine shares with its collaborators."""

from __future__ import annotations

import math
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from functools import update_wrapper
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.optim import Optimizer

from hadal.checkpoint.live import COUNTERS, Live
from hadal.engine.clipping import watch_clipping
from hadal.engine.direct import DirectBackward
from hadal.engine.first_update import FirstUpdate
from hadal.engine.listeners import Listeners
from hadal.engine.other_optimizers import watch_optimizers
from hadal.engine.own_methods import follow_methods
from hadal.engine.parts import Counters, Cycle, Finding, Parts, Training
from hadal.engine.undecided import Undecided
from hadal.errors import UsageError
from hadal.optim.loss_scale import ScaleState, first_scale
from hadal.zero.regroup import renamed

_P = ParamSpec("_P")
_R = TypeVar("_R")


class Session:
    """Parts, counters and state of an engine between two updates."""

    direct: DirectBackward
    """Backwards that the caller starts."""

    def __init__(self, parts: Parts) -> None:
        self.parts = parts
        self._threads = threading.RLock()
        self.training: Training | None = None
        self.loader = parts.loader
        self.listeners = Listeners(parts.listeners)
        self.batches = parts.batches
        self.scale: ScaleState = first_scale(parts.scale_rule)
        self.counters = Counters()
        self.cycle = Cycle()
        self.listeners.add(FirstUpdate(self.listeners, self.batches, self.counters, parts))
        self.optimizer_trains = False
        """True: `train` was the last of the optimizer's own methods; again, it changes nothing."""
        self.undecided: Undecided | None = None
        """The last update, until the host knows whether the device has skipped it."""
        self.skipped: Undecided | None = None
        """The last update, if the device has skipped it and that is not reported yet."""
        if parts.training is not None:
            self.train_with(parts.training)

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Keep other threads out of the engine during the block.

        Raises:
            UsageError: another thread is inside.
        """
        if not self._threads.acquire(blocking=False):
            raise UsageError(
                f"rank {self.parts.ranks.rank}: thread {threading.current_thread().name!r} called"
                " the engine while another thread is in its forward, backward or step; let the"
                " threads take turns, in the same order on all ranks"
            )
        try:
            yield
        finally:
            self._threads.release()

    @property
    def optimizer(self) -> Optimizer | None:
        """The optimizer; None until there is something to train."""
        return self.training.optimizer if self.training else None

    def expect_alive(self) -> None:
        """Raise UsageError after `destroy`; end a forward or backward that was interrupted."""
        with self.alone():
            self._expect_alive()

    def _expect_alive(self) -> None:
        self.direct.end_left()
        if self.cycle.destroyed:
            raise UsageError("this engine was destroyed; use its module, or initialize again")
        if self.cycle.ended:
            raise UsageError(
                "this engine's training has ended (redundancy_clean does that), and it only"
                " evaluates; save engine.module, or initialize again with it to train on"
            )
        self.parts.runtime.expect_here()
        self.parts.hooks.end_left_over()

    def train_with(self, training: Training) -> None:
        """Set the optimizer; from now on only `engine.step` may step it."""
        self.training = training
        session, rank = weakref.ref(self), self.parts.ranks.rank

        def refuse(*_: Any) -> None:
            found = session()
            if found is not None and not found.cycle.stepping:
                raise UsageError(
                    f"rank {rank}: optimizer.step() was called by hand, which trains nothing: the"
                    " gradients and the weights are the engine's. Call engine.backward(loss) and"
                    " engine.step(), which steps the optimizer and the schedule"
                )

        training.optimizer.register_step_pre_hook(refuse)
        follow_methods(training.optimizer, self)
        watch_clipping(self)
        watch_optimizers()

    def expect_training(self) -> Training:
        """Return the training, made now if it was deferred until there is something to train."""
        if self.training is None:
            self.train_with(self.parts.make_training())
        assert self.training is not None
        return self.training

    def live(self) -> Live:
        """Return the state that a checkpoint saves or loads."""
        self.learn_of_skip()
        parts, training = self.parts, self.training
        # A program may have wrapped its parameters in other modules.
        names = {parameter: name for name, parameter in parts.model.named_parameters()}
        renamed(parts.runtime.buckets, names)
        part = parts.topology.model_parallel
        return Live(
            module=parts.model,
            runtime=parts.runtime,
            optimizer=self.optimizer,
            stepper=None if training is None else training.stepper,
            schedule=None if training is None else training.schedule,
            loader=self.loader,
            scalars={COUNTERS: asdict(self.counters), "scale": list(self.scale)},
            listeners={listener.name: listener for listener in self.listeners},
            world=parts.world,
            part=0 if part is None else part.rank,
            parts=parts.topology.model_parallel_size,
            rules=parts.saving,
        )

    @torch.no_grad()
    def whole_state(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Return a copy of the module's `state_dict`. All ranks must call it."""
        if not self.cycle.ended:
            self.expect_alive()
        runtime = self.parts.runtime
        with runtime.whole(() if self.cycle.ended else runtime.buckets):
            state = self.parts.model.state_dict(*args, **kwargs)
            return {
                name: value.detach().clone() if isinstance(value, Tensor) else value
                for name, value in state.items()
            }

    # ---- accumulation ----------------------------------------------------------------------------

    @property
    def is_boundary(self) -> bool:
        """True if the current micro-step ends in an update, as far as that is known."""
        if not self.batches.managed:
            return self.cycle.stepping
        if self.cycle.boundary is not None:
            return self.cycle.boundary
        return self.batches.ends_update(self.counters.micro_steps)

    @property
    def is_inside_accumulation(self) -> bool:
        """True if micro-steps of the current update have ended."""
        batches, micro_steps = self.batches, self.counters.micro_steps
        return batches.managed and micro_steps % batches.accumulation != 0

    def begin_accumulation(self) -> None:
        """Reset the count so that the next micro-step is the first of an update."""
        if self.batches.managed:
            self.counters.micro_steps = self.counters.global_steps * self.batches.accumulation

    # ---- the last update -------------------------------------------------------------------------

    @property
    def gradient_factor(self) -> float:
        """The factor in the gradients that wait for an update."""
        factor = self.cycle.factor
        return self.scale.scale if factor is None else factor

    def learn_of_skip(self) -> None:
        """Read whether the device has skipped the last update, and undo its side effects."""
        undecided, self.undecided = self.undecided, None
        if undecided is not None and undecided.was_skipped():
            undecided.undo()
            self.counters.skipped_steps += 1
            norm = None if undecided.found.measured is None else math.inf
            self.cycle.last = Finding(norm, overflow=True)
            self.skipped = undecided


def through(
    name: str, method: Callable[Concatenate[Any, _P], _R]
) -> Callable[Concatenate[Any, _P], _R]:
    """Return a method that calls `method` of the collaborator in attribute `name`."""

    def call(self: Any, /, *args: _P.args, **kwargs: _P.kwargs) -> _R:
        return method(getattr(self, name), *args, **kwargs)

    return update_wrapper(call, method)
