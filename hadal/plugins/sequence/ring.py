"""Ring attention: attention of split sequences, with keys and values passed around the ranks.

Each rank keeps its queries and receives the keys and values of all ranks in turn, so any number of
heads works. Partial results, of some rows against some columns, are merged by the log-sum-exp. In
backward, keys and values are passed around again, with their gradients: with the merged output and
log-sum-exp, the backward of each partial attention gives its part of the gradients, exactly, as
dS = P (dP - rowsum(dO O)) with P = exp(S - log-sum-exp) holds for every column separately.

Causal attention computes half of all pairs, and a rank with the end of a sequence would have most
of them. The sequence is therefore split into two chunks per rank, and rank r computes the chunks r
and 2 * ranks - 1 - r: every rank has equally many pairs in every step. Chunks are exchanged before
and after the attention.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from hadal.comm.adjoint import WayOfAll, across_all
from hadal.comm.functions import all_to_all_single, labelled
from hadal.device import fused_attention, fused_attention_backward, has_fused_attention
from hadal.errors import SequenceError

NOTHING = -1e30
"""The log-sum-exp of a row without columns; finite, so that differences are defined."""
# Scores that exist at a time if they are materialized: 64 MiB in fp32 per head and sample.
_SCORES = 1 << 24


@dataclass(frozen=True, slots=True)
class Pattern:
    """The mask of attention: the positions that each position of a sequence attends to."""

    is_causal: bool = True
    documents: Tensor | None = None
    """[batch, length]: the number of each position's document; None if each row is one document."""
    window: int | None = None
    """Number of positions that each one attends to, itself and earlier ones; None for all."""

    def meets(self, rows: range, columns: range) -> bool:
        """Return False if no row attends to any column."""
        if not self.is_causal:
            return True
        is_near = self.window is None or columns.stop > rows.start - self.window + 1
        return columns.start < rows.stop and is_near

    def mask(self, rows: range, columns: range, device: torch.device) -> Tensor | None:
        """Return which pairs count, [batch or 1, 1, rows, columns]; None if all do."""
        if not self.is_causal:
            return None
        of_rows = torch.arange(rows.start, rows.stop, device=device)[:, None]
        distance = of_rows - torch.arange(columns.start, columns.stop, device=device)
        found = None
        if columns.stop > rows.start + 1:
            found = (distance >= 0)[None, None]
        if self.window is not None and rows.stop - columns.start > self.window:
            near = (distance < self.window)[None, None]
            found = near if found is None else found & near
        if self.documents is not None:
            of_rows = self.documents[:, rows.start : rows.stop, None]
            same = (of_rows == self.documents[:, None, columns.start : columns.stop])[:, None]
            found = same if found is None else found & same
        return found

    def is_triangle(self, rows: range, columns: range) -> bool:
        """Return True if the pairs that count are those on and below the diagonal."""
        is_whole = self.window is None or len(rows) <= self.window
        return self.is_causal and rows == columns and self.documents is None and is_whole


class PartialResult(NamedTuple):
    """The attention of rows over the columns seen so far."""

    out: Tensor
    """[batch, heads, rows, D] in fp32 (or fp64)."""
    lse: Tensor
    """[batch, heads, rows] in the same dtype."""


class Operands(NamedTuple):
    """Rows and columns of one partial attention, with as many heads each."""

    query: Tensor
    key: Tensor
    value: Tensor


def empty_result(query: Tensor) -> PartialResult:
    """Return the result of no columns for queries [batch, heads, rows, D]."""
    kind = torch.promote_types(query.dtype, torch.float32)
    return PartialResult(
        torch.zeros_like(query, dtype=kind), query.new_full(query.shape[:3], NOTHING, dtype=kind)
    )


def merge(one: PartialResult, other: PartialResult) -> PartialResult:
    """Return the result over the columns of both."""
    lse = torch.logaddexp(one.lse, other.lse)
    parts = [each.out * (each.lse - lse).exp()[..., None] for each in (one, other)]
    return PartialResult(parts[0] + parts[1], lse)


def attend(
    operands: Operands, rows: range, columns: range, pattern: Pattern, scale: float
) -> PartialResult | None:
    """Return the result of some rows over some columns; None if no row attends to any."""
    if not pattern.meets(rows, columns):
        return None
    query, key, value = operands
    found = []
    for cut, some in _cuts(rows, columns, pattern, query):
        piece = Operands(query[:, :, cut], key, value)
        found.append(_attend(piece, some, columns, pattern, scale))
    return PartialResult(
        torch.cat([one.out for one in found], 2), torch.cat([o.lse for o in found], 2)
    )


def gradients(
    gradient: Tensor,
    operands: Operands,
    result: PartialResult,
    rows: range,
    columns: range,
    pattern: Pattern,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor] | None:
    """Return the gradients of query, key and value that come from some rows over some columns.

    Args:
        gradient: that of the merged output, [batch, heads, rows, D].
        operands: as in `attend`.
        result: the merged output, in the dtype of `operands`, and log-sum-exp of these rows.
        rows: the rows, as positions of the sequence.
        columns: the columns.
        pattern: which of their pairs count.
        scale: factor of the scores.

    Returns:
        In fp32 (or fp64), each with the shape of its operand; None if no row attends to any.
    """
    if not pattern.meets(rows, columns):
        return None
    query, key, value = operands
    kind = result.lse.dtype
    of_query = []
    of_key, of_value = torch.zeros_like(key, dtype=kind), torch.zeros_like(value, dtype=kind)
    for cut, some in _cuts(rows, columns, pattern, query):
        piece = Operands(query[:, :, cut], key, value)
        known = PartialResult(result.out[:, :, cut], result.lse[:, :, cut])
        found = _backward(gradient[:, :, cut], piece, known, some, columns, pattern, scale)
        of_query.append(found[0].to(kind))
        of_key += found[1]
        of_value += found[2]
    return torch.cat(of_query, 2), of_key, of_value


