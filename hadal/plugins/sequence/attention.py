"""Attention over sequences split over ranks: a local one between two exchanges (Ulysses)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hadal.device import on_device
from hadal.errors import SequenceError
from hadal.plugins.sequence.exchange import to_heads, to_sequence
from hadal.plugins.sequence.heads import Heads, share_heads


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
    first, second = turned.chunk(2, dim=-1)
    quarter = torch.cat((-second, first), dim=-1)
    rotated = (turned * cosine + quarter * sine).to(values.dtype)
    return torch.cat((rotated, kept), dim=-1)


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
    if batch_dim_idx not in (0, 1) or not fits or shapes[1][:3] != shapes[2][:3]:
        raise SequenceError(
            f"DistributedAttention got query, key and value of shapes {shapes[0]}, {shapes[1]} and"
            f" {shapes[2]}, with batch_dim_idx {batch_dim_idx}; expected [batch, length, heads,"
            " size] (batch_dim_idx 0) or [length, batch, heads, size] (1), of one batch and length"
        )
