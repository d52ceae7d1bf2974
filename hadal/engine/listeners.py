"""Listeners of one engine, what they are built from, and the mean gradients as they see them."""

from __future__ import annotations

import atexit
import logging
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.optim import Optimizer

from hadal.engine.clocks import Clocks
from hadal.engine.plan import ModelPlan
from hadal.engine.topology import RequestedRanks, Topology
from hadal.errors import UsageError
from hadal.listener import Forward, Listener, Options, Setting
from hadal.plugins.monitor.monitor import Monitor
from hadal.zero.runtime import ZeroRuntime
from hadal.zero.state import safe_get_full_grad

_log = logging.getLogger(__name__)


class Listeners:
    """Listeners in call order; as a context, it reports errors to them."""

    def __init__(self, listeners: Iterable[Listener] = ()) -> None:
        self._all = tuple(listeners)
        self._end = _EndOfProgram()
        for listener in self._all:
            self._end.add(listener)

    def add(self, listener: Listener) -> None:
        """Call one more from now on.

        Raises:
            UsageError: it is not a `Listener`, or there is one of this name.
        """
        if not isinstance(listener, Listener):
            raise UsageError(
                f"engine.add_listener expects a hadal.Listener, got {type(listener).__name__};"
                " derive its class from hadal.Listener"
            )
        if any(one.name == listener.name for one in self._all):
            raise UsageError(
                f"engine.add_listener: the engine has a listener named {listener.name!r}; set"
                " another `name` on the new one"
            )
        self._all = (*self._all, listener)
        self._end.add(listener)

    def remove(self, listener: Listener) -> None:
        """Stop calling it.

        Raises:
            UsageError: it is not among them.
        """
        if all(one is not listener for one in self._all):
            names = ", ".join(one.name for one in self._all if one.name[:1] != "_") or "none"
            raise UsageError(
                f"engine.remove_listener: {listener!r} is not a listener of this engine, which has"
                f" {names}"
            )
        self._all = tuple(one for one in self._all if one is not listener)
        self._end.drop(listener)

    def close(self) -> None:
        """Close them all: the engine is destroyed."""
        for listener in self._all:
            listener.close()
            self._end.drop(listener)

    def __iter__(self) -> Iterator[Listener]:
        return iter(self._all)

    def __bool__(self) -> bool:
        return bool(self._all)

    def __enter__(self) -> Listeners:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if error is not None:
            for listener in self._all:
                listener.on_error(error)

    def before_forward(self, forward: Forward) -> Forward:
        """Return the forward as changed by the listeners in turn."""
        for listener in self._all:
            forward = listener.before_forward(forward) or forward
        return forward


class _EndOfProgram:
    """Calls `at_exit` of the listeners that have it, in call order, and keeps them until then."""

    def __init__(self) -> None:
        self._process = os.getpid()
        self._all: list[Listener] = []

    def add(self, listener: Listener) -> None:
        if type(listener).at_exit is Listener.at_exit:
            return
        if not self._all:
            atexit.register(self._run)
        self._all.append(listener)

    def drop(self, listener: Listener) -> None:
        self._all = [one for one in self._all if one is not listener]
        if not self._all:
            atexit.unregister(self._run)

    def _run(self) -> None:
        if os.getpid() != self._process:
            return  # a forked process ends
        for listener in self._all:
            try:
                listener.at_exit()
            except Exception:
                _log.exception("listener %s failed at the end of the program", listener.name)


class MeanGradients(Mapping[str, Tensor]):
    """Mean gradients by full name, each gathered from all ranks on lookup."""

    def __init__(self, model: nn.Module, runtime: ZeroRuntime) -> None:
        self._model = model
        self._runtime = runtime

    def __getitem__(self, name: str) -> Tensor:
        mean = safe_get_full_grad(self._parameters()[name])
        if mean is None:
            raise KeyError(name)
        return mean

    def __iter__(self) -> Iterator[str]:
        return iter(self._parameters())

    def __len__(self) -> int:
        return len(self._parameters())

    def _parameters(self) -> dict[str, nn.Parameter]:
        buckets = self._runtime.bucket_of
        return {
            name: parameter
            for name, parameter in self._model.named_parameters()
            if parameter in buckets and buckets[parameter].trainable
        }


def options_of(optimizer: Optimizer | None) -> Options:
    """Return the current options of an optimizer's param groups."""
    groups: list[dict[str, Any]] = optimizer.param_groups if optimizer else []
    # A rate on the device is read later, when it may have changed. Some optimizers have none.
    rates = (group.get("lr", 0.0) for group in groups)
    return Options(
        tuple(rate.clone() if isinstance(rate, Tensor) else rate for rate in rates),
        tuple(_momentum_of(group) for group in groups),
    )


def _momentum_of(group: dict[str, Any]) -> Any:
    """Return the betas or the momentum of a param group: Muon's have both, and use one."""
    if group.get("use_muon"):
        return group["momentum"]
    return group.get("betas", group.get("momentum", 0.0))


class GivenArguments(NamedTuple):
    """Arguments of `initialize` from which a search plans other configurations."""

    model: nn.Module | None
    """A copy of the model before it was changed, on meta; None without a search."""
    ranks: RequestedRanks
    """The program's own groups."""
    optimizer: Optimizer | None
    """The optimizer; None if there is nothing to train."""


@dataclass(frozen=True, slots=True)
class EngineSetting(Setting):
    """Setting of the engine's own features."""

    topology: Topology
    clocks: Clocks
    monitor: Monitor
    plan: ModelPlan
    given: GivenArguments
