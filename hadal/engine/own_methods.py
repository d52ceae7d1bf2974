"""Methods that optimizers add, such as `eval` of schedule-free ones: weights follow them."""

from __future__ import annotations

import inspect
import logging
import weakref
from collections.abc import Callable, Iterator
from functools import partial, update_wrapper
from typing import TYPE_CHECKING, Any

import torch
from torch.optim import Optimizer

from hadal.errors import UsageError, few
from hadal.zero.agreement import Marker

if TYPE_CHECKING:
    from hadal.engine.session import Session

_log = logging.getLogger(__name__)

_Method = Callable[..., Any]


def follow_methods(optimizer: Optimizer, session: Session) -> None:
    """Make the weights follow the public methods that an optimizer's class adds to torch's.

    The tensors in its param groups are masters, or whole parameters on the ranks that own them.
    Writes to them cannot all be seen, so weights are refreshed after each such method, as after an
    update, and all ranks must call it. Only those called `get...` are taken to write nothing, and
    another `train` after `train`: the Trainer calls it before each forward. Assignments to
    properties cannot be followed, which is logged.
    """
    for name, method in _own_methods(type(optimizer)):
        setattr(optimizer, name, _followed(name, method, optimizer, session))
    setters = _own_setters(type(optimizer))
    if setters and session.parts.ranks.rank == 0:
        _log.warning(
            "%s has properties that can be assigned (%s): if that changes its parameters, the"
            " model's weights do not follow before the next update; call a method in place of it",
            type(optimizer).__name__,
            few(setters),
        )
    engine = weakref.ref(session)

    def forget(_: Optimizer) -> None:
        found = engine()
        if found is not None:
            found.optimizer_trains = False

    optimizer.register_load_state_dict_post_hook(forget)


def _own_methods(kind: type[Optimizer]) -> Iterator[tuple[str, _Method]]:
    for name in dir(kind):
        method = inspect.getattr_static(kind, name)
        if not inspect.isfunction(method) or hasattr(Optimizer, name):
            continue
        is_known = method.__module__.partition(".")[0] in ("torch", "hadal")
        if not is_known and not name.startswith(("_", "get")):
            yield name, method


def _own_setters(kind: type[Optimizer]) -> list[str]:
    found = {name: inspect.getattr_static(kind, name) for name in dir(kind)}
    return [
        name
        for name, each in found.items()
        if isinstance(each, property)
        and each.fset is not None
        and not hasattr(Optimizer, name)
        and not name.startswith("_")
        and each.fset.__module__.partition(".")[0] not in ("torch", "hadal")
    ]


def _followed(name: str, method: _Method, optimizer: Optimizer, session: Session) -> _Method:
    # Neither outlives the program's references because of this.
    owner, engine = weakref.ref(optimizer), weakref.ref(session)

    def call(*args: Any, **kwargs: Any) -> Any:
        found = engine()
        bound = partial(method, owner(), *args, **kwargs)
        if found is None or found.cycle.ended or found.cycle.destroyed or found.cycle.stepping:
            return bound()
        if name == "train" and found.optimizer_trains:
            return bound()
        return _call(name, bound, found)

    return update_wrapper(call, method)


@torch.no_grad()
def _call(name: str, method: Callable[[], Any], session: Session) -> Any:
    session.expect_alive()
    training, runtime = session.expect_training(), session.parts.runtime
    if not runtime.gathering.is_at_rest:
        raise UsageError(
            f"rank {session.parts.ranks.rank}: optimizer.{name}() was called inside a forward, a"
            " backward or GatheredParameters; call it between them, as weights may change"
        )
    runtime.gathering.meet(Marker.METHOD)
    runtime.reshard_all()
    session.cycle.stepping = True  # the method may call others, or `step`
    try:
        with runtime.holding_frozen():
            return training.stepper.change(method)
    finally:
        session.cycle.stepping = False
        session.optimizer_trains = name == "train"
