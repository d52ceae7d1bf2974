"""Deferred gradients of weights, for the schedule "zero_bubble".

In a linear layer's backward, no other stage waits for the weight's gradient. So its backward
computes only the gradient of the input, and keeps the tensors for the weight's gradient.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional


class Later(NamedTuple):
    """A weight's gradient that is not computed yet."""

    weight: nn.Parameter
    input: Tensor
    """Shape [rows, inputs]."""
    gradient: Tensor
    """Gradient of the output; shape [rows, outputs]."""
    is_transposed: bool
    """True if the weight's shape is [inputs, outputs]."""

    def compute(self) -> Tensor:
        """Return the gradient, in the weight's shape and dtype."""
        if self.is_transposed:
            return self.input.t() @ self.gradient
        return self.gradient.t() @ self.input


def _addmm(bias: Tensor, value: Tensor, weight: Tensor) -> Tensor:
    rows = torch.addmm(bias, value.flatten(0, -2), weight)
    return rows.view(*value.shape[:-1], -1)


class _Linear(torch.autograd.Function):
    """A linear layer whose backward defers its weight's gradient."""

    @staticmethod
    def forward(
        ctx: Any,
        put_off: Callable[[Later], None],
        is_transposed: bool,
        value: Tensor,
        weight: nn.Parameter,
        bias: Tensor | None,
    ) -> Tensor:
        ctx.put_off, ctx.is_transposed, ctx.weight = put_off, is_transposed, weight
        ctx.save_for_backward(value)
        if is_transposed:
            return value @ weight if bias is None else _addmm(bias, value, weight)
        return functional.linear(value, weight, bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        (value,) = ctx.saved_tensors
        weight, rows = ctx.weight, gradient.flatten(0, -2)
        # Detached: a view would keep the graph of the whole forward, and so the stage's input.
        ctx.put_off(Later(weight, value.detach().flatten(0, -2), rows, ctx.is_transposed))
        of_input = None
        if ctx.needs_input_grad[2]:
            of_input = gradient @ (weight.t() if ctx.is_transposed else weight)
        of_bias = rows.sum(0) if ctx.needs_input_grad[4] else None
        return None, None, of_input, None, of_bias


class LaterWeights:
    """Linear layers of a model that defer the gradients of their weights.

    These are modules with the forward of `torch.nn.Linear` or transformers' `Conv1D`. Gradients of
    other weights are computed at once, as are those under autocast and of compiled layers.
    """

    def __init__(self, model: nn.Module) -> None:
        self._later: list[Later] = []
        self._layers = [(layer, is_conv) for layer, is_conv in _linear_layers(model)]
        for layer, is_transposed in self._layers:
            layer.forward = partial(self._forward, layer, layer.forward, is_transposed)

    def close(self) -> None:
        """Restore the layers' own forwards."""
        for layer, _ in self._layers:
            del layer.forward
        self._layers.clear()

    def take(self) -> list[Later]:
        """Return the gradients deferred since the last call."""
        found, self._later = self._later, []
        return found

    def _forward(
        self, layer: nn.Module, own: Callable[[Tensor], Tensor], is_transposed: bool, value: Tensor
    ) -> Tensor:
        if not _is_for_later(value, layer.weight):
            return own(value)
        found: Tensor = _Linear.apply(  # type: ignore[no-untyped-call]
            self._put_off, is_transposed, value, layer.weight, layer.bias
        )
        return found

    def _put_off(self, later: Later) -> None:
        self._later.append(later)


class GradientEntry(torch.autograd.Function):
    """A scalar whose backward passes known gradients to tensors."""

    @staticmethod
    def forward(ctx: Any, gradients: list[Tensor], *outputs: Tensor) -> Tensor:
        """Return the scalar."""
        ctx.gradients = gradients
        return outputs[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> Any:
        """Return the gradients."""
        return None, *ctx.gradients


def gradients_of(put_off: Sequence[Later]) -> dict[nn.Parameter, Tensor]:
    """Return the gradient of each weight, summed over its uses, the last use first."""
    found: dict[nn.Parameter, Tensor] = {}
    for one in put_off:
        computed = one.compute()
        if one.weight in found:
            found[one.weight] += computed
        else:
            found[one.weight] = computed
    return found


def root_of(put_off: list[Later]) -> Tensor | None:
    """Return a root whose backward gives weights the gradients that are computed from this list.

    The list is emptied. None if there are none.
    """
    found = gradients_of(put_off)
    put_off.clear()
    if not found:
        return None
    root: Tensor = GradientEntry.apply([*found.values()], *found)  # type: ignore[no-untyped-call]
    return root


def _linear_layers(model: nn.Module) -> Iterator[tuple[nn.Module, bool]]:
    """Yield linear layers, and whether their weights are [inputs, outputs]."""
    transformers = sys.modules.get("transformers.pytorch_utils")
    for module in model.modules():
        if "forward" in vars(module):
            continue  # the forward was replaced
        if type(module).forward is nn.Linear.forward:
            yield module, False
        elif transformers is not None and type(module) is transformers.Conv1D:
            yield module, True


def _is_for_later(value: Any, weight: Any) -> bool:
    return (
        isinstance(weight, nn.Parameter)
        and weight.requires_grad
        and isinstance(value, Tensor)
        and value.dim() > 1
        and torch.is_grad_enabled()
        and not torch.is_autocast_enabled(value.device.type)
        and not torch.compiler.is_compiling()
    )