def _cuts(
    rows: range, columns: range, pattern: Pattern, query: Tensor
) -> Iterator[tuple[slice, range]]:
    """Split rows so that masks and scores stay bounded."""
    if has_fused_attention(query.device) and (
        pattern.is_triangle(rows, columns) or not _needs_mask(rows, columns, pattern)
    ):
        yield slice(None), rows
        return
    most = max(1, _SCORES // len(columns))
    for start in range(0, len(rows), most):
        cut = slice(start, min(start + most, len(rows)))
        yield cut, rows[cut]


def _needs_mask(rows: range, columns: range, pattern: Pattern) -> bool:
    if not pattern.is_causal:
        return False
    is_below = columns.stop <= rows.start + 1
    is_near = pattern.window is None or rows.stop - columns.start <= pattern.window
    return pattern.documents is not None or not (is_below and is_near)


def _attend(
    operands: Operands, rows: range, columns: range, pattern: Pattern, scale: float
) -> PartialResult:
    query, key, value = operands
    kind = torch.promote_types(query.dtype, torch.float32)
    if has_fused_attention(query.device):
        is_triangle = pattern.is_triangle(rows, columns)
        bias = None if is_triangle else _bias(rows, columns, pattern, query)
        out, lse = fused_attention(query, key, value, bias, scale, is_causal=is_triangle)
        if bias is not None:  # rows without columns have a log-sum-exp of 0
            lse = lse.masked_fill(bias.amax(-1) == -torch.inf, NOTHING)
        return PartialResult(out.to(kind), lse.to(kind))
    with torch.autocast(query.device.type, enabled=False):
        scores = _scores(operands, rows, columns, pattern, scale)
        lse = scores.logsumexp(-1)
        lse = lse.masked_fill(lse == -torch.inf, NOTHING)
        return PartialResult((scores - lse[..., None]).exp() @ value.to(kind), lse)


def _backward(
    gradient: Tensor,
    operands: Operands,
    result: PartialResult,
    rows: range,
    columns: range,
    pattern: Pattern,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    query, key, value = operands
    if has_fused_attention(query.device):
        is_triangle = pattern.is_triangle(rows, columns)
        bias = None if is_triangle else _bias(rows, columns, pattern, query)
        whole = (result.out.contiguous(), result.lse.contiguous())
        return fused_attention_backward(
            gradient.contiguous(), operands, whole, bias, scale, is_causal=is_triangle
        )
    kind = result.lse.dtype
    wide = gradient.to(kind)
    weights = (_scores(operands, rows, columns, pattern, scale) - result.lse[..., None]).exp()
    inner = (wide * result.out.to(kind)).sum(-1, keepdim=True)
    of_scores = weights * (wide @ value.to(kind).mT - inner) * scale
    return of_scores @ key.to(kind), of_scores.mT @ query.to(kind), weights.mT @ wide


def _scores(
    operands: Operands, rows: range, columns: range, pattern: Pattern, scale: float
) -> Tensor:
    query, key, _ = operands
    kind = torch.promote_types(query.dtype, torch.float32)
    scores = query.to(kind) @ key.to(kind).mT * scale
    mask = pattern.mask(rows, columns, query.device)
    return scores if mask is None else scores.masked_fill(~mask, -torch.inf)


def _bias(rows: range, columns: range, pattern: Pattern, query: Tensor) -> Tensor | None:
    mask = pattern.mask(rows, columns, query.device)
    if mask is None:
        return None
    return torch.zeros_like(mask, dtype=query.dtype).masked_fill(~mask, -torch.inf)


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
    return across_all(tuple(tensors), *_moves(group))


def contiguous(tensors: Sequence[Tensor], group: dist.ProcessGroup) -> tuple[Tensor, ...]:
    """Turn this rank's chunks into consecutive positions."""
    to_chunks, back = _moves(group)
    return across_all(tuple(tensors), back, to_chunks)


def _moves(group: dist.ProcessGroup) -> tuple[WayOfAll, WayOfAll]:
    return lambda x: _moved(x, group, True), lambda x: _moved(x, group, False)


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
                    operands = operands_of(query[:, :, cut], held[:, :, :, place])
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
                    operands = operands_of(query[:, :, cut], held[:, :, :, place])
                    found = gradients(
                        gradient[:, :, cut], operands, known, positions, columns, pattern, scale
                    )
                    if found is None:
                        continue
                    of_query[:, :, cut] += found[0]
                    for total, part in zip(of_held[:, :, :, place], found[1:], strict=True):
                        total += ungrouped(part, key.shape[1])
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


def operands_of(query: Tensor, held: Tensor) -> Operands:
    """Expand key and value to one for each head of query [batch, heads, ...]."""
    groups = query.shape[1] // held.shape[2]
    key, value = held.repeat_interleave(groups, 2) if groups > 1 else held
    return Operands(query, key, value)


def ungrouped(gradient: Tensor, heads: int) -> Tensor:
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
