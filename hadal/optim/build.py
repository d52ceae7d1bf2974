"""Construction of the configured optimizer, and of the stepper for it."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Iterable, Mapping, Sequence
from pkgutil import resolve_name
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from hadal.config.optimizer import KINDS, OptimizerKind
from hadal.config.section import mark_of
from hadal.device import spared_import
from hadal.errors import OptimizerError
from hadal.optim.on_disk import DiskSteps
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
    steps: DiskSteps | None = None,
    parts: ModelParts | None = None,
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
    kind, steps = kind_of(optimizer), steps or DiskSteps()
    if kind.is_elementwise:
        return FlatStepper(optimizer, gradients, steps=steps)
    refuse_other_state_dtype(optimizer, gradients)
    refuse_disk_beside_memory(optimizer, gradients)
    make: type[OptimizerStepper] = resolve_name(kind.stepper) if kind.stepper else WholeStepper
    return make(optimizer, gradients, parameters, steps, parts)
