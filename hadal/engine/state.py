"""The parts of an engine, which stay, and its state, which training changes."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hadal.checkpoint.background import Saver
from hadal.checkpoint.files import new_mark
from hadal.checkpoint.rules import Rules
from hadal.comm import Ranks
from hadal.config import Config
from hadal.data.loader import Loading, ShardedLoader
from hadal.device import Event, HostCopy, at_end_of_backward, is_in_backward, is_in_node
from hadal.engine.apply import ShardedModel
from hadal.engine.clocks import Clocks
from hadal.engine.graph_passes import Moves
from hadal.engine.listeners import Listeners
from hadal.engine.policies import BatchSizes
from hadal.engine.precision import Casting
from hadal.engine.topology import Topology
from hadal.errors import UsageError
from hadal.listener import Listener
from hadal.optim.norm import RowNorms, ScaleRule, ScaleState, clip_coefficient, first_scale
from hadal.optim.step import OptimizerStepper
from hadal.optim.workspace import Multiplier
from hadal.plugins.monitor.monitor import Monitor
from hadal.zero.hooks import Hooks
from hadal.zero.regroup import renamed
from hadal.zero.runtime import ZeroRuntime

if TYPE_CHECKING:
    from hadal.checkpoint.live import Live

_COUNTERS = ("micro_steps", "global_steps", "global_samples", "skipped_steps")


@dataclass(slots=True)
class Training:
    """Optimizer, schedule and stepper; absent until there is something to train."""

    optimizer: Optimizer
    schedule: Any
    stepper: OptimizerStepper


class Parts(NamedTuple):
    """Parts of an engine, made by `assemble` from the configuration."""

    model: nn.Module
    topology: Topology
    ranks: Ranks
    """The ranks that share the model states."""
    runtime: ZeroRuntime
    hooks: Hooks
    training: Training | None
    make_training: Callable[[], Training]
    casting: Casting
    scale_rule: ScaleRule
    skip_overflow: bool
    batches: BatchSizes
    clocks: Clocks
    monitor: Monitor
    listeners: tuple[Listener, ...]
    """Listeners that the configuration enables."""
    loader: ShardedLoader | None
    loading: Loading
    device: torch.device
    world: Ranks
    saving: Rules
    sharded: ShardedModel
    config: Config


class GradientCheck(NamedTuple):
    """Norm and overflow of the gradients of an update."""

    measured: float | HostCopy | None = None
    """Their L2 norm before clipping, on the host or on its way; None if it is not computed."""
    limit: float = 0.0
    """The norm to which they are clipped; 0: they are not."""
    clip_on_device: Tensor | None = None
    """The factor that clips them, if the host does not know it yet."""
    overflowed: Tensor | None = None
    """True on the device if they are not finite; set if the device decides by it."""
    rows: RowNorms | None = None
    """Norms in which the host then finds the parameter."""
    overflow: bool = False
    """True if the update is skipped because they are not finite, as far as the host knows."""
    culprit: str | None = None
    """The full name of the first parameter whose gradient overflowed; None: just the norm did."""
    sources: str = ""
    """The end of a sentence about values that are not finite."""
    is_asked: bool = False
    """True if the program asked to skip the update."""

    @property
    def norm(self) -> float | None:
        """Their L2 norm before clipping, infinite if they overflowed; None if not computed."""
        if isinstance(self.measured, HostCopy):
            return float(self.measured.values())
        return self.measured

    @property
    def clip(self) -> float:
        """The factor that clips them."""
        norm = self.norm if self.limit else None
        return 1.0 if norm is None else clip_coefficient(norm, self.limit)

    def multiplier(self, factor: float) -> Multiplier:
        """Return the factor of an update's gradients, which are `factor` times too large."""
        clip = self.clip if self.clip_on_device is None else self.clip_on_device
        return clip / factor


class PendingUpdate(NamedTuple):
    """Update that the device may have skipped; the host does not know yet."""

    number: int
    """The number of the update (from 0)."""
    check: GradientCheck
    overflowed: HostCopy
    """Above 0 if it was skipped; all ranks find the same."""
    undo: Callable[[], None]
    """Undoes the step of the schedule."""
    losses: Sequence[Tensor]


