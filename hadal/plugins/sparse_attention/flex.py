"""The same attention by torch's FlexAttention, for accelerators that have it; caps and sinks."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional

from hadal.device import compiled_apart
from hadal.plugins.sparse_attention.masks import Masks, PairMask

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

    from hadal.plugins.sparse_attention.attention import BlockLayout


@dataclass(frozen=True, slots=True)
class Scores:
    """The steps from products of queries and keys to weights."""

    scale: float
    softcap: float | None = None
    """Scaled products become softcap * tanh(product / softcap), before anything is added."""
    sinks: Tensor | None = None
    """[heads] (or one for each entry of a batch): the score of a key with a value of zero."""

    @property
    def is_plain(self) -> bool:
        """True if torch's fused attention computes them."""
        return self.softcap is None and self.sinks is None

    def of_heads(self, heads: Tensor) -> Scores:
        """Return the scores of a batch whose entries are of these heads, [entries]."""
        if self.sinks is None:
            return self
        return replace(self, sinks=self.sinks[heads][:, None])


def attend(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scores: Scores
) -> Tensor:
    """Return the attention of all rows to all columns; one that sees no column gives 0.

    Args:
        query: [batch, heads, rows, D].
        key, value: [batch, heads, L, D].
        mask: broadcastable to [batch, heads, rows, L]: bool (False masks the pair), or added.
        scores: its sinks are [heads] or [batch, heads].

    Returns:
        [batch, heads, rows, D]. Capped scores and sinks are computed in at least fp32.
    """
    if scores.is_plain:
        return functional.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, scale=scores.scale
        )
    wide = torch.promote_types(query.dtype, torch.float32)
    found = (query @ key.transpose(-2, -1)).to(wide) * scores.scale
    if scores.softcap is not None:
        found = (found / scores.softcap).tanh() * scores.softcap
    empty = None
    if mask is not None and mask.dtype is torch.bool:
        found, empty = found.masked_fill(~mask, -torch.inf), ~mask.any(-1, keepdim=True)
    elif mask is not None:
        found, empty = found + mask, mask.amax(-1, keepdim=True) == -torch.inf
    if empty is not None:
        found = found.masked_fill(empty, 0.0)  # the softmax of nothing has no gradient
    if scores.sinks is not None:
        column = scores.sinks.to(wide)[..., None, None].expand(*found.shape[:-1], 1)
        weights = torch.cat([found, column], -1).softmax(-1)[..., :-1]
    else:
        weights = found.softmax(-1)
    if empty is not None:
        weights = weights.masked_fill(empty, 0.0)
    return weights.to(value.dtype) @ value


_log = logging.getLogger("hadal")
# Each kind takes a GPU's compiler seconds: report these.
_MANY = (16, 64, 256, 1024)
# Edge of the blocks that the kernel skips or computes; its own tiles divide it.
_EDGE = 128


def flex(
    query: Tensor, key: Tensor, value: Tensor, layout: BlockLayout, masks: Masks, scores: Scores
) -> Tensor:
    """Return the attention of [batch, heads, L, D] tensors, L being the layout's length."""
    from torch.nn.attention import flex_attention as kernels

    block_mask = block_mask_of(layout, query.device, is_causal=masks.is_causal)
    function = _compiled(query.shape, *_kind(query, layout, masks, scores))
    choices = {"block_mask": block_mask, "scale": scores.scale}
    choices["score_mod"] = _score_of(masks, scores.softcap)
    found: Tensor
    if scores.sinks is None:
        found = function(query, key, value, **choices)
        return found
    lse: Tensor
    if hasattr(kernels, "AuxRequest"):
        found, sums = function(
            query, key, value, return_aux=kernels.AuxRequest(lse=True), **choices
        )
        lse = sums.lse
    else:  # of older torches
        found, lse = function(query, key, value, return_lse=True, **choices)
    # A key with a value of zero reduces the weights of all others.
    share = (lse - scores.sinks.to(lse.dtype)[:, None]).sigmoid()
    less: Tensor = found * share[..., None].to(found.dtype)
    return less


def _kind(query: Tensor, layout: BlockLayout, masks: Masks, scores: Scores) -> Iterator[object]:
    """Yield what a kernel is compiled for beside the shape; the pattern's values are inputs."""
    yield from (query.dtype, query.device, torch.is_grad_enabled())
    yield from (layout.block, len(layout.layout) == 1, masks.is_causal, masks.keys is None)
    yield from (scores.scale, scores.softcap, scores.sinks is None)
    for one in masks.pairs:
        yield from (one.multiplies, one.values.dtype, one.values.shape)


