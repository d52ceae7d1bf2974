"""A preview of a schedule over a number of updates, without a model."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from hadal.errors import Fault, OptimizerError
from hadal.optim.build import build_optimizer
from hadal.optim.schedules import build_schedule, needs_metric

_DEFAULT_RATE = 1e-3
# Arguments of torch's schedulers with one value per param group; their other lists are not.
_PER_GROUP = ("base_lr", "max_lr", "base_momentum", "max_momentum", "lr_lambda")


@dataclass(slots=True)
class ScheduleCourse:
    """The course of one param group; item n applies after n updates."""

    rates: list[float] = field(default_factory=list)
    momenta: list[float] = field(default_factory=list)
    """SGD's momentum or Adam's first beta; empty if the optimizer has neither."""


def preview(
    schedule: tuple[str, Mapping[str, Any]],
    optimizer: tuple[str, Mapping[str, Any]] | None,
    steps: int,
) -> list[ScheduleCourse]:
    """Run a schedule for `steps` updates of an optimizer that updates nothing.

    Args:
        schedule: type and params of the `scheduler` section.
        optimizer: type and params of the `optimizer` section, for its rate and momentum; None:
            AdamW with its defaults.
        steps: the number of updates.

    Returns:
        A course of `steps` + 1 values for each param group; the number of groups is the length of
        lists in the schedule's params.

    Raises:
        OptimizerError: an unknown schedule, one that follows a metric, or invalid arguments.
    """
    kind, params = schedule
    made = _optimizer(optimizer, _groups_for(kind, params))
    playing = build_schedule(kind, params, made)
    if needs_metric(playing):
        raise OptimizerError(f"cannot plot {kind}: it follows a metric known only in training")
    courses = [ScheduleCourse() for _ in made.param_groups]
    with warnings.catch_warnings():
        # torch's schedulers expect a step of the optimizer before each of theirs.
        warnings.filterwarnings("ignore", "Detected call of `lr_scheduler.step")
        for step in range(steps + 1):
            if step:
                playing.step()
            for course, group in zip(courses, made.param_groups, strict=True):
                course.rates.append(float(group["lr"]))
                momentum = group["betas"][0] if "betas" in group else group.get("momentum")
                if momentum is not None:
                    course.momenta.append(float(momentum))
    return courses


def faults_of(
    schedule: tuple[str, Mapping[str, Any]] | None, optimizer: tuple[str, Mapping[str, Any]] | None
) -> Iterator[Fault]:
    """Yield why the sections' optimizer or schedule cannot be made, as far as no model is needed.

    Args:
        schedule: type and params of the `scheduler` section; None: there is none.
        optimizer: type and params of the `optimizer` section; None: there is none.
    """
    kind, params = schedule or ("", {})
    groups = _groups_for(kind, params)
    made: Optimizer = torch.optim.SGD(groups, lr=_DEFAULT_RATE, momentum=0.9)
    if optimizer is not None:
        try:
            made = build_optimizer(*optimizer, groups)
        except OptimizerError as error:
            yield Fault("optimizer.params", str(error).removeprefix("optimizer.params "))
    if schedule is not None:
        try:
            build_schedule(kind, params, made)
        except OptimizerError as error:
            yield Fault("scheduler.params", str(error).removeprefix("scheduler.params "))


def _groups_for(kind: str, params: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return as many param groups, of a parameter each, as the lists in a schedule's params say."""
    native = not hasattr(torch.optim.lr_scheduler, kind)
    lists = [
        len(value)
        for name, value in params.items()
        if isinstance(value, (list, tuple)) and (native or name in _PER_GROUP)
    ]
    count = max(lists, default=1)
    return [{"params": [nn.Parameter(torch.zeros(1))]} for _ in range(count)]


def _optimizer(section: tuple[str, Mapping[str, Any]] | None, groups: list[Any]) -> Optimizer:
    """Build the section's optimizer, or AdamW with its rate if it cannot be built here."""
    kind, params = section or ("AdamW", {})
    try:
        return build_optimizer(kind, {"lr": _DEFAULT_RATE, **params}, groups)
    except OptimizerError:
        return build_optimizer("AdamW", {"lr": params.get("lr", _DEFAULT_RATE)}, groups)
