"""Conversions between whole tensors and slices of tensor-parallel ranks, with gradients.

Each operation in forward has its adjoint in backward: the gradient of a value that all ranks have
is summed, and the gradient of a sum is passed to all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from hadal.comm import Ranks
from hadal.comm.functions import all_gather_into_tensor, all_reduce, labelled, reduce_scatter_tensor

Way = Callable[[Tensor], Tensor]


def across(x: Tensor, forward: Way, backward: Way) -> Tensor:
    """Return `forward(x)`; its backward applies `backward` to the gradient."""
    found: Tensor = _Crossing.apply(x, forward, backward)  # type: ignore[no-untyped-call]
    return found


class _Crossing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, forward: Way, backward: Way) -> Tensor:
        ctx.way = backward
        return forward(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return ctx.way(gradient), None, None


def same(x: Tensor) -> Tensor:
    """Return the values unchanged."""
    return x.view_as(x)


def summed(x: Tensor, ranks: Ranks, label: str) -> Tensor:
    """Return the sum over ranks. The argument, contiguous or not, is unchanged."""
    total = x.clone(memory_format=torch.contiguous_format)
    labelled(label, all_reduce, total, group=ranks.group)
    return total


def own(x: Tensor, dim: int, sizes: Sequence[int], ranks: Ranks) -> Tensor:
    """Return this rank's slice along a dimension."""
    return x.narrow(dim, sum(sizes[: ranks.rank]), sizes[ranks.rank]).contiguous()


def gathered(x: Tensor, dim: int, sizes: Sequence[int], ranks: Ranks, label: str) -> Tensor:
    """Return the slices of all ranks, one after another along a dimension."""
    longest = max(sizes)
    mine = x.movedim(dim, 0)
    if mine.shape[0] < longest:
        mine = torch.cat([mine, mine.new_zeros(longest - mine.shape[0], *mine.shape[1:])])
    mine = mine.contiguous()
    found = mine.new_empty(ranks.size * longest, *mine.shape[1:])
    labelled(label, all_gather_into_tensor, found, mine, group=ranks.group)
    if min(sizes) < longest:
        pieces = zip(found.split(longest), sizes, strict=True)
        found = torch.cat([piece[:size] for piece, size in pieces])
    return found.movedim(0, dim).contiguous()


def sum_scattered(x: Tensor, dim: int, sizes: Sequence[int], ranks: Ranks, label: str) -> Tensor:
    """Return this rank's slice along a dimension of the sum over ranks."""
    longest = max(sizes)
    pieces = list(x.movedim(dim, 0).split(list(sizes)))
    if min(sizes) < longest:
        pieces = [
            torch.cat([piece, piece.new_zeros(longest - piece.shape[0], *piece.shape[1:])])
            for piece in pieces
        ]
    whole = torch.cat(pieces).contiguous()
    found = whole.new_empty(longest, *whole.shape[1:])
    labelled(label, reduce_scatter_tensor, found, whole, group=ranks.group)
    return found[: sizes[ranks.rank]].movedim(0, dim).contiguous()