@cache
def _compiled(shape: torch.Size, *others: object) -> Callable[..., Any]:
    """Return the function for calls of one kind, which all layers share.

    A function for all kinds would be compiled again for each, up to torch's limit; beyond that it
    would store the scores of all pairs.
    """
    from torch.nn.attention.flex_attention import flex_attention

    del others
    count = _compiled.cache_info().misses
    if count in _MANY:
        _log.warning(
            "FlexAttention is compiled for kind number %d of inputs, %s; pad sequences to a few"
            " lengths, and keep the batch size",
            count,
            tuple(shape),
        )
    return compiled_apart(flex_attention)


def block_mask_of(layout: BlockLayout, device: torch.device, *, is_causal: bool) -> BlockMask:
    """Return the layout as a BlockMask, which is cached with it.

    Kernel blocks that lie wholly in the layout are computed without the mask; partial blocks
    evaluate the layout (and causality) for each token.
    """
    key = ("flex", device, is_causal)
    if key not in layout.kept:
        layout.kept[key] = _block_mask(layout, device, is_causal=is_causal)
    found: BlockMask = layout.kept[key]
    return found


def _block_mask(layout: BlockLayout, device: torch.device, *, is_causal: bool) -> BlockMask:
    from torch.nn.attention.flex_attention import BlockMask

    some, whole = coarse(layout.layout, layout.block, layout.length, is_causal=is_causal)
    partial = some & ~whole
    return BlockMask.from_kv_blocks(
        *_listed(partial, device),
        *_listed(whole, device),
        BLOCK_SIZE=_EDGE,
        mask_mod=_mask_mod(layout.on(device), layout.block, is_causal=is_causal),
        seq_lengths=(layout.length, layout.length),
    )


def coarse(layout: Tensor, block: int, length: int, *, is_causal: bool) -> tuple[Tensor, Tensor]:
    """Return which squares of _EDGE tokens have any computed pair, and which have only those.

    Both are bool, [heads, ceil(length / _EDGE), ceil(length / _EDGE)].
    """
    heads, count, _ = layout.shape
    squares = -(-length // _EDGE)
    # The range of blocks that each square touches; either size may divide the other, or neither.
    starts = torch.arange(squares, device=layout.device) * _EDGE
    first = starts // block
    last = (torch.clamp(starts + _EDGE, max=length) - 1) // block
    sums = layout.new_zeros(heads, count + 1, count + 1, dtype=torch.int64)
    lower = layout.tril() if is_causal else layout
    sums[:, 1:, 1:] = lower.long().cumsum(1).cumsum(2)

    def total(rows: Tensor, columns: Tensor) -> Tensor:
        return sums[:, rows[:, None], columns[None, :]]

    after = last + 1
    held = total(after, after) - total(first, after) - total(after, first) + total(first, first)
    size = (after - first)[:, None] * (after - first)[None, :]
    some, whole = held > 0, held == size
    if is_causal:
        # Blocks may be larger than squares, and a square on the diagonal is masked inside.
        some, whole = some.tril(), whole.tril(-1)
    return some, whole


def _listed(squares: Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the number of columns of each row, and the rows with these columns first."""
    numbers = squares.sum(-1).to(torch.int32)
    places = squares.int().argsort(dim=-1, descending=True, stable=True).to(torch.int32)
    return numbers[None].to(device), places[None].contiguous().to(device)


def _mask_mod(layout: Tensor, block: int, *, is_causal: bool) -> Callable[..., Tensor]:
    shared = len(layout) == 1

    def allowed(batch: Tensor, head: Tensor, row: Tensor, column: Tensor) -> Tensor:
        del batch
        found = layout[0 if shared else head, row // block, column // block]
        return found & (row >= column) if is_causal else found

    return allowed


def _score_of(masks: Masks, softcap: float | None) -> Callable[..., Tensor] | None:
    """Return the function that caps a score and adds the masks; None if it changes nothing."""
    keys, pairs = masks.keys, tuple(masks.pairs)
    if keys is None and not pairs and softcap is None:
        return None

    def score(value: Tensor, batch: Tensor, head: Tensor, row: Tensor, column: Tensor) -> Tensor:
        if softcap is not None:
            value = softcap * torch.tanh(value / softcap)
        if keys is not None:
            value = value + keys[batch, column]
        for one in pairs:
            value = _with_pair(value, one, (batch, head, row, column))
        return value

    return score


def _with_pair(value: Tensor, pairs: PairMask, place: tuple[Tensor, ...]) -> Tensor:
    batch, head, row, column = place
    samples, heads = pairs.values.shape[:2]
    given = pairs.values[
        batch if samples > 1 else torch.zeros_like(batch),
        head if heads > 1 else torch.zeros_like(head),
        row,
        column,
    ]
    if pairs.multiplies:
        return torch.where(given == 0, -torch.inf, value)
    return value + given
