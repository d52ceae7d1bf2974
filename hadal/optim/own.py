"""The base of Hadal's own optimizers: a step that updates one parameter at a time.

Tests: tests/optim/test_elementwise.py
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, overload

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

State = dict[str, Any]
Group = dict[str, Any]


class OwnOptimizer(Optimizer, ABC):
    """The base class of Hadal's optimizers, which step like torch's if no engine steps them."""

    @abstractmethod
    def step_parameter(self, parameter: nn.Parameter, gradient: Tensor, group: Group) -> None:
        """Make one update of a whole parameter; may overwrite `gradient`."""

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Make one update of every parameter that has a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self.step_parameter(parameter, _laid_like(parameter), group)
        return loss


def _laid_like(parameter: nn.Parameter) -> Tensor:
    """Return a parameter's gradient with its strides, as fused kernels traverse both in memory."""
    gradient = parameter.grad
    assert gradient is not None  # the caller has checked
    if gradient.layout != torch.strided or gradient.stride() == parameter.stride():
        return gradient
    return torch.empty_like(parameter, dtype=gradient.dtype).copy_(gradient)