class LossBackward:
    """A backward that the caller starts, `loss.backward()`, instead of `engine.backward(loss)`.

    It begins with the first gradient that reaches a trained parameter, and ends with torch's
    backward. Each runs inside the context `around`.
    """

    def __init__(
        self, around: Callable[[], AbstractContextManager[None]], runtime: ZeroRuntime
    ) -> None:
        self._around = around
        self._runtime = runtime
        self._stack: ExitStack | None = None
        self._is_through = False
        runtime.begins = self._begin

    def _begin(self) -> None:
        self.end_left()
        stack = ExitStack()
        self._runtime.is_direct = True
        try:
            stack.enter_context(self._around())
        except BaseException:
            self._runtime.is_direct = False
            raise
        self._stack, self._is_through = stack, False
        at_end_of_backward(self._end)

    def _end(self) -> None:
        # The inner backward of a reentrant recomputation ends before the outer one does.
        self._is_through = True
        if not is_in_node():
            self._close(None)

    def end_left(self) -> None:
        """End a backward that is over or has raised: torch does not report it."""
        if self._stack is not None and not is_in_backward():
            self._close(None if self._is_through else RuntimeError("the backward has raised"))

    def _close(self, error: BaseException | None) -> None:
        stack, self._stack = self._stack, None
        if stack is None:
            return
        try:
            if error is None:
                stack.close()
            else:
                stack.__exit__(type(error), error, None)
        finally:
            self._runtime.is_direct = False


class MovedStorage(NamedTuple):
    """Device memory that `offload_states` has released."""

    whole: Tensor
    """All of a storage, as bytes."""
    contents: Tensor
    """Its contents in host memory."""
    event: Event
    """Completed once `contents` is valid."""
    pinned: bool
    """True if the host memory is pinned."""


