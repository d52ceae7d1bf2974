"""The optimizer classes of `deepspeed.ops`, which create one of Hadal's or torch's; loss scalers.

Objects of those classes are elementwise and step flat shards.
"""

from __future__ import annotations

from inspect import Parameter, Signature
from typing import Any, ClassVar, cast

import torch
from torch import Tensor
from torch.optim import Optimizer

from hadal.errors import OptimizerError, UsageError
from hadal.optim.build import build_optimizer
from hadal.optim.muon import direction_of
from hadal.optim.norm import ScaleRule, ScaleState, first_scale, next_scale

# Options that Hadal spells differently.
_RENAMED = {"adamw_mode": "adam_w_mode"}
# Gradients are always set to None, and state has the dtype of the master.
_WITHOUT_EFFECT = frozenset({"set_grad_none", "fp32_optimizer_states", "deepspeed"})
_REMEDIES = {
    "amsgrad": "DeepSpeed refuses or ignores it; take torch.optim.AdamW(amsgrad=True), which trains"
    " here",
    "max_grad_norm": "set gradient_clipping in the configuration, which clips the gradients of all"
    " parameters together",
}


class _Maker(type):
    """A class whose call creates an optimizer of another class."""

    __signature__: Signature
    kind: str

    def __call__(cls, *args: Any, **kwargs: Any) -> Optimizer:
        """Create the optimizer.

        Raises:
            OptimizerError: an option requests something that does not exist here.
        """
        bound = cls.__signature__.bind(*args, **kwargs)
        bound.apply_defaults()
        parameters, *_ = bound.arguments.values()
        given = dict(list(bound.arguments.items())[1:])
        for name, remedy in _REMEDIES.items():
            if given.pop(name, None):
                raise OptimizerError(f"{cls.__name__}({name}=...): {remedy}")
        options = {
            _RENAMED.get(name, name): value
            for name, value in given.items()
            if name not in _WITHOUT_EFFECT
        }
        made: Any = build_optimizer(cls.kind, options, list(parameters))
        made.made_by = cls
        return cast(Optimizer, made)

    def __instancecheck__(cls, thing: Any) -> bool:
        """Return whether this class has created the optimizer."""
        return isinstance(thing, Optimizer) and getattr(thing, "made_by", None) is cls


# Defaults of options, unless a class has its own.
_DEFAULTS: dict[str, Any] = {
    "deepspeed": None,
    "lr": 1e-3,
    "bias_correction": True,
    "betas": (0.9, 0.999),
    "eps": 1e-8,
    "eps_inside_sqrt": False,
    "weight_decay": 0.0,
    "max_grad_norm": 0.0,
    "max_coeff": 10.0,
    "min_coeff": 0.01,
    "amsgrad": False,
    # Adam's.
    "adam_w_mode": True,
    "adamw_mode": True,
    # How gradients and state are kept.
    "set_grad_none": True,
    "fp32_optimizer_states": True,
    # For optimizers that send signs.
    "freeze_step": 100000,
    "cuda_aware": False,
    "comm_backend_name": "nccl",
    "coeff_beta": 0.9,
    "factor_max": 4.0,
    "factor_min": 0.5,
    "factor_threshold": 0.1,
    "var_freeze_step": 100000,
    "var_update_scaler": 16,
    "local_step_scaler": 32678,
    "local_step_clipper": 16,
}


def _signature(names: str, **others: Any) -> Signature:
    """Return DeepSpeed's signature: parameters first, then options in order; `others` are own
    defaults.
    """
    either = Parameter.POSITIONAL_OR_KEYWORD
    first, *options = names.split()
    defaults = {**_DEFAULTS, **others}
    return Signature(
        [Parameter(first, either)]
        + [Parameter(name, either, default=defaults[name]) for name in options]
    )


class FusedAdam(metaclass=_Maker):
    """Adam or AdamW, with torch's fused kernels."""

    kind: ClassVar[str] = "Adam"
    __signature__ = _signature(
        "params lr bias_correction betas eps adam_w_mode weight_decay amsgrad set_grad_none"
    )


class DeepSpeedCPUAdam(metaclass=_Maker):
    """Adam or AdamW on the host, with torch's fused kernels."""

    kind: ClassVar[str] = "Adam"
    __signature__ = _signature(
        "model_params lr bias_correction betas eps weight_decay amsgrad adamw_mode"
        " fp32_optimizer_states"
    )


class DeepSpeedCPUAdagrad(metaclass=_Maker):
    """Adagrad on the host."""

    kind: ClassVar[str] = "Adagrad"
    __signature__ = _signature(
        "model_params lr eps weight_decay amsgrad fp32_optimizer_states", lr=1e-2, eps=1e-10
    )


class FusedLion(metaclass=_Maker):
    """Lion."""

    kind: ClassVar[str] = "Lion"
    __signature__ = _signature("params lr betas weight_decay set_grad_none")


class DeepSpeedCPULion(metaclass=_Maker):
    """Lion on the host."""

    kind: ClassVar[str] = "Lion"
    __signature__ = _signature("model_params lr betas weight_decay fp32_optimizer_states")


class FusedLamb(metaclass=_Maker):
    """Lamb."""

    kind: ClassVar[str] = "Lamb"
    __signature__ = _signature(
        "params lr bias_correction betas eps eps_inside_sqrt weight_decay max_grad_norm max_coeff"
        " min_coeff amsgrad"
    )


