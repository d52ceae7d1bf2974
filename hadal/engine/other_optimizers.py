"""Steps of optimizers that are not an engine's, on parameters that an engine trains."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from hadal.engine.clipping import trained_by_engines
from hadal.errors import UsageError
from hadal.zero.state import safe_get_full_grad

if TYPE_CHECKING:
    from hadal.engine.session import Session

_watched: list[Any] = []
_lent: dict[Optimizer, tuple[list[Session], list[nn.Parameter]]] = {}
"""During a step: the engines that have lent their gradients, and the parameters that got one."""


def watch_optimizers() -> None:
    """Watch `step` of every optimizer of torch for parameters whose gradients an engine holds.

    Their `.grad` is None, so such a step would change nothing. An engine whose weights are plain
    (one process, fp32, on the device) lends the gradients, as programs that train layer by layer
    expect, and drops them afterwards; others refuse.
    """
    if not _watched:
        _watched.append(register_optimizer_step_pre_hook(_lend))
        _watched.append(register_optimizer_step_post_hook(_take_back))


def _lend(optimizer: Optimizer, *_: Any) -> None:
    sessions: list[Session] = []
    lent: list[nn.Parameter] = []
    for session, parameter in trained_by_engines(_parameters(optimizer)):
        if session.cycle.stepping or not session.parts.runtime.holds_gradients:
            continue
        if not _is_plain(session, parameter):
            _refuse(optimizer, session, parameter)
        if session not in sessions:
            session.expect_alive()  # ends a backward that the program has started
            sessions.append(session)
        gradient = safe_get_full_grad(parameter)
        if gradient is not None and bool(gradient.any()):  # torch leaves out what was not used
            parameter.grad = gradient
            lent.append(parameter)
    if sessions:
        _lent[optimizer] = sessions, lent


@torch.no_grad()
def _take_back(optimizer: Optimizer, *_: Any) -> None:
    sessions, lent = _lent.pop(optimizer, ((), ()))
    for parameter in lent:
        parameter.grad = None
    for session in sessions:
        session.parts.runtime.clear_gradients()
        session.cycle.begin_anew()


def _is_plain(session: Session, parameter: nn.Parameter) -> bool:
    """Return whether the weight is what updates change, and the gradient this process's own."""
    bucket = session.parts.runtime.bucket_of[parameter]
    is_alone = session.parts.world.size == 1 and session.batches.accumulation == 1
    return is_alone and not bucket.partition.weights and not bucket.has_own_master


def _refuse(optimizer: Optimizer, session: Session, parameter: nn.Parameter) -> None:
    parts = session.parts
    names = (name for name, one in parts.model.named_parameters() if one is parameter)
    raise UsageError(
        f"rank {parts.ranks.rank}: {type(optimizer).__name__}.step() was called for"
        f" {next(names, 'a parameter')}, whose gradient an engine holds: .grad is None, so the"
        " step changes nothing. Call engine.step(), or pass this optimizer to initialize"
        " (optimizer=...); another optimizer can train these parameters only before initialize,"
        " after engine.destroy(), or in one process in fp32 without accumulation"
    )


def _parameters(optimizer: Optimizer) -> Iterator[nn.Parameter]:
    for group in optimizer.param_groups:
        yield from group["params"]
