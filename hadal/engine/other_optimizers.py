"""Steps of optimizers that are not an engine's, on parameters that an engine trains."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from hadal.engine.clipping import trained_by_engines
from hadal.errors import UsageError

_watched: list[Any] = []


def watch_optimizers() -> None:
    """Make `step` of every optimizer of torch refuse parameters whose gradients an engine holds.

    Such a step changes no weight: `.grad` is None, and optimizers skip the parameter.
    """
    if not _watched:
        _watched.append(register_optimizer_step_pre_hook(_refuse))


def _refuse(optimizer: Optimizer, *_: Any) -> None:
    for session, parameter in trained_by_engines(_parameters(optimizer)):
        parts = session.parts
        if session.cycle.stepping or not parts.runtime.holds_gradients:
            continue
        names = (name for name, one in parts.model.named_parameters() if one is parameter)
        raise UsageError(
            f"rank {parts.ranks.rank}: {type(optimizer).__name__}.step() was called for"
            f" {next(names, 'a parameter')}, whose gradient an engine holds: .grad is None, so the"
            " step changes nothing. Call engine.step(), or pass this optimizer to initialize"
            " (optimizer=...); another optimizer can train these parameters only before initialize"
            " or after engine.destroy()"
        )


def _parameters(optimizer: Optimizer) -> Iterator[nn.Parameter]:
    for group in optimizer.param_groups:
        yield from group["params"]