class OnebitAdam(metaclass=_Maker):
    """1-bit Adam."""

    kind: ClassVar[str] = "OneBitAdam"
    __signature__ = _signature(
        "params deepspeed lr freeze_step bias_correction betas eps eps_inside_sqrt weight_decay"
        " max_grad_norm amsgrad cuda_aware comm_backend_name"
    )


class OnebitLamb(metaclass=_Maker):
    """1-bit Lamb."""

    kind: ClassVar[str] = "OneBitLamb"
    __signature__ = _signature(
        "params deepspeed lr freeze_step bias_correction betas eps eps_inside_sqrt weight_decay"
        " max_grad_norm max_coeff min_coeff amsgrad cuda_aware comm_backend_name coeff_beta"
        " factor_max factor_min factor_threshold"
    )


class ZeroOneAdam(metaclass=_Maker):
    """0/1 Adam."""

    kind: ClassVar[str] = "ZeroOneAdam"
    __signature__ = _signature(
        "params deepspeed lr bias_correction betas eps eps_inside_sqrt weight_decay max_grad_norm"
        " var_freeze_step var_update_scaler local_step_scaler local_step_clipper amsgrad"
        " cuda_aware comm_backend_name"
    )


# ---- loss scalers, usable on their own; the arithmetic is Hadal's --------------------------------


_OF_THE_RULE = {
    "dynamic": "dynamic",
    "scale_window": "window",
    "min_scale": "minimum",
    "delayed_shift": "hysteresis",
    "consecutive_hysteresis": "consecutive_hysteresis",
    "raise_error_at_min_scale": "ends_at_floor",
}


class Scale:
    """A loss scale, and the rule by which it changes."""

    scale_factor = 2.0

    def __init__(self, rule: ScaleRule) -> None:
        self._rule = rule
        self._state: ScaleState = first_scale(rule)

    def __getattr__(self, name: str) -> Any:
        """Return a value of the rule: whether it is dynamic, its window, ..."""
        if name not in _OF_THE_RULE:
            raise AttributeError(f"a loss scale has no {name!r}")
        return getattr(self._rule, _OF_THE_RULE[name])

    @property
    def loss_scale(self) -> float:
        """The factor of the loss."""
        return self._state.scale

    @property
    def cur_scale(self) -> float:
        """The same as `loss_scale`, an older name."""
        return self.loss_scale


class _Scaler(Scale):
    """A loss scale of the program's own."""

    def update_scale(self, overflow: bool) -> None:
        """Record an update that overflowed or not."""
        self._state = next_scale(self._state, overflow, self._rule)

    def scale_gradient(self, module: Any, grad_in: Any, grad_out: Any) -> tuple[Tensor, ...]:
        """Multiply gradients by the scale, as a module's backward hook would."""
        return tuple(self.loss_scale * gradient for gradient in grad_in)

    def backward(self, loss: Tensor, retain_graph: bool = False) -> None:
        """Run the backward of the scaled loss."""
        (loss * self.loss_scale).backward(retain_graph=retain_graph)


class LossScaler(_Scaler):
    """A fixed loss scale."""

    def __init__(self, scale: float = 1) -> None:
        super().__init__(ScaleRule(initial=float(scale)))

    def has_overflow(self, params: Any) -> bool:
        """Return False: a fixed scale does not check."""
        return False


class DynamicLossScaler(_Scaler):
    """A loss scale that halves at overflows and doubles after clean updates."""

    def __init__(
        self,
        init_scale: float = 2**32,
        scale_factor: float = 2.0,
        scale_window: int = 1000,
        min_scale: float = 1,
        delayed_shift: int = 1,
        consecutive_hysteresis: bool = False,
        raise_error_at_min_scale: bool = True,
        dtype: torch.dtype = torch.half,
    ) -> None:
        if scale_factor != 2.0:
            raise UsageError(
                f"DynamicLossScaler(scale_factor={scale_factor:g}): the scale changes by factors of"
                " 2.0 only; remove it"
            )
        super().__init__(
            ScaleRule(
                initial=float(init_scale),
                dynamic=True,
                window=scale_window,
                minimum=float(min_scale),
                hysteresis=delayed_shift,
                consecutive_hysteresis=consecutive_hysteresis,
                ends_at_floor=raise_error_at_min_scale,
            )
        )
        self.dtype = dtype

    @property
    def cur_hysteresis(self) -> int:
        """The number of overflows after which the scale halves."""
        return self._state.spare

    def has_overflow(self, params: Any) -> bool:
        """Return whether a gradient of these parameters is not finite."""
        gradients = (each.grad for each in params if each.grad is not None)
        return any(not bool(gradient.isfinite().all()) for gradient in gradients)


def muon_update(
    grad: Tensor,
    momentum: Tensor,
    beta: float = 0.95,
    ns_steps: int = 5,
    nesterov: bool = True,
    ns_method: str = "gram",
) -> Tensor:
    """Add a matrix's gradient to its momentum, and return Muon's update for a rate of 1.

    Raises:
        UsageError: another number of steps, or no Nesterov momentum; Hadal has one form of each.
    """
    if ns_steps != 5 or not nesterov:
        raise UsageError(
            f"muon_update(ns_steps={ns_steps}, nesterov={nesterov}): leave out both; Muon takes 5"
            " steps with Nesterov momentum"
        )
    update, scale = direction_of(grad, momentum, beta, ns_method)
    return update * scale
