"""Attention over sequences split over ranks: a local one between two exchanges (Ulysses)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hadal.comm.adjoint import WayOfAll, across_all
from hadal.comm.functions import all_to_all_single, labelled
from hadal.device import on_device
from hadal.errors import SequenceError


@dataclass(frozen=True, slots=True)
class Heads:
    """The heads that each rank computes, for whole sequences."""

    queries: tuple[range, ...]
    """Each query head is on one rank."""
    keys: tuple[range, ...]
    """Heads of keys and values that those query heads use; several ranks may use one."""
    group: int
    """Query heads for each head of keys and values."""

    def local_keys(self, rank: int) -> list[int]:
        """Return, for each query head of a rank, its head of keys among those of that rank."""
        first = self.keys[rank].start
        return [head // self.group - first for head in self.queries[rank]]

    def local_group(self, rank: int) -> int | None:
        """Return how many of a rank's query heads use each of its heads of keys.

        Return None if the number differs between heads.
        """
        places, keys = self.local_keys(rank), len(self.keys[rank])
        group = len(places) // keys
        is_even = places == [head // group for head in range(len(places))]
        return group if is_even and group * keys == len(places) else None


@lru_cache(maxsize=64)
def share_heads(heads: int, key_heads: int, ranks: int) -> Heads:
    """Distribute heads over ranks as evenly as possible.

    If there are as many heads of keys as ranks, each rank has whole groups. Otherwise a rank has as
    many query heads as the others, or one more, and the heads of keys that these need.

    Raises:
        SequenceError: there are fewer heads than ranks, or groups are uneven.
    """
    if key_heads < 1 or heads % key_heads:
        raise SequenceError(
            f"{heads} heads of queries cannot share {key_heads} heads of keys and values"
            " evenly; choose a number of key heads that divides the number of query heads"
        )
    if heads < ranks:
        raise SequenceError(
            f"{heads} attention heads cannot be distributed over the {ranks} ranks of a sequence:"
            f" each rank needs one; set sequence_parallel_size to {heads} or less, or attend with"
            " hadal.sequence.ring_attention"
        )
    group = heads // key_heads
    if key_heads >= ranks:
        keys = _even(key_heads, ranks)
        return Heads(tuple(range(k.start * group, k.stop * group) for k in keys), keys, group)
    queries = _even(heads, ranks)
    return Heads(
        queries, tuple(range(q.start // group, -(-q.stop // group)) for q in queries), group
    )


def _even(count: int, ranks: int) -> tuple[range, ...]:
    whole, over = divmod(count, ranks)
    starts = [rank * whole + min(rank, over) for rank in range(ranks + 1)]
    return tuple(range(*pair) for pair in pairwise(starts))


class DistributedAttention(nn.Module):
    """Local attention, called with whole sequences and this rank's heads.

    Args:
        local_attention: called with query, key, value and further arguments; its output has the
            query's layout, with heads and sizes in two dimensions or joined in one.
        sequence_process_group: the ranks that share each sequence, in the order of its positions.
        scatter_idx: 2, the dimension of heads.
        gather_idx: the dimension of positions; `batch_dim_idx` of `forward` takes precedence.
        sp_stream: accepted but not needed; query, key and value are sent in one message.
        num_kv_heads: accepted but not needed; the tensors determine it.

    Raises:
        SequenceError: `scatter_idx` is not 2, or, in forward, heads or shapes do not fit.
    """

    def __init__(
        self,
        local_attention: Callable[..., Tensor],
        sequence_process_group: dist.ProcessGroup,
        scatter_idx: int = 2,
        gather_idx: int = 0,
        sp_stream: Any = None,
        num_kv_heads: int | None = None,
    ) -> None:
        super().__init__()
        if scatter_idx != 2 or gather_idx not in (0, 1):
            raise SequenceError(
                f"DistributedAttention got scatter_idx {scatter_idx} and gather_idx {gather_idx};"
                " expected 2, the dimension of heads, and 0 or 1, that of positions"
            )
        self.local_attn = local_attention
        self.spg = sequence_process_group

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        batch_dim_idx: int,
        rotary_pos_emb: tuple[Tensor, Tensor] | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> Tensor:
        """Return the attention of this rank's positions.

        Args:
            query: [batch, length / ranks, heads, size] if `batch_dim_idx` is 0, and
                [length / ranks, batch, heads, size] if it is 1.
            key: the same, with as many heads or fewer.
            value: as `key`.
            batch_dim_idx: the dimension of the batch.
            rotary_pos_emb: cosine and sine [length, 1, 1, size] for the whole sequence, applied to
                query and key once sequences are whole.
            args: further arguments of the local attention; also `kwargs`.
        """
        _check(query, key, value, batch_dim_idx)
        given = [one.transpose(0, batch_dim_idx) for one in (query, key, value)]
        heads = share_heads(query.shape[2], key.shape[2], dist.get_world_size(self.spg))
        local = [one.transpose(0, batch_dim_idx) for one in gather_sequence(given, heads, self.spg)]
        if rotary_pos_emb is not None:
            angles = [one.transpose(0, 1 - batch_dim_idx) for one in rotary_pos_emb]
            local[:2] = [apply_rotary_pos_emb(one, *angles) for one in local[:2]]
        output = self.local_attn(*local, *args, **kwargs)
        is_joined = output.dim() == 3
        if is_joined:
            output = output.unflatten(-1, (local[0].shape[2], -1))
        found = to_sequence(output.transpose(0, batch_dim_idx), heads.queries, self.spg)
        found = found.transpose(0, batch_dim_idx)
        return found.flatten(2) if is_joined else found


def gather_sequence(tensors: list[Tensor], heads: Heads, group: dist.ProcessGroup) -> list[Tensor]:
    """Return query, key and value [batch, length, this rank's heads, size].

    If this rank's query heads share heads of keys unevenly, each gets its own copy of them.
    """
    query, key, value = to_heads(tensors, (heads.queries, heads.keys, heads.keys), group)
    rank = dist.get_rank(group)
    if heads.local_group(rank) is None:
        places = on_device(torch.tensor(heads.local_keys(rank), device="cpu"), key.device)
        key, value = key.index_select(2, places), value.index_select(2, places)
    return [query, key, value]


def apply_rotary_pos_emb(values: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Rotate the first elements of each head, as many as there are angles; keep the others."""
    turned, kept = values[..., : cosine.shape[-1]], values[..., cosine.shape[-1] :]
    rotated = (turned * cosine + quarter_turn(turned) * sine).to(values.dtype)
    return torch.cat((rotated, kept), dim=-1)


def quarter_turn(values: Tensor) -> Tensor:
    """Turn each pair of elements, one from each half of the last dimension, by a right angle."""
    first, second = values.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)