@dataclass(eq=False)
class State:
    """Everything that changes in an engine once it is made."""

    parts: Parts
    batches: BatchSizes = field(init=False)
    loader: ShardedLoader | None = field(init=False)
    """The training loader, whose position checkpoints save."""
    listeners: Listeners = field(init=False)
    loss_backward: LossBackward = field(init=False)
    """Backwards that the caller starts."""
    scale: ScaleState = field(init=False)
    """The loss scale."""
    training: Training | None = None
    optimizer_trains: bool = False
    """True: `train` was the last of the optimizer's own methods; again, it changes nothing."""

    # ---- counters, in checkpoints ----------------------------------------------------------------

    micro_steps: int = 0
    """Micro-steps, whether or not they ended in an update."""
    global_steps: int = 0
    """Boundaries reached, skipped updates included."""
    global_samples: int = 0
    """Samples consumed by all ranks."""
    skipped_steps: int = 0
    """Updates skipped because gradients were not finite."""

    # ---- the update under way --------------------------------------------------------------------

    backwards: int = 0
    """Backwards since the last `engine.step`."""
    collected: int = 0
    """Backwards since the last update."""
    factor: float | None = None
    """The factor in the gradients of the current update; None before there are any."""
    scaled: Tensor | None = None
    """The loss that the caller has multiplied by the loss scale, for its own backward."""
    losses: list[Tensor] = field(default_factory=list)
    """Losses of the current update, detached, if they are known."""
    stepping: bool = False
    """True while `engine.step` makes an update."""
    boundary: bool | None = None
    """The boundary as the caller set it, instead of the count."""
    unsynchronized: bool = False
    """True inside `engine.no_sync`."""
    skips_next: bool = False
    """True if the program wants the next update skipped."""

    # ---- the last update -------------------------------------------------------------------------

    last: GradientCheck = field(default_factory=GradientCheck)
    pending: PendingUpdate | None = None
    """The last update, until the host knows whether the device has skipped it."""
    skipped: PendingUpdate | None = None
    """The last update, if the device has skipped it and that is not reported yet."""

    # ---- checkpoints, memory, end ----------------------------------------------------------------

    saver: Saver = field(init=False)
    jobs: tuple[str, ...] = field(default_factory=lambda: (new_mark(),))
    """The jobs whose checkpoints this one may remove: itself, and those it has resumed from."""
    resumed: tuple[str | None, dict[str, Any] | None] = None, None
    """The directory and `client_state` loaded by `checkpoint.resume`."""
    has_logged_residuals: bool = False
    """True if the log says that checkpoints reset error feedback."""
    moved: list[MovedStorage] = field(default_factory=list)
    """Device memory whose contents `offload_states` keeps."""
    moves: Moves | None = None
    """Whether the optimizer's state leaves the device for forward and backward, by update; None: as
    the section `compile` says."""
    host_memory: list[tuple[Tensor, Event]] = field(default_factory=list)
    """Pinned buffers kept for reuse; each is free once its event has completed."""
    destroyed: bool = False
    ended: bool = False
    """True after `end_training`: the engine evaluates, and does nothing else."""

    def __post_init__(self) -> None:
        parts = self.parts
        self.batches, self.loader = parts.batches, parts.loader
        self.listeners = Listeners(parts.listeners)
        self.scale = first_scale(parts.scale_rule)
        self.saver = Saver(parts.world)
        self._thread = threading.RLock()

    # ---- use -------------------------------------------------------------------------------------

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Keep other threads out of the engine during the block.

        Raises:
            UsageError: another thread is inside.
        """
        if not self._thread.acquire(blocking=False):
            raise UsageError(
                f"rank {self.parts.ranks.rank}: thread {threading.current_thread().name!r} called"
                " the engine while another thread is in its forward, backward or step; let the"
                " threads take turns, in the same order on all ranks"
            )
        try:
            yield
        finally:
            self._thread.release()

    def expect_alive(self, *, in_pass: bool = False) -> None:
        """Raise UsageError after `destroy`; end a forward or backward that was interrupted.

        States that are away for forward and backward come back, unless it is called `in_pass`.
        """
        with self.alone():
            self.loss_backward.end_left()
            if self.destroyed:
                raise UsageError("this engine was destroyed; use its module, or initialize again")
            if self.ended:
                raise UsageError(
                    "this engine's training has ended (redundancy_clean does that), and it only"
                    " evaluates; save engine.module, or initialize again with it to train on"
                )
            self.parts.runtime.expect_here(in_pass=in_pass)
            self.parts.hooks.end_left_over()

    @property
    def optimizer(self) -> Optimizer | None:
        """The optimizer; None until there is something to train."""
        return self.training.optimizer if self.training else None

    # ---- accumulation ----------------------------------------------------------------------------

    @property
    def is_boundary(self) -> bool:
        """True if the current micro-step ends in an update, as far as that is known."""
        if not self.batches.managed:
            return self.stepping
        if self.boundary is not None:
            return self.boundary
        return self.batches.ends_update(self.micro_steps)

    @property
    def is_inside_accumulation(self) -> bool:
        """True if micro-steps of the current update have ended."""
        return self.batches.managed and self.micro_steps % self.batches.accumulation != 0

    def begin_accumulation(self) -> None:
        """Reset the count so that the next micro-step is the first of an update."""
        if self.batches.managed:
            self.micro_steps = self.global_steps * self.batches.accumulation

    def forget_backwards(self) -> None:
        """Forget the backwards since the last update."""
        self.backwards, self.collected, self.factor, self.losses = 0, 0, None, []

    # ---- the last update -------------------------------------------------------------------------

    @property
    def gradient_factor(self) -> float:
        """The factor in the gradients that wait for an update."""
        return self.scale.scale if self.factor is None else self.factor

    def learn_of_skip(self) -> None:
        """Read whether the device has skipped the last update, and undo its side effects."""
        pending, self.pending = self.pending, None
        if pending is not None and bool(pending.overflowed.values() > 0):
            pending.undo()
            self.skipped_steps += 1
            norm = None if pending.check.measured is None else math.inf
            self.last = GradientCheck(norm, overflow=True)
            self.skipped = pending

    # ---- what is saved ---------------------------------------------------------------------------

    def live(self) -> Live:
        """Return the state that a checkpoint saves or loads."""
        from hadal.checkpoint.live import COUNTERS, Live  # for this alone

        self.learn_of_skip()
        parts, training = self.parts, self.training
        # A program may have wrapped its parameters in other modules.
        names = {parameter: name for name, parameter in parts.model.named_parameters()}
        renamed(parts.runtime.buckets, names)
        part = parts.topology.model_parallel
        counters = {name: getattr(self, name) for name in _COUNTERS}
        return Live(
            module=parts.model,
            runtime=parts.runtime,
            optimizer=self.optimizer,
            stepper=None if training is None else training.stepper,
            schedule=None if training is None else training.schedule,
            loader=self.loader,
            scalars={COUNTERS: counters, "scale": list(self.scale)},
            listeners={listener.name: listener for listener in self.listeners},
            world=parts.world,
            part=0 if part is None else part.rank,
            parts=parts.topology.model_parallel_size,
            rules=parts.saving,
        )

    def resume_counters(self, saved: Mapping[str, int]) -> None:
        """Continue from saved counters. Those that an older version did not save begin at 0."""
        for name in _COUNTERS:
            setattr(self, name, saved.get(name, 0))

    @torch.no_grad()
    def whole_state(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Return a copy of the module's `state_dict`. All ranks must call it."""
        if not self.ended:
            self.expect_alive()
        runtime = self.parts.runtime
        with runtime.whole(() if self.ended else runtime.buckets):
            state = self.parts.model.state_dict(*args, **kwargs)
            return {
                name: value.detach().clone() if isinstance(value, Tensor) else value
                for name, value in state.items()
            }
