"""Listeners: how a feature, or a program's own callback, takes part in training.

An engine calls each listener around every forward, backward and update. Nothing here reads the
device: a value that is still being computed there is read when somebody asks for it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from hadal.device import HostCopy


class Forward(NamedTuple):
    """A forward that is about to run. `_replace` makes a changed copy."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    updates: int
    """Updates before this forward, skipped ones included (`engine.global_steps`)."""
    micro_step: int
    """Backwards since the last update: 0 in the first micro-step."""
    is_training: bool
    """Whether the module is in training mode."""


class Options(NamedTuple):
    """Options of the optimizer's param groups, one value for each group."""

    rates: tuple[float | Tensor, ...]
    momenta: tuple[Any, ...]
    """Betas or momentum; 0.0 if the group has neither."""


class Times(Protocol):
    """How long the phases of one update took."""

    @property
    def is_reached(self) -> bool:
        """Whether the device has finished them."""

    def milliseconds(self) -> Mapping[str, float]:
        """The time of each phase by event name. Waits for the device."""


@dataclass(frozen=True, slots=True)
class Update:
    """An update that has just been made, or skipped.

    On an accelerator `norm`, `skipped`, `rates` and `times` may wait for the device. A listener
    that must not wait keeps the record, and reads it once `is_known` is true.
    """

    number: int
    """Updates so far, this one included, skipped ones too (`engine.global_steps`)."""
    samples: int
    """Samples of this update on all ranks."""
    total_samples: int
    """Samples so far on all ranks (`engine.global_samples`)."""
    micro_steps: int
    """Backwards of this update."""
    losses: tuple[Tensor, ...]
    """This rank's losses as given to `engine.backward`, detached, on the device.

    A loss that the caller ran `backward` on is known only through `engine.scale(loss)`.
    """
    scale: float
    """The loss scale from now on; 1.0 without fp16."""
    measured: float | HostCopy | None
    """The gradients' norm on the host, or on its way there; None if it is not computed."""
    overflowed: bool | HostCopy
    """Whether the update was skipped, if the host decided that; else the device's flag."""
    options: Options
    """The param groups' options after the schedule's step."""
    options_if_skipped: Options
    """The param groups' options if the device turns out to have skipped the update."""
    skipped_before: int
    """Updates skipped before this one."""
    clocked: Times | None
    """The phases' times; None if they are not measured."""

    @property
    def loss(self) -> Tensor | None:
        """The mean of `losses`, a 0-dim tensor on the device; None if not all are known."""
        if not self.losses or len(self.losses) != self.micro_steps:
            return None
        wide = [loss.to(torch.promote_types(loss.dtype, torch.float32)) for loss in self.losses]
        return torch.stack([loss.reshape(()) for loss in wide]).mean()

    @property
    def norm(self) -> float | None:
        """The L2 norm of the mean gradients before clipping; infinite if they overflowed."""
        value = self.measured
        if isinstance(value, HostCopy):
            value = float(value.values())
        return math.inf if value is not None and math.isnan(value) else value

    @property
    def skipped(self) -> bool:
        """Whether the weights were left as they were, because gradients were not finite."""
        if isinstance(self.overflowed, HostCopy):
            return bool(self.overflowed.values() > 0)
        return self.overflowed

    @property
    def skipped_updates(self) -> int:
        """Updates skipped so far, this one included (`engine.skipped_steps`)."""
        return self.skipped_before + self.skipped

    @property
    def rates(self) -> tuple[float, ...]:
        """The learning rate of each param group, after the schedule's step."""
        return tuple(map(float, self._options.rates))

    @property
    def momenta(self) -> tuple[Any, ...]:
        """The betas, or the momentum, of each param group; 0.0 if it has neither."""
        return self._options.momenta

    @property
    def _options(self) -> Options:
        is_sure = self.options is self.options_if_skipped
        return self.options if is_sure or not self.skipped else self.options_if_skipped

    @property
    def times(self) -> Mapping[str, float]:
        """Milliseconds by event name, as `engine.wall_clock_times`; empty if not measured."""
        return {} if self.clocked is None else self.clocked.milliseconds()

    @property
    def is_known(self) -> bool:
        """Whether `norm`, `skipped`, `rates` and `times` can be read without waiting."""
        readings = [one for one in (self.measured, self.overflowed) if isinstance(one, HostCopy)]
        is_timed = self.clocked is None or self.clocked.is_reached
        return is_timed and all(reading.is_over for reading in readings)


class Listener:
    """Takes part in an engine's training; every method may be left out.

    `engine.add_listener` adds one. Methods are called on the rank that added it, in the order in
    which listeners were added. What a method raises ends the call of the engine that it is in. A
    listener that changes inputs, or that talks to other ranks, must be added on all of them.
    """

    name: str = ""
    """The name in checkpoints and messages; by default that of the class."""

    def __init_subclass__(cls) -> None:
        # A name that a class above was given stays.
        if cls.name in ("", *(base.__name__ for base in cls.__mro__)):
            cls.name = cls.__name__

    def before_forward(self, forward: Forward) -> Forward | None:
        """A forward begins, in training or evaluation. A returned one takes its place."""

    def after_forward(self, output: Any) -> None:
        """The forward has returned `output`."""

    def before_backward(self) -> None:
        """A backward begins. If the caller runs it, this comes with its first gradient."""

    def after_backward(self, loss: Tensor | None) -> None:
        """The backward is over.

        Args:
            loss: this rank's loss, detached, on the device, without the loss scale and not divided
                by the micro-steps; None if the caller ran `loss.backward()` and the engine has not
                seen it.
        """

    def before_update(self, gradients: Mapping[str, Tensor]) -> None:
        """The gradients are reduced, and the update begins.

        Args:
            gradients: by a trained parameter's full name, the mean gradient over ranks and
                micro-steps, in fp32 and in the parameter's shape, without the loss scale and before
                clipping. Looking one up is a collective: all ranks must, in the same order. It
                raises KeyError if there is no such parameter, or no gradient of it.
        """

    def after_update(self, update: Update) -> None:
        """The weights and the learning rate were updated, or the update was skipped."""

    def on_error(self, error: BaseException) -> None:
        """A forward, backward or update raised `error`, so its `after_...` does not come."""

    def close(self) -> None:
        """The engine is destroyed: write what is still to be written, close files."""

    def state_dict(self) -> Mapping[str, Any] | None:
        """The state that a checkpoint keeps under `name`: plain values; None for none.

        Called on all ranks at each save. Rank 0's state is saved.
        """

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` returned. Not called if the checkpoint has none."""
