"""Parts and counters of an engine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hadal.checkpoint.live import Rules
from hadal.comm import Ranks
from hadal.config import Config
from hadal.data.loader import Loading, ShardedLoader
from hadal.device import HostCopy
from hadal.engine.batches import BatchSizes
from hadal.engine.casting import Casting
from hadal.engine.clocks import Clocks
from hadal.engine.tiers import Offloading
from hadal.engine.topology import Topology
from hadal.listener import Listener
from hadal.optim.loss_scale import ScaleRule
from hadal.optim.norm import RowNorms, clip_coefficient
from hadal.optim.step import OptimizerStepper
from hadal.optim.workspace import Multiplier
from hadal.plugins.monitor.monitor import Monitor
from hadal.zero.hooks import Hooks
from hadal.zero.runtime import ZeroRuntime


@dataclass(slots=True)
class Training:
    """Optimizer, schedule and stepper; absent until there is something to train."""

    optimizer: Optimizer
    schedule: Any
    stepper: OptimizerStepper


@dataclass(frozen=True, slots=True)
class Parts:
    """Parts of an engine. `assemble` reads the configuration; the engine does not."""

    model: nn.Module
    topology: Topology
    runtime: ZeroRuntime
    hooks: Hooks
    training: Training | None
    make_training: Callable[[], Training]
    casting: Casting
    scale_rule: ScaleRule
    skip_overflow: bool
    gradient_clipping: float
    computes_norm: bool
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
    holds_collector: bool
    offloading: Offloading
    config: Config

    @property
    def ranks(self) -> Ranks:
        """The ranks that share the model states."""
        return self.topology.sharding


@dataclass(slots=True)
class Counters:
    """Progress of training."""

    micro_steps: int = 0
    """Micro-steps, whether or not they ended in an update."""
    global_steps: int = 0
    """Boundaries reached, skipped updates included."""
    global_samples: int = 0
    """Samples consumed by all ranks."""
    skipped_steps: int = 0
    """Updates skipped because gradients were not finite."""


@dataclass(frozen=True, slots=True)
class Finding:
    """Norm and overflow of the gradients at a boundary."""

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
    """What else is not finite, as the end of a sentence."""
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


@dataclass(slots=True)
class Cycle:
    """State of the engine between two updates."""

    backwards: int = 0
    """Backwards since the last `engine.step`."""
    collected: int = 0
    """Backwards since the last update."""
    factor: float | None = None
    """The factor in the gradients of the current update; None before there are any."""
    scaled: Tensor | None = None
    """The loss that the caller has multiplied by the loss scale, for its own backward."""
    losses: list[Tensor] = field(default_factory=list)
    """Losses of the current update, detached, if they are known and there are listeners."""
    counts_refused: bool = False
    """True if the last backward was refused here alone, and its micro-step has ended."""
    stepping: bool = False
    """True while `engine.step` makes an update."""
    boundary: bool | None = None
    """The boundary as the caller set it, instead of the count."""
    unsynchronized: bool = False
    destroyed: bool = False
    ended: bool = False
    """True after `end_training`: the engine evaluates, and does nothing else."""
    skips_next: bool = False
    """True if the program wants the next update skipped."""
    last: Finding = field(default_factory=Finding)
    """The finding of the last boundary."""

    def begin_anew(self) -> None:
        """Forget the backwards since the last update."""
        self.backwards, self.collected, self.factor, self.losses = 0, 0, None, []
