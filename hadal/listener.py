"""Listeners: callbacks of Hadal's features and of programs, called during training.

An engine calls each listener around every forward, backward and update. Values that the device is
still computing are read only on request.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from hadal.comm import Ranks
from hadal.config import Config
from hadal.device import HostCopy

Write = Callable[[Iterable[tuple[str, Any, int]]], None]
"""Writes scalars (name, value, samples so far) to the monitors."""


class Forward(NamedTuple):
    """Forward that is about to run. `_replace` makes a changed copy."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    updates: int
    """Updates before this forward, skipped ones included (`engine.global_steps`)."""
    micro_step: int
    """Backwards since the last update: 0 in the first micro-step."""
    is_training: bool
    """True if the module is in training mode."""

    @property
    def tokens(self) -> int:
        """The elements of `input_ids`: the entry of a batch that is a mapping, or a first argument
        that is a matrix of integers; 0 if there are none. If the model sees only the first tokens
        (`curriculum_seqlen`), only these count.
        """
        first = self.args[0] if self.args else None
        given = self.kwargs.get("input_ids")
        if given is None and isinstance(first, Mapping):
            given = first.get("input_ids")
        if given is None and isinstance(first, Tensor) and first.dtype == torch.int64:
            given = first if first.dim() == 2 else None
        if not isinstance(given, Tensor):
            return 0
        length = self.kwargs.get("curriculum_seqlen")
        return given.numel() if length is None else given[:, :length].numel()


class Options(NamedTuple):
    """Options of the optimizer's param groups, one value for each group."""

    rates: tuple[float | Tensor, ...]
    momenta: tuple[Any, ...]
    """Betas or momentum; 0.0 if the group has neither."""


class Times(Protocol):
    """Times of the phases of one update."""

    @property
    def is_reached(self) -> bool:
        """True if the device has finished them."""

    def milliseconds(self) -> Mapping[str, float]:
        """Return each phase's time by event name. Waits for the device."""


@dataclass(frozen=True, slots=True)
class Update:
    """Update that has just been made, or skipped.

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
    """True if the update was skipped, if the host decided that; else the device's flag."""
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
        """True if the weights were left unchanged, because gradients were not finite."""
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
        """True if `norm`, `skipped`, `rates` and `times` can be read without waiting."""
        readings = [one for one in (self.measured, self.overflowed) if isinstance(one, HostCopy)]
        is_timed = self.clocked is None or self.clocked.is_reached
        return is_timed and all(reading.is_over for reading in readings)


class Listener:
    """Callback in an engine's training; every method is optional.

    `engine.add_listener` adds one. Methods are called on the rank that added it, in the order in
    which listeners were added. An exception from a method ends the engine's call that it is in. A
    listener that changes inputs, or communicates with other ranks, must be added on all of them.
    """

    name: str = ""
    """The name in checkpoints and messages; by default that of the class."""

    def __init_subclass__(cls) -> None:
        # A name set in a base class stays.
        if cls.name in ("", *(base.__name__ for base in cls.__mro__)):
            cls.name = cls.__name__

    def on_attach(self, engine: Any) -> None:
        """Called when it is added to `engine`, of which it may keep a weak reference only."""

    def before_forward(self, forward: Forward) -> Forward | None:
        """Called before a forward, in training or evaluation. A returned Forward replaces it."""

    def after_forward(self, output: Any) -> None:
        """Called after a forward, with its `output`."""

    def loss_weight(self) -> float:
        """Return the factor of the loss in the backward that is about to run.

        Listeners whose factor is not 1.0 require `engine.backward`.
        """
        return 1.0

    def before_backward(self) -> None:
        """Called before a backward; if the caller runs it, at its first gradient."""

    def after_backward(self, loss: Tensor | None) -> None:
        """Called after a backward.

        Args:
            loss: this rank's loss, detached, on the device, without the loss scale and not divided
                by the micro-steps; None if the caller ran `loss.backward()` and the engine has not
                seen it.
        """

    def before_update(self, gradients: Mapping[str, Tensor]) -> None:
        """Called before an update, once the gradients are reduced.

        Args:
            gradients: maps a trained parameter's full name to its mean gradient over ranks and
                micro-steps, in fp32 and in the parameter's shape, without the loss scale and before
                clipping. A lookup is a collective: all ranks must make it, in the same order. It
                raises KeyError if there is no such parameter, or no gradient of it.
        """

    def after_update(self, update: Update) -> None:
        """Called after an update of weights and learning rate, or after it was skipped."""

    def after_save(self, folder: Any, seconds: float) -> None:
        """Called after a save to `folder`, or once it is under way (`checkpoint.async_save`).

        Args:
            folder: the checkpoint's directory, named after its tag, as a `Path`; or its URL as a
                `str`.
            seconds: the time that training waited for it.
        """

    def on_error(self, error: BaseException) -> None:
        """Called if a forward, backward or update raised `error`, instead of its `after_...`."""

    def close(self) -> None:
        """Flush and close files: the engine is destroyed."""

    def at_exit(self) -> None:
        """Called when the program ends, if the engine was not destroyed: finish files.

        It must not wait for other ranks or for the device. A listener that has this method stays
        alive until then, and keeps the engine by a weak reference only.
        """

    def state_dict(self) -> Mapping[str, Any] | None:
        """Return the state to save under `name` in a checkpoint: plain values; None for none.

        Called on all ranks at each save. Rank 0's state is saved.
        """

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from the result of `state_dict`. Not called if the checkpoint has none."""


@dataclass(frozen=True, slots=True)
class Setting:
    """An engine that is being made, as far as its features know it.

    The listener of a feature builds itself: `from_setting(section, setting)` of its class.
    """

    config: Config
    model: nn.Module
    device: torch.device
    world: Ranks
    sharding: Ranks
    """Ranks that average gradients."""
    data_parallel: Ranks
    """Ranks that see different samples."""
    sequence_parallel: Ranks | None
    """Ranks that share each sequence; None if none do."""
    model_parallel: Ranks | None
    """Ranks that hold parts of one model; None if every rank holds it all."""
    write_events: Write | None
    """The monitors' writer of scalars; None if no monitor is on."""
    forward: Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], Any]
    """Runs a module as the engine runs the model: inputs are cast, operations under autocast."""
    gathered: Callable[[Iterable[nn.Parameter]], AbstractContextManager[None]]
    """Returns a context in which parameters are whole. All ranks must enter it."""
    values: Any
    """Access to whole values of parameters, and to this rank's parts of them."""

    @property
    def write(self) -> Write | None:
        """The writer of scalars that DeepSpeed does not write; None without `monitor.extra`."""
        return self.write_events if self.config.monitor.extra else None

    @property
    def is_split(self) -> bool:
        """True if the model, or sequences, are split over several ranks."""
        return self.sequence_parallel is not None or self.model_parallel is not None
