"""Operations over ranks that autograd differentiates, each with its adjoint.

The gradient of a value that all ranks have is summed, and the gradient of a sum is passed to all
ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from hadal.comm.functions import all_gather_into_tensor, all_reduce, labelled, reduce_scatter_tensor
from hadal.comm.ranks import Ranks

Way = Callable[[Tensor], Tensor]
Tensors = tuple[Tensor, ...]
WayOfAll = Callable[[Tensors], Tensors]


def across(x: Tensor, forward: Way, backward: Way) -> Tensor:
    """Return `forward(x)`; its backward applies the adjoint, `backward`, to the gradient."""
    (found,) = across_all((x,), lambda all_x: (forward(*all_x),), lambda all_x: (backward(*all_x),))
    return found


def across_all(tensors: Tensors, forward: WayOfAll, backward: WayOfAll) -> Tensors:
    """Return `forward(tensors)`, which may be sent together; as `across`."""
    found: Tensors = _Across.apply(forward, backward, *tensors)  # type: ignore[no-untyped-call]
    return found


class _Across(torch.autograd.Function):
    """An operation over ranks in forward, and its adjoint, which may be differentiated in turn."""

    @staticmethod
    def forward(ctx: Any, forward: WayOfAll, backward: WayOfAll, *tensors: Tensor) -> Tensors:
        ctx.ways = backward, forward
        return forward(tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, *across_all(gradients, *ctx.ways)


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
