"""Compressed linear layers split over the ranks of a program's own `mpu`, in Megatron's way.

Each rank has a slice of the weight, which techniques treat as a separate matrix.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from hadal.comm.functions import all_gather_into_tensor, all_reduce, labelled
from hadal.comm.mpu import model_group_of
from hadal.errors import ModelError
from hadal.plugins.compression.layers import CompressedLinear

Group = dist.ProcessGroup
_LABEL = "the exchange of a compressed layer that is split over ranks"


class ColumnParallelLinear(CompressedLinear):
    """A linear layer whose outputs are split over ranks.

    A forward returns the outputs, and the bias if `skip_bias_add` leaves it to the caller.
    """

    def __init__(
        self,
        mpu: Any,
        input_size: int,
        output_size: int,
        bias: bool = True,
        gather_output: bool = True,
        skip_bias_add: bool = False,
    ) -> None:
        super().__init__(input_size, _share(self, mpu, output_size), bias=bias)
        self.mpu, self.gather_output, self.skip_bias_add = mpu, gather_output, skip_bias_add
        _mark(self.weight, self.bias)

    def forward(self, input: Tensor) -> tuple[Tensor, Tensor | None]:  # type: ignore[override]
        """Return all outputs or this rank's, and the bias that the caller has to add.

        Args:
            input: (..., input_size), the same on all ranks.
        """
        group = model_group_of(self.mpu)
        weight, bias = self.effective()
        found = F.linear(
            self.effective_input(_across(input, _same, _summed, group)),
            weight,
            None if self.skip_bias_add else bias,
        )
        if self.gather_output:
            found = _across(found, _gathered, _own, group)
        return found, bias if self.skip_bias_add else None


class RowParallelLinear(CompressedLinear):
    """A linear layer whose inputs are split over ranks; their results are summed.

    A forward returns the outputs, and the bias if `skip_bias_add` leaves it to the caller.
    """

    def __init__(
        self,
        mpu: Any,
        input_size: int,
        output_size: int,
        bias: bool = True,
        input_is_parallel: bool = False,
        skip_bias_add: bool = False,
    ) -> None:
        super().__init__(_share(self, mpu, input_size), output_size, bias=bias)
        self.mpu, self.input_is_parallel, self.skip_bias_add = mpu, input_is_parallel, skip_bias_add
        _mark(self.weight)

    def forward(self, input: Tensor) -> tuple[Tensor, Tensor | None]:  # type: ignore[override]
        """Return the outputs, the same on all ranks, and the bias that the caller has to add.

        Args:
            input: (..., input_size), the same on all ranks; or this rank's slice of its columns, if
                `input_is_parallel`.
        """
        group = model_group_of(self.mpu)
        if not self.input_is_parallel:
            input = _across(input, _own, _gathered, group)
        weight, bias = self.effective()
        found = _across(F.linear(self.effective_input(input), weight), _summed, _same, group)
        if bias is None or self.skip_bias_add:
            return found, bias
        return found + bias, None


# Cleaned layers keep their classes, which implement the parallel forward.
for _kind in (ColumnParallelLinear, RowParallelLinear):
    _kind.plain = _kind


def _share(layer: Any, mpu: Any, size: int) -> int:
    ranks = dist.get_world_size(model_group_of(mpu))
    if size % ranks:
        raise ModelError(
            f"{type(layer).__name__}: {ranks} ranks do not divide {size:,}; use a multiple"
        )
    return size // ranks


def _mark(*parameters: Any) -> None:
    """Mark slices as Megatron does: their norms are summed over the model-parallel ranks."""
    for parameter in parameters:
        if parameter is not None:
            parameter.model_parallel = True


Way = Callable[[Tensor, Group], Tensor]


def _across(x: Tensor, forward: Way, backward: Way, group: Group) -> Tensor:
    found: Tensor = _Across.apply(x, forward, backward, group)  # type: ignore[no-untyped-call]
    return found


class _Across(torch.autograd.Function):
    """One collective over the ranks in forward, and another for its gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, forward: Way, backward: Way, group: Group) -> Tensor:
        ctx.backward_way, ctx.group = backward, group
        return forward(x, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        return ctx.backward_way(gradient, ctx.group), None, None, None


def _same(x: Tensor, group: Group) -> Tensor:
    del group
    return x.view_as(x)


def _summed(x: Tensor, group: Group) -> Tensor:
    total = x.clone(memory_format=torch.contiguous_format)
    labelled(_LABEL, all_reduce, total, group=group)
    return total


def _own(x: Tensor, group: Group) -> Tensor:
    return x.chunk(dist.get_world_size(group), -1)[dist.get_rank(group)].contiguous()


def _gathered(x: Tensor, group: Group) -> Tensor:
    ranks = dist.get_world_size(group)
    parts = x.new_empty(ranks * x.shape[0], *x.shape[1:])
    labelled(_LABEL, all_gather_into_tensor, parts, x.contiguous(), group)
    return torch.cat(parts.chunk(ranks), -1)
