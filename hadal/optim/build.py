"""Construction of the configured optimizer, and of the stepper for it."""

from __future__ import annotations

import difflib
import importlib
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from hadal.config.torch_names import REFUSED
from hadal.device import current_device, spared_import
from hadal.errors import NotBuiltYetError, OptimizerError
from hadal.optim.exchanging import ExchangingStepper
from hadal.optim.fused import UncorrectedAdam
from hadal.optim.lamb import Lamb, LambStepper
from hadal.optim.lion import Lion
from hadal.optim.muon import Muon, MuonStepper
from hadal.optim.on_disk import DiskSteps
from hadal.optim.one_bit import OneBitAdam, OneBitLamb, ZeroOneAdam
from hadal.optim.signs import OneBitLambStepper, ZeroOneAdamStepper
from hadal.optim.step import (
    FlatStepper,
    OptimizerStepper,
    WholeStepper,
    refuse_disk,
    refuse_disk_beside_memory,
    refuse_other_state_dtype,
)
from hadal.zero.gradients import Gradients
from hadal.zero.sharing import ModelParts

# The update of an element depends only on that element's gradient and state, so cutting a tensor
# anywhere changes nothing. Subclasses are not trusted: they may override the update.
_ELEMENTWISE = frozenset(
    {
        torch.optim.ASGD,
        torch.optim.Adadelta,
        torch.optim.Adagrad,
        torch.optim.Adam,
        torch.optim.AdamW,
        torch.optim.Adamax,
        torch.optim.NAdam,
        torch.optim.RAdam,
        torch.optim.RMSprop,
        torch.optim.Rprop,
        torch.optim.SGD,
        Lion,
        UncorrectedAdam,
    }
)
_MUP = ("MuAdam", "MuAdamW", "MuSGD")
_SENDING_SIGNS: Mapping[type[Optimizer], Callable[..., OptimizerStepper]] = {
    OneBitAdam: ExchangingStepper,
    OneBitLamb: OneBitLambStepper,
    ZeroOneAdam: ZeroOneAdamStepper,
}
# Types that are not classes of torch.optim.
_OWN_TYPES: list[type[Optimizer]] = [Lamb, Lion, Muon, *_SENDING_SIGNS]
_OWN = {kind.__name__: kind for kind in _OWN_TYPES}
# Keys of the `optimizer` section that are not arguments: they select a class, or request the
# behaviour that Hadal always has.
_ADAM = ("Adam", "AdamW")
_SIGNS = [kind.__name__ for kind in _SENDING_SIGNS]
_SWITCHES: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(_ADAM, ("torch_adam", "adam_w_mode", "bias_correction", "set_grad_none")),
    "Adagrad": ("amsgrad",),
    "Lion": ("set_grad_none",),
    **dict.fromkeys(_SIGNS, ("bias_correction", "cuda_aware", "comm_backend_name")),
}


def build_optimizer(
    kind: str, params: Mapping[str, Any], groups: Iterable[nn.Parameter] | list[dict[str, Any]]
) -> Optimizer:
    """Build the optimizer that the `optimizer` section names, over parameters or groups.

    `Adam` uses decoupled weight decay (as `AdamW`) unless `adam_w_mode` is false.

    Raises:
        OptimizerError: an unknown or unusable optimizer, or arguments that it does not accept.
    """
    if kind in _MUP:
        return _build_mup(kind, params, groups)
    arguments = dict(params)
    switches = {key: arguments.pop(key, None) for key in _SWITCHES.get(kind, ())}
    if kind in _SWITCHES:
        arguments.pop("fp32_optimizer_states", None)  # not an argument of the class
    made = _class_of_adam(kind, switches, arguments) if kind in _ADAM else _class_named(kind)
    refuse_unusable(made)
    try:
        inspect.signature(made).bind(groups, **arguments)
    except TypeError as error:
        raise OptimizerError(f"optimizer.params does not fit {kind}: {error}") from None
    try:
        with spared_import():
            optimizer: Optimizer = made(groups, **_with_tuples(arguments))
    except (TypeError, ValueError) as error:
        raise OptimizerError(f"{kind} cannot be created with {dict(params)}: {error}") from error
    return optimizer


