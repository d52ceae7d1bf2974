"""Construction of the configured optimizer, and of the stepper for it."""

from __future__ import annotations

import difflib
import inspect
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pkgutil import resolve_name
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from hadal.config.optimizer import KINDS, OptimizerKind
from hadal.config.section import mark_of
from hadal.device import spared_import
from hadal.errors import Fault, OptimizerError
from hadal.optim.on_disk import DiskSteps
from hadal.optim.schedules import build_schedule, needs_metric
from hadal.optim.step import (
    FlatStepper,
    OptimizerStepper,
    WholeStepper,
    refuse_disk_beside_memory,
    refuse_other_state_dtype,
)
from hadal.zero.gradients import Gradients
from hadal.zero.sharing import ModelParts


def build_optimizer(
    name: str,
    params: Mapping[str, Any],
    groups: Iterable[nn.Parameter] | list[dict[str, Any]],
    names: Mapping[nn.Parameter, str] | None = None,
) -> Optimizer:
    """Build the optimizer that the `optimizer` section names, over parameters or groups.

    `names` are the model's names of parameters, from which some optimizers make groups.

    Raises:
        OptimizerError: an unknown or unusable optimizer, or arguments that it does not accept.
    """
    kind = _kind_named(name)
    make = _maker_of(kind)
    arguments = _arguments(kind, params)
    if kind.groups and names is not None:
        groups = resolve_name(kind.groups)(groups, names)
    try:
        inspect.signature(make).bind(groups, **arguments)
    except TypeError as error:
        raise OptimizerError(f"optimizer.params does not fit {name}: {error}") from None
    try:
        with spared_import():
            optimizer: Optimizer = make(groups, **arguments)
    except KeyError as error:
        raise OptimizerError(
            f"{name} needs optimizer.params.{error.args[0]}, which has no default; add it"
        ) from error
    except (AssertionError, TypeError, ValueError, NotImplementedError) as error:
        raise OptimizerError(
            f"{name} cannot be created with {dict(params)}: {error}{kind.remedy}"
        ) from error
    return optimizer


def _kind_named(name: str) -> OptimizerKind:
    """Return the row of a type, or one for a class of a newer torch."""
    if name in KINDS:
        return KINDS[name]
    made = getattr(torch.optim, name, None)
    if inspect.isclass(made) and issubclass(made, Optimizer) and made is not Optimizer:
        return OptimizerKind(name, f"torch.optim:{name}")
    known = [n for n, c in vars(torch.optim).items() if inspect.isclass(c) and n != "Optimizer"]
    spelled = {known.lower(): known for known in [*known, *KINDS]}
    near = difflib.get_close_matches(name.lower(), spelled, 1)
    hint = f"; did you mean {spelled[near[0]]!r}?" if near else ""
    raise OptimizerError(
        f"optimizer.type {name!r} is neither a type of Hadal nor a class of torch.optim{hint}"
    )


def _maker_of(kind: OptimizerKind) -> Any:
    if kind.refused:
        raise OptimizerError(f"optimizer {kind.name} cannot be used: {kind.refused}")
    try:
        return resolve_name(kind.made_by)
    except ImportError as error:
        package = kind.made_by.partition(":")[0]
        raise OptimizerError(
            f"optimizer.type {kind.name} needs the {package} package, which cannot be imported"
            f" ({error}): pip install {package}"
        ) from error


def _arguments(kind: OptimizerKind, params: Mapping[str, Any]) -> dict[str, Any]:
    """Return the params that are arguments; JSON has lists only, and some keys have no effect."""
    keys = {} if kind.params is None else kind.params.model_fields
    dropped = {key for key, field in keys.items() if mark_of(field).status == "no effect"}
    if "fp32_optimizer_states" in keys:
        dropped.add("fp32_optimizer_states")  # the engine reads it
    return {
        key: tuple(value) if key == "betas" else value
        for key, value in params.items()
        if key not in dropped
    }


def refuse_unusable(kind: type[Optimizer]) -> None:
    """Raise `OptimizerError` for an optimizer whose step cannot work with reduced gradients."""
    for cls in kind.__mro__:
        if cls.__name__ in KINDS and KINDS[cls.__name__].refused:
            raise OptimizerError(
                f"optimizer {kind.__name__} cannot be used: {KINDS[cls.__name__].refused}"
            )


def kind_of(optimizer: Optimizer) -> OptimizerKind:
    """Return the row of an optimizer's class; subclasses, which may override the update, have none.

    Without a row an optimizer steps whole parameters.
    """
    cls = type(optimizer)
    for kind in KINDS.values():
        path = kind.class_names.get(cls.__name__)
        if path is not None and resolve_name(path) is cls:
            return kind
    return OptimizerKind(cls.__name__, f"{cls.__module__}:{cls.__qualname__}")


def build_stepper(
    optimizer: Optimizer,
    gradients: Sequence[Gradients],
    parameters: Sequence[Sequence[nn.Parameter]],
    steps: DiskSteps,
    parts: ModelParts | None,
) -> OptimizerStepper:
    """Build the stepper for a user's optimizer, and pass the buckets' tensors to the optimizer.

    The optimizer object and its group dicts remain; only `group["params"]` is replaced.
    `parameters` lists the model's parameters of each param group in order; `steps` are the settings
    for updates of state on the disk; `parts` are the ranks with the model's other parts.

    The optimizer's existing state is kept.

    Raises:
        OptimizerError: the optimizer cannot work with reduced gradients, or its state does not fit.
    """
    refuse_unusable(type(optimizer))
    if any(group.get("differentiable") for group in optimizer.param_groups):
        raise OptimizerError(
            f"{type(optimizer).__name__}(differentiable=True) cannot be used: an engine's update"
            " is not differentiable; remove it"
        )
    kind = kind_of(optimizer)
    if kind.is_elementwise:
        return FlatStepper(optimizer, gradients, steps=steps)
    refuse_other_state_dtype(optimizer, gradients)
    refuse_disk_beside_memory(optimizer, gradients)
    make: type[OptimizerStepper] = resolve_name(kind.stepper) if kind.stepper else WholeStepper
    return make(optimizer, gradients, parameters, steps, parts)


# ---- a preview of a schedule ---------------------------------------------------------------------

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
