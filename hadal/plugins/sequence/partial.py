"""Partial attention: some rows against some columns, forward and backward.

The attention of rows against all columns is merged from partial results by their log-sum-exp. With
the merged output and log-sum-exp, the backward of each gives its part of the gradients, exactly:
dS = P (dP - rowsum(dO O)) with P = exp(S - log-sum-exp) holds for every column separately.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from hadal.device import fused_attention, fused_attention_backward, has_fused_attention

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
