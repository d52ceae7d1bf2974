"""Exchange between slices of the sequence with all heads and whole sequences with some heads.

Several tensors are sent in one message, whose parts are copied once on each side. The backward of
each direction is the other direction.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from hadal.comm.functions import all_to_all_single, labelled

Ranges = tuple[range, ...]
"""The heads of one tensor that each rank has while sequences are whole."""


def to_heads(
    tensors: Sequence[Tensor], ranges: Sequence[Ranges], group: dist.ProcessGroup
) -> tuple[Tensor, ...]:
    """Turn [batch, length / ranks, heads, size] into [batch, length, this rank's heads, size]."""
    found: tuple[Tensor, ...] = _Exchange.apply(  # type: ignore[no-untyped-call]
        group, True, tuple(ranges), tuple(one.shape[2] for one in tensors), *tensors
    )
    return found


def to_sequence(tensor: Tensor, ranges: Ranges, group: dist.ProcessGroup) -> Tensor:
    """Turn [batch, length, this rank's heads, size] into [batch, length / ranks, heads, size]."""
    heads = max(one.stop for one in ranges)
    (found,) = _Exchange.apply(group, False, (ranges,), (heads,), tensor)  # type: ignore[no-untyped-call]
    return found  # type: ignore[no-any-return]


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        group: dist.ProcessGroup,
        gathers: bool,
        ranges: tuple[Ranges, ...],
        heads: tuple[int, ...],
        *tensors: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.choices = (group, gathers, ranges, heads)
        return _exchanged(tensors, ranges, heads, group, gathers)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        group, gathers, ranges, heads = ctx.choices
        return None, None, None, None, *_exchanged(gradients, ranges, heads, group, not gathers)


def _exchanged(
    tensors: Sequence[Tensor],
    ranges: Sequence[Ranges],
    heads: Sequence[int],
    group: dist.ProcessGroup,
    gathers: bool,
) -> tuple[Tensor, ...]:
    """Send each rank its slice of every tensor, and join the received slices."""
    me, size = dist.get_rank(group), dist.get_world_size(group)
    outputs = [
        _empty(one, mine[me], all_heads, size, gathers)
        for one, mine, all_heads in zip(tensors, ranges, heads, strict=True)
    ]
    sent = [list(_pieces(tensors, ranges, rank, me, size, gathers)) for rank in range(size)]
    # The received values have the shape that the opposite exchange would send.
    places = [list(_pieces(outputs, ranges, rank, me, size, not gathers)) for rank in range(size)]
    lengths_out = [sum(piece.numel() for piece in pieces) for pieces in sent]
    lengths_in = [sum(piece.numel() for piece in pieces) for pieces in places]
    message = tensors[0].new_empty(sum(lengths_out))
    for view, piece in _views(message, sent):
        view.copy_(piece)
    arrived = message.new_empty(sum(lengths_in))
    direction = "heads" if gathers else "positions"
    labelled(
        f"the exchange of attention by {direction}",
        all_to_all_single,
        arrived,
        message,
        lengths_in,
        lengths_out,
        group=group,
    )
    for view, place in _views(arrived, places):
        if gathers:
            place.copy_(view)
        else:
            place.add_(view)  # several ranks may have used the same head
    return tuple(outputs)


def _empty(one: Tensor, mine: range, heads: int, size: int, gathers: bool) -> Tensor:
    batch, length, _, width = one.shape
    if gathers:
        return one.new_empty(batch, length * size, len(mine), width)
    return one.new_zeros(batch, length // size, heads, width)


def _pieces(
    tensors: Sequence[Tensor],
    ranges: Sequence[Ranges],
    rank: int,
    me: int,
    size: int,
    by_heads: bool,
) -> Iterator[Tensor]:
    """Return the slice of each tensor that goes to a rank: its heads, or its positions."""
    for tensor, mine in zip(tensors, ranges, strict=True):
        if by_heads:
            yield tensor[:, :, mine[rank].start : mine[rank].stop]
        else:
            length = tensor.shape[1] // size
            yield tensor[:, rank * length : (rank + 1) * length]


def _views(message: Tensor, pieces: Sequence[Sequence[Tensor]]) -> Iterator[tuple[Tensor, Tensor]]:
    start = 0
    for of_rank in pieces:
        for piece in of_rank:
            yield message[start : start + piece.numel()].view(piece.shape), piece
            start += piece.numel()
