"""The loss scalers of `deepspeed.runtime.fp16`, usable on their own; the arithmetic is Hadal's."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hadal.errors import UsageError
from hadal.optim.loss_scale import ScaleRule, ScaleState, first_scale, next_scale


class _Scaler:
    """A loss scale and its changes."""

    dynamic = False

    def __init__(self, rule: ScaleRule) -> None:
        self._rule = rule
        self._state: ScaleState = first_scale(rule)

    @property
    def loss_scale(self) -> float:
        """The factor of the loss."""
        return self._state.scale

    @property
    def cur_scale(self) -> float:
        """The same as `loss_scale`."""
        return self._state.scale

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

    dynamic = True

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
