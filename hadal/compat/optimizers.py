"""The optimizer classes of `deepspeed.ops`, which create one of Hadal's or torch's; loss scalers.

`optimizers.json` has the classes. Their objects are elementwise and step flat shards.
"""

from __future__ import annotations

from inspect import Parameter, Signature
from typing import Any, cast

import torch
from torch import Tensor
from torch.optim import Optimizer

from hadal.compat.surface import data
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


def _signature(names: str, defaults: dict[str, Any]) -> Signature:
    """Return DeepSpeed's signature: parameters first, then options in order."""
    either = Parameter.POSITIONAL_OR_KEYWORD
    first, *options = names.split()
    values = {k: tuple(v) if isinstance(v, list) else v for k, v in defaults.items()}
    return Signature(
        [Parameter(first, either)]
        + [Parameter(name, either, default=values[name]) for name in options]
    )


_TABLE = data("optimizers.json")
for _name, _row in _TABLE["classes"].items():
    _defaults = {**_TABLE["defaults"], **_row.get("defaults", {})}
    _contents = {"kind": _row["kind"], "__signature__": _signature(_row["options"], _defaults)}
    globals()[_name] = _Maker(_name, (), {"__doc__": _row["about"], **_contents})


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

    cur_hysteresis = property(lambda self: self._state.spare)
    """The number of overflows after which the scale halves."""

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
