"""Ring attention: attention of split sequences, with keys and values passed around the ranks.

Each rank keeps its queries and receives the keys and values of all ranks in turn, so any number of
heads works. Results are merged by the log-sum-exp (partial.py). In backward, keys and values are
passed around again, with their gradients.

Causal attention computes half of all pairs, and a rank with the end of a sequence would have most
of them. The sequence is therefore split into two chunks per rank, and rank r computes the chunks r
and 2 * ranks - 1 - r: every rank has equally many pairs in every step. Chunks are exchanged before
and after the attention.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from hadal.comm.functions import all_to_all_single, labelled
from hadal.errors import SequenceError
from hadal.plugins.sequence.partial import (
    Operands,
    PartialResult,
    Pattern,
    attend,
    empty_result,
    gradients,
    merge,
)

_LABEL = "the exchange of keys and values in ring attention"
_BALANCE = "the balancing of ring attention"


def ring_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    group: dist.ProcessGroup,
    *,
    is_causal: bool = True,
    scale: float | None = None,
    documents: Tensor | None = None,
    window: int | None = None,
) -> Tensor:
    """Return the attention of this rank's positions to whole sequences. All ranks must call it.

    Args:
        query: [batch, heads, length / ranks, D]: consecutive positions, in the order of the ranks.
        key, value: [batch, heads or fewer, length / ranks, D], of the same dtype; `heads` is a
            multiple of theirs.
        group: the ranks that share each sequence, in the order of its positions.
        is_causal: each position attends to itself and earlier ones only.
        scale: factor of the scores; 1 / sqrt(D) by default.
        documents: [batch, length], the number of each position's document: causal attention stays
            inside it. None: each row is one document.
        window: number of positions that each one attends to in causal attention, itself included.

    Returns:
        [batch, heads, length / ranks, D].

    Raises:
        SequenceError: shapes do not fit.
    """
    _check(query, key, value, documents, dist.get_world_size(group))
    factor = 1.0 / math.sqrt(query.shape[-1]) if scale is None else scale
    pattern = Pattern(is_causal, documents if is_causal else None, window)
    if is_causal:
        query, key, value = balanced([query, key, value], group)
    found: Tensor = _Ring.apply(query, key, value, group, pattern, factor)  # type: ignore[no-untyped-call]
    return contiguous([found], group)[0] if is_causal else found


def chunks_of(rank: int, ranks: int, length: int, *, is_balanced: bool) -> tuple[range, ...]:
    """Return the positions that a rank computes, `length` in all, of `ranks * length`."""
    if not is_balanced:
        return (range(rank * length, (rank + 1) * length),)
    return tuple(_chunk(number, length) for number in (rank, 2 * ranks - 1 - rank))


def _chunk(number: int, length: int) -> range:
    """Return a chunk's positions. The halves of an odd length differ by one.

    One of a rank's two chunks is a first half and one a second half, so all ranks have `length`.
    """
    start, first = number // 2 * length, -(-length // 2)
    return range(start + first, start + length) if number % 2 else range(start, start + first)


# ---- the balanced order --------------------------------------------------------------------------


def balanced(tensors: Sequence[Tensor], group: dist.ProcessGroup) -> tuple[Tensor, ...]:
    """Turn consecutive positions [batch, heads, length / ranks, D] into this rank's chunks."""
    found: tuple[Tensor, ...] = _Balance.apply(group, True, *tensors)  # type: ignore[no-untyped-call]
    return found


def contiguous(tensors: Sequence[Tensor], group: dist.ProcessGroup) -> tuple[Tensor, ...]:
    """Turn this rank's chunks into consecutive positions."""
    found: tuple[Tensor, ...] = _Balance.apply(group, False, *tensors)  # type: ignore[no-untyped-call]
    return found


class _Balance(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, group: dist.ProcessGroup, balances: bool, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.choices = group, balances
        return _moved(tensors, group, balances)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *given: Tensor) -> tuple[Any, ...]:
        group, balances = ctx.choices
        return None, None, *_moved(given, group, not balances)


def _moved(
    tensors: Sequence[Tensor], group: dist.ProcessGroup, balances: bool
) -> tuple[Tensor, ...]:
    """Send each chunk to the rank that computes it, or back: one message."""
    me, ranks = dist.get_rank(group), dist.get_world_size(group)
    length = tensors[0].shape[2]
    # Chunks of this rank before and after, as numbers; positions follow their order.
    consecutive, mine = (2 * me, 2 * me + 1), (me, 2 * ranks - 1 - me)
    before, after = (consecutive, mine) if balances else (mine, consecutive)
    goes_to = {number: _owner(number, ranks, balances) for number in before}
    comes_from = {number: _owner(number, ranks, not balances) for number in after}
    leaving = _places(before, length)
    outputs = [one.new_empty(one.shape) for one in tensors]
    arriving = _places(after, length)
    message, sent = [], [0] * ranks
    for rank in range(ranks):
        for number in sorted(n for n in before if goes_to[n] == rank):
            pieces = [one[:, :, leaving[number]].reshape(-1) for one in tensors]
            message += pieces
            sent[rank] += sum(piece.numel() for piece in pieces)
    places, received = [], [0] * ranks
    for rank in range(ranks):
        for number in sorted(n for n in after if comes_from[n] == rank):
            views = [one[:, :, arriving[number]] for one in outputs]
            places += views
            received[rank] += sum(view.numel() for view in views)
    given = torch.cat(message)
    arrived = given.new_empty(sum(received))
    labelled(_BALANCE, all_to_all_single, arrived, given, received, sent, group=group)
    for view, piece in zip(places, arrived.split([v.numel() for v in places]), strict=True):
        view.copy_(piece.view(view.shape))
    return tuple(outputs)