def single_all_to_all(
    input: Tensor,
    scatter_idx: int,
    gather_idx: int,
    batch_dim_idx: int,
    group: dist.ProcessGroup,
    *args: Any,
    **kwargs: Any,
) -> Tensor:
    """Exchange one tensor: heads for positions if `scatter_idx` is 2, else positions for heads.

    Heads are split evenly; further arguments of DeepSpeed's function have no effect.

    Raises:
        SequenceError: the ranks do not divide heads, or positions.
    """
    size = dist.get_world_size(group)
    by_heads = scatter_idx >= 2
    dim = 2 if by_heads else 1 - batch_dim_idx
    if input.dim() != 4 or input.shape[dim] % size:
        raise SequenceError(
            f"a tensor of shape {tuple(input.shape)} cannot be split over {size} ranks along"
            f" dimension {dim}; expected four dimensions, with that one divisible"
            " (DistributedAttention takes any number of heads)"
        )
    heads = input.shape[2] * (1 if by_heads else size)
    ranges = share_heads(heads, heads, size).queries
    given = input.transpose(0, batch_dim_idx)
    found = to_heads([given], [ranges], group)[0] if by_heads else to_sequence(given, ranges, group)
    return found.transpose(0, batch_dim_idx)


class SeqAllToAll:
    """`single_all_to_all` in the form of an autograd function."""

    @staticmethod
    def apply(
        group: dist.ProcessGroup,
        input: Tensor,
        scatter_idx: int,
        gather_idx: int,
        batch_dim_idx: int,
        *args: Any,
    ) -> Tensor:
        """Call `single_all_to_all`; further arguments of DeepSpeed's function have no effect."""
        return single_all_to_all(input, scatter_idx, gather_idx, batch_dim_idx, group)


def _check(query: Tensor, key: Tensor, value: Tensor, batch_dim_idx: int) -> None:
    shapes = [tuple(one.shape) for one in (query, key, value)]
    fits = all(len(shape) == 4 for shape in shapes) and shapes[0][:2] == shapes[1][:2]
    is_dim = isinstance(batch_dim_idx, int) and batch_dim_idx in (0, 1)
    if not is_dim or not fits or shapes[1][:3] != shapes[2][:3]:
        raise SequenceError(
            f"DistributedAttention got query, key and value of shapes {shapes[0]}, {shapes[1]} and"
            f" {shapes[2]}, with batch_dim_idx {batch_dim_idx!r:.16}; expected [batch, length,"
            " heads, size] (batch_dim_idx 0) or [length, batch, heads, size] (1), of one batch and"
            " length; a mask comes after rotary_pos_emb"
        )


# ---- the exchange --------------------------------------------------------------------------------

# Several tensors are sent in one message, whose parts are copied once on each side. The backward of
# each direction is the other direction.

Ranges = tuple[range, ...]
"""The heads of one tensor that each rank has while sequences are whole."""


def to_heads(
    tensors: Sequence[Tensor], ranges: Sequence[Ranges], group: dist.ProcessGroup
) -> tuple[Tensor, ...]:
    """Turn [batch, length / ranks, heads, size] into [batch, length, this rank's heads, size]."""
    heads = tuple(one.shape[2] for one in tensors)
    return across_all(tuple(tensors), *_exchanges(ranges, heads, group))


def to_sequence(tensor: Tensor, ranges: Ranges, group: dist.ProcessGroup) -> Tensor:
    """Turn [batch, length, this rank's heads, size] into [batch, length / ranks, heads, size]."""
    heads = max(one.stop for one in ranges)
    gather, back = _exchanges((ranges,), (heads,), group)
    (found,) = across_all((tensor,), back, gather)
    return found


def _exchanges(
    ranges: Sequence[Ranges], heads: Sequence[int], group: dist.ProcessGroup
) -> tuple[WayOfAll, WayOfAll]:
    """Return the exchange to whole sequences, and the one back."""
    return (
        lambda tensors: _exchanged(tensors, ranges, heads, group, True),
        lambda tensors: _exchanged(tensors, ranges, heads, group, False),
    )


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
    sent = [list(_pieces(tensors, ranges, rank, size, gathers)) for rank in range(size)]
    # The received values have the shape that the opposite exchange would send.
    places = [list(_pieces(outputs, ranges, rank, size, not gathers)) for rank in range(size)]
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
    tensors: Sequence[Tensor], ranges: Sequence[Ranges], rank: int, size: int, by_heads: bool
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