def _with_tuples(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments with lists converted to tuples, which JSON does not have."""
    return {key: tuple(value) if key == "betas" else value for key, value in arguments.items()}


def _build_mup(
    kind: str, params: Mapping[str, Any], groups: Iterable[nn.Parameter] | list[dict[str, Any]]
) -> Optimizer:
    """Build one of torch's optimizers with mup (Yang et al. 2022), with a group for each width.

    Raises:
        OptimizerError: the package is not installed or rejects these arguments, or the model has no
            base shapes.
    """
    try:
        package = importlib.import_module("mup")
    except ImportError as error:
        raise OptimizerError(
            f"optimizer.type {kind} needs the mup package, which cannot be imported ({error}):"
            " pip install mup"
        ) from error
    try:
        optimizer: Optimizer = getattr(package, kind)(groups, **_with_tuples(params))
    except KeyError as error:
        raise OptimizerError(
            f"{kind} needs optimizer.params.{error.args[0]}, which mup has no default for; add it"
        ) from error
    except (AssertionError, TypeError, ValueError, NotImplementedError) as error:
        raise OptimizerError(
            f"{kind} cannot be created with {dict(params)}: {error}. Call mup.set_base_shapes on"
            " the model before hadal.initialize."
        ) from error
    return optimizer


def _class_of_adam(
    kind: str, switches: Mapping[str, Any], arguments: dict[str, Any]
) -> type[Optimizer]:
    """Return the class that the switches of Adam and AdamW select; complete its arguments."""
    if not switches["torch_adam"]:
        arguments.setdefault("weight_decay", 0.0)
    if arguments.get("capturable") and current_device().type == "cpu":
        raise OptimizerError(
            "optimizer.params.capturable is for updates that an accelerator records and replays,"
            " but this process computes on a CPU: remove it"
        )
    decoupled = kind == "AdamW" or switches["adam_w_mode"] is not False
    if switches["bias_correction"] is False:
        arguments["decoupled_weight_decay"] = decoupled
        return UncorrectedAdam
    return torch.optim.AdamW if decoupled else torch.optim.Adam


def _class_named(kind: str) -> type[Optimizer]:
    made = _OWN.get(kind) or getattr(torch.optim, kind, None)
    if inspect.isclass(made) and issubclass(made, Optimizer) and made is not Optimizer:
        return made
    known = [n for n, c in vars(torch.optim).items() if inspect.isclass(c) and n != "Optimizer"]
    spelled = {name.lower(): name for name in [*known, *_OWN]}
    near = difflib.get_close_matches(kind.lower(), spelled, 1)
    hint = f"; did you mean {spelled[near[0]]!r}?" if near else ""
    raise OptimizerError(
        f"optimizer.type {kind!r} is neither a type of Hadal nor a class of torch.optim{hint}"
    )


def refuse_unusable(kind: type[Optimizer]) -> None:
    """Raise `OptimizerError` for an optimizer whose step cannot work with reduced gradients."""
    for cls in kind.__mro__:
        if cls.__name__ in REFUSED:
            raise OptimizerError(
                f"optimizer {kind.__name__} cannot be used: {REFUSED[cls.__name__]}"
            )


def is_elementwise(optimizer: Optimizer) -> bool:
    """Return whether an optimizer may step a flat slice of several parameters as one tensor."""
    return type(optimizer) in _ELEMENTWISE


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
    steps = steps or DiskSteps()
    if is_elementwise(optimizer):
        return FlatStepper(optimizer, gradients, steps=steps)
    refuse_other_state_dtype(optimizer, gradients)
    if type(optimizer) in _SENDING_SIGNS:
        refuse_disk(optimizer, gradients)
        _refuse_parts(optimizer, gradients, parts)
        return _SENDING_SIGNS[type(optimizer)](optimizer, gradients, parameters)
    refuse_disk_beside_memory(optimizer, gradients)
    if type(optimizer) is Lamb:
        return LambStepper(optimizer, gradients, parts, steps)
    if type(optimizer) is Muon:
        return MuonStepper(optimizer, gradients, parameters, steps)
    return WholeStepper(optimizer, gradients, parameters, steps)


def _refuse_parts(
    optimizer: Optimizer, gradients: Sequence[Gradients], parts: ModelParts | None
) -> None:
    """Raise if signs would make parameters that all parts of a model hold drift apart."""
    for one in gradients:
        if one.bucket.sharing.everyone != one.bucket.ranks:
            raise NotBuiltYetError(
                f"optimizer.type: {type(optimizer).__name__} is not built yet for experts that are"
                f" spread over ranks ({one.bucket.name}); choose Adam, AdamW or Lamb"
            )
    if parts is not None and parts.ranks.size > 1:
        raise NotBuiltYetError(
            f"optimizer.type: {type(optimizer).__name__} is not built yet for model-parallel"
            " models: parameters that all parts hold would get each part's magnitudes and drift"
            " apart; choose Adam, AdamW or Lamb"
        )