def _owner(number: int, ranks: int, is_balanced: bool) -> int:
    return min(number, 2 * ranks - 1 - number) if is_balanced else number // 2


def _places(numbers: Sequence[int], length: int) -> dict[int, slice]:
    found, start = {}, 0
    for number in numbers:
        size = len(_chunk(number, length))
        found[number] = slice(start, start + size)
        start += size
    return found


# ---- the ring ------------------------------------------------------------------------------------


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        group: dist.ProcessGroup,
        pattern: Pattern,
        scale: float,
    ) -> Tensor:
        ranks, me = dist.get_world_size(group), dist.get_rank(group)
        rows = _cut(query, me, ranks, pattern)
        results = [empty_result(query[:, :, cut]) for _, cut in rows]
        held = torch.stack([key, value])
        for step in range(ranks):
            coming = _Hop(held, group) if step < ranks - 1 else None
            for number, (positions, cut) in enumerate(rows):
                for columns, place in _cut(key, (me - step) % ranks, ranks, pattern):
                    operands = _operands(query[:, :, cut], held[:, :, :, place])
                    found = attend(operands, positions, columns, pattern, scale)
                    if found is not None:
                        results[number] = merge(results[number], found)
            held = held if coming is None else coming.wait()
        out = torch.cat([result.out for result in results], 2).to(query.dtype)
        lse = torch.cat([result.lse for result in results], 2)
        ctx.save_for_backward(query, key, value, out, lse)
        ctx.choices = group, pattern, scale
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        query, key, value, out, lse = ctx.saved_tensors
        group, pattern, scale = ctx.choices
        ranks, me = dist.get_world_size(group), dist.get_rank(group)
        rows = _cut(query, me, ranks, pattern)
        held = torch.stack([key, value])
        of_query = torch.zeros_like(query, dtype=lse.dtype)
        returning: _Hop | None = None
        for step in range(ranks):
            coming = _Hop(held, group) if step < ranks - 1 else None
            of_held = torch.zeros_like(held, dtype=lse.dtype)
            for positions, cut in rows:
                known = PartialResult(out[:, :, cut], lse[:, :, cut])
                for columns, place in _cut(key, (me - step) % ranks, ranks, pattern):
                    operands = _operands(query[:, :, cut], held[:, :, :, place])
                    found = gradients(
                        gradient[:, :, cut], operands, known, positions, columns, pattern, scale
                    )
                    if found is None:
                        continue
                    of_query[:, :, cut] += found[0]
                    for total, part in zip(of_held[:, :, :, place], found[1:], strict=True):
                        total += _ungrouped(part, key.shape[1])
            if returning is not None:
                of_held += returning.wait()
            returning = _Hop(of_held, group)
            held = held if coming is None else coming.wait()
        assert returning is not None
        of_key, of_value = returning.wait().to(key.dtype)
        return of_query.to(query.dtype), of_key, of_value, None, None, None


def _cut(tensor: Tensor, rank: int, ranks: int, pattern: Pattern) -> list[tuple[range, slice]]:
    """Return the positions of a rank's chunks, and their ranges in its tensors."""
    chunks = chunks_of(rank, ranks, tensor.shape[2], is_balanced=pattern.is_causal)
    found, start = [], 0
    for chunk in chunks:
        found.append((chunk, slice(start, start + len(chunk))))
        start += len(chunk)
    return [one for one in found if len(one[0])]


def _operands(query: Tensor, held: Tensor) -> Operands:
    """Expand key and value to one for each head of query [batch, heads, ...]."""
    groups = query.shape[1] // held.shape[2]
    key, value = held.repeat_interleave(groups, 2) if groups > 1 else held
    return Operands(query, key, value)


def _ungrouped(gradient: Tensor, heads: int) -> Tensor:
    """Sum the gradients of the heads that share a key head."""
    total: Tensor = gradient.unflatten(1, (heads, -1)).sum(2)
    return total


class _Hop:
    """A tensor sent to the next rank, and one received from the previous rank."""

    def __init__(self, tensor: Tensor, group: dist.ProcessGroup) -> None:
        me, ranks = dist.get_rank(group), dist.get_world_size(group)
        self._sent = tensor.contiguous()  # alive until it is sent
        self._arrived = torch.empty_like(self._sent)
        sent, received = [0] * ranks, [0] * ranks
        sent[(me + 1) % ranks] = received[(me - 1) % ranks] = tensor.numel()
        self._work = labelled(
            _LABEL,
            all_to_all_single,
            self._arrived.view(-1),
            self._sent.view(-1),
            received,
            sent,
            group=group,
            async_op=True,
        )

    def wait(self) -> Tensor:
        """Return the received tensor."""
        if self._work is not None:
            self._work.wait()
        return self._arrived


def _check(query: Tensor, key: Tensor, value: Tensor, documents: Tensor | None, ranks: int) -> None:
    shapes = tuple(query.shape), tuple(key.shape), tuple(value.shape)
    fits = all(len(shape) == 4 for shape in shapes) and shapes[1] == shapes[2]
    if (
        not fits
        or (shapes[0][0], *shapes[0][2:]) != (shapes[1][0], *shapes[1][2:])
        or shapes[0][1] % shapes[1][1]
    ):
        raise SequenceError(
            f"ring_attention got query, key and value of shapes {shapes[0]}, {shapes[1]} and"
            f" {shapes[2]}; expected [batch, heads, length / ranks, size] of one batch, length and"
            " size, key and value alike, and heads that theirs divide"
        )
    wanted = (shapes[0][0], ranks * shapes[0][2])
    if documents is not None and documents.shape != wanted:
        raise SequenceError(
            f"ring_attention got documents of shape {tuple(documents.shape)}; expected"
            f" {list(wanted)}, a number for each position of whole sequences"
        )
