"""Attention over the blocks of a layout, forward and backward.

On CPUs each part of the plan (see plan.py) is computed by torch's fused attention on gathered
blocks, and the parts are merged by their log-sum-exp. Backward calls the fused backward of each
part with the merged output and log-sum-exp: dS = P (dP - rowsum(dO O)) with P = exp(S - lse) holds
for every column on its own, so the sum over the parts is exact. No tensor has a row and a
column for each token, and a chunk of gathered blocks fits in a processor's cache.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from hadal.device import (
    fused_attention,
    fused_attention_backward,
    gathered_numel,
    has_flex_attention,
    has_fused_attention,
)
from hadal.errors import ModelError, NotBuiltYetError
from hadal.plugins.sparse_attention.flex import Scores, attend, flex
from hadal.plugins.sparse_attention.masks import RUN, Group, Masks, Part, parts_of

# Shorter sequences are computed whole, with a mask: the overhead of blocks would be larger.
_SHORT = 1024
# A layout is computed whole, with a mask, if its blocks would take longer than all pairs: if its
# fraction of the pairs, with scattered ones counted this many times, exceeds one. The mask is
# [layouts, L, L]: beyond this many elements it would cost more memory than blocks save.
_FULL, _SCATTERED, _LARGEST_MASK = 1.0, 2.0, 1 << 26
# The log-sum-exp of a row without columns; finite, so that differences are defined.
_NOTHING = -1e30


class BlockLayout:
    """A layout with its cached derived values.

    Args:
        layout: [heads, n, n] of any integer or boolean dtype; 1 head if all share one layout.
        block: edge of a block in tokens.

    Raises:
        ModelError: it has another shape.
    """

    def __init__(self, layout: Tensor, block: int) -> None:
        if layout.dim() != 3 or layout.shape[1] != layout.shape[2]:
            raise ModelError(
                f"a layout has shape {tuple(layout.shape)}; expected [heads, blocks, blocks]"
            )
        found = layout.detach().to("cpu").bool()
        if len(found) > 1 and bool((found == found[:1]).all()):
            found = found[:1]
        self.layout = found
        """Bool, [1 or heads, n, n], on the CPU."""
        self.block = block
        self.is_dense = bool(found.all())
        self._on: dict[torch.device, Tensor] = {}
        self._parts: dict[tuple[bool, bool], list[Part]] = {}
        self._chunks: dict[tuple[torch.Size, torch.device, bool, bool], list[list[Group]]] = {}
        self.kept: dict[Any, Any] = {}
        """Further derived values, such as masks, by key."""

    @property
    def length(self) -> int:
        """The number of tokens."""
        return self.layout.shape[1] * self.block

    def on(self, device: torch.device) -> Tensor:
        """Return `layout` on a device, where it stays."""
        if device not in self._on:
            self._on[device] = self.layout.to(device)
        return self._on[device]

    def is_full(self, *, is_causal: bool) -> bool:
        """Return True if the blocks take longer than all pairs with a mask."""
        heads, count = self.layout.shape[:2]
        if heads * self.length**2 > _LARGEST_MASK:
            return False
        key = ("share", is_causal)
        if key not in self.kept:
            pairs = 0.0
            for part in self._parts_of(is_causal=is_causal, splits=True):
                for group in part:
                    entries, rows = group.rows.shape
                    slower = _SCATTERED if rows * self.block <= RUN else 1.0
                    pairs += slower * entries * rows * group.columns.shape[1]
            self.kept[key] = pairs / (heads * count**2)
        share: float = self.kept[key]
        return share > _FULL

    def _parts_of(self, *, is_causal: bool, splits: bool) -> list[Part]:
        parts = self._parts.get((is_causal, splits))
        if parts is None:
            parts = parts_of(self.layout, self.block, is_causal=is_causal, splits=splits)
            self._parts[is_causal, splits] = parts
        return parts

    def chunks(
        self, shape: torch.Size, device: torch.device, *, is_causal: bool, splits: bool
    ) -> list[list[Group]]:
        """Return, for each part, groups of bounded size over [batch x heads x n] blocks."""
        key = (shape, device, is_causal, splits)
        if key not in self._chunks:
            parts = self._parts_of(is_causal=is_causal, splits=splits)
            self._chunks.clear()  # one shape at a time
            self._chunks[key] = [
                [chunk for group in part for chunk in self._spread(group, shape, device)]
                for part in parts
            ]
        return self._chunks[key]

    def _spread(self, group: Group, shape: torch.Size, device: torch.device) -> Iterator[Group]:
        """Repeat a group for each sample (and head), and split it."""
        batch, heads, _, width = shape
        count, own = self.layout.shape[1], len(self.layout)
        repeats = batch * heads // own
        first = torch.arange(repeats, device="cpu")[:, None, None] * (own * count)
        rows = (group.rows + first).flatten(0, 1).to(device)
        columns = (group.columns + first).flatten(0, 1).to(device)
        widest = max(rows.shape[1], columns.shape[1]) * self.block * width
        most = max(1, gathered_numel(device) // widest)
        for some, others in zip(rows.split(most), columns.split(most), strict=True):
            yield Group(some, others, group.ends_on_diagonal)


def sparse_attention(  # noqa: PLR0913 - all that an attention function may be given
    query: Tensor,
    key: Tensor,
    value: Tensor,
    layout: BlockLayout,
    masks: Masks | None = None,
    scale: float | None = None,
    *,
    first_row: int | None = None,
    first_key: int = 0,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Return softmax(query key^T scale + masks) value over the blocks of a layout.

    A row without any column gives 0. Scores with a `softcap` are computed by plain operations.

    Args:
        query: [batch, heads, rows, D]; under autocast it is cast, as torch's attention does.
        key, value: [batch, heads, L, D], of the same dtype and device.
        layout: the blocks to compute, of L tokens rounded up to a block.
        masks: terms added to the scores.
        scale: factor of the scores; 1 / sqrt(D) by default.
        first_row: the position of the first query if there are fewer queries than keys; by default
            they are the last ones.
        first_key: the position of the first key. If it is not 0, there are fewer queries than
            positions, and `masks` cover only the given keys.
        softcap: products become softcap * tanh(product / softcap) before masks are added.
        sinks: [heads], the score of one more key with a value of zero for each head.

    Returns:
        [batch, heads, rows, D].

    Raises:
        ModelError, NotBuiltYetError: shapes do not fit each other.
    """
    masks = masks or Masks()
    if torch.is_autocast_enabled(query.device.type):
        kind = torch.get_autocast_dtype(query.device.type)
        query, key, value = (each.to(kind) for each in (query, key, value))
    masks = masks.of_dtype(query.dtype)
    rows, length = query.shape[2], first_key + key.shape[2]
    _check_shapes(query, key, value, layout, length)
    factor = 1.0 / math.sqrt(query.shape[-1]) if scale is None else scale
    scores = Scores(factor, softcap, sinks)
    if rows < length or (
        not has_flex_attention(query.device)
        and (length < _SHORT or _is_better_whole(layout, scores, is_causal=masks.is_causal))
    ):
        first = length - rows if first_row is None else first_row
        return _dense(query, key, value, layout, masks, scores, (first, first_key))
    query, key, value = (_to_blocks(each, layout.length) for each in (query, key, value))
    masks = masks.padded(length, layout.length, query)
    if masks.is_trained:
        found = _gathering(query, key, value, layout, masks, scores)
    elif has_flex_attention(query.device):
        found = flex(query, key, value, layout, masks, scores)
    elif has_fused_attention(query.device) and softcap is None:
        found = _TwoParts.apply(  # type: ignore[no-untyped-call]
            query, key, value, sinks, layout, masks, factor
        )
    else:
        found = _gathering(query, key, value, layout, masks, scores)
    return found[:, :, :rows]


def _is_better_whole(layout: BlockLayout, scores: Scores, *, is_causal: bool) -> bool:
    """Return whether computing all pairs at once is faster; plain operations would store them."""
    return scores.is_plain and (layout.is_dense or layout.is_full(is_causal=is_causal))


def _check_shapes(
    query: Tensor, key: Tensor, value: Tensor, layout: BlockLayout, length: int
) -> None:
    shapes = tuple(query.shape), tuple(key.shape), tuple(value.shape)
    if (
        key.shape != value.shape
        or query.shape[:2] != key.shape[:2]
        or shapes[0][-1] != shapes[1][-1]
    ):
        raise NotBuiltYetError(
            f"attention between query {shapes[0]}, key {shapes[1]} and value {shapes[2]} is not"
            " built yet; pass all three as [batch, heads, length, D], key and value with one shape"
        )
    dtypes = {one.dtype for one in (query, key, value)}
    if len(dtypes) > 1 or not query.is_floating_point():
        raise ModelError(
            f"query, key and value have the dtypes {query.dtype}, {key.dtype} and {value.dtype};"
            " expected one floating dtype"
        )
    heads, own = query.shape[1], len(layout.layout)
    if own not in (1, heads):
        raise ModelError(
            f"the query has {heads} heads, but the layout {own}; create the pattern with"
            f" num_heads={heads}, or set head_offset if this rank holds a part of the heads"
        )
    if -(-length // layout.block) * layout.block != layout.length:
        raise ModelError(
            f"the layout is for {layout.length} tokens in blocks of {layout.block}, but the"
            f" sequence has {length}; make one with make_layout for its length, rounded up"
        )


def _to_blocks(values: Tensor, length: int) -> Tensor:
    more = length - values.shape[2]
    return (functional.pad(values, (0, 0, 0, more)) if more else values).contiguous()


# ---- all at once ---------------------------------------------------------------------------------


def _dense(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    layout: BlockLayout,
    masks: Masks,
    scores: Scores,
    firsts: tuple[int, int],
) -> Tensor:
    """Return the attention by one call with a mask of [heads, rows, L].

    The positions of the first row and the first key are `firsts`.
    """
    first, first_key = firsts
    rows, length = query.shape[2], first_key + key.shape[2]
    places = torch.arange(first, first + rows, device=query.device)
    added = masks.of_tokens(places, key.shape[2], query)
    is_square = rows == length or not masks.is_causal
    if layout.is_dense and added is None and is_square and scores.is_plain:
        return functional.scaled_dot_product_attention(
            query, key, value, is_causal=masks.is_causal, scale=scores.scale
        )
    allowed = _token_mask(layout, places, (first, length), is_causal=masks.is_causal)
    mask = allowed[None, ..., first_key:]
    if added is not None:
        mask = added.masked_fill(~mask, -torch.inf)
    return attend(query, key, value, mask, scores)


def _token_mask(
    layout: BlockLayout, rows: Tensor, ends: tuple[int, int], *, is_causal: bool
) -> Tensor:
    """Return which tokens attend to which: bool, [1 or heads, rows, length].

    The first row and the length are `ends`.
    """
    key = (*ends, len(rows), rows.device, is_causal)
    kept = layout.kept.get("tokens")
    if kept is None or kept[0] != key:
        blocks = layout.on(rows.device)[:, rows // layout.block]
        found = blocks.repeat_interleave(layout.block, 2)[..., : ends[1]]
        if is_causal:
            found &= torch.arange(ends[1], device=rows.device) <= rows[:, None]
        kept = layout.kept["tokens"] = key, found  # one at a time
    mask: Tensor = kept[1]
    return mask


# ---- in gathered blocks --------------------------------------------------------------------------


def _blocks(values: Tensor, block: int) -> Tensor:
    """View [batch, heads, L, D] as [batch * heads * n, block * D]."""
    return values.view(-1, block * values.shape[-1])


def _taken(blocks: Tensor, which: Tensor, width: int) -> Tensor:
    """Gather [entries, blocks] of them as [entries, 1, tokens, D]."""
    return blocks.index_select(0, which.flatten()).view(len(which), 1, -1, width)


def _operands(flat: list[Tensor], group: Group, width: int) -> tuple[Tensor, Tensor, Tensor]:
    """Gather a group's blocks of query, key and value."""
    query = _taken(flat[0], group.rows, width)
    return query, _taken(flat[1], group.columns, width), _taken(flat[2], group.columns, width)


def _gathering(
    query: Tensor, key: Tensor, value: Tensor, layout: BlockLayout, masks: Masks, scores: Scores
) -> Tensor:
    """Return the attention by torch's public operations, in one part, with any gradient.

    Plain operations store the scores for backward; they are recomputed there instead.
    """
    heads, width = query.shape[1], query.shape[3]
    flat = [_blocks(each, layout.block) for each in (query, key, value)]
    parts = layout.chunks(query.shape, query.device, is_causal=masks.is_causal, splits=False)
    found, where = [], []
    for group in parts[0] if parts else ():
        bias = masks.of_blocks(group, heads, layout.block, query)
        taken = _operands(flat, group, width)
        own = scores.of_heads(group.rows[:, 0] // layout.layout.shape[1] % heads)
        if own.is_plain:
            out = attend(*taken, bias, own)
        else:
            out = checkpoint(
                attend, *taken, bias, own, use_reentrant=False, preserve_rng_state=False
            )
        found.append(out.reshape(-1, layout.block * width))
        where.append(group.rows.flatten())
    if not found:
        return query * 0
    total = torch.zeros_like(flat[0]).index_copy(0, torch.cat(where), torch.cat(found))
    return total.view(query.shape)


class _TwoParts(torch.autograd.Function):
    """The attention by fused kernels that give the log-sum-exp."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sinks: Tensor | None,
        layout: BlockLayout,
        masks: Masks,
        scale: float,
    ) -> Tensor:
        """Compute each part and merge them by their log-sum-exp."""
        block, heads, width = layout.block, query.shape[1], query.shape[3]
        flat = [_blocks(each, block) for each in (query, key, value)]
        parts = layout.chunks(query.shape, query.device, is_causal=masks.is_causal, splits=True)
        out = torch.zeros_like(flat[0])
        kind = torch.float64 if query.dtype is torch.float64 else torch.float32
        lse = torch.full((len(out), block), _NOTHING, dtype=kind, device=query.device)
        for number, part in enumerate(parts):
            for group in part:
                bias = masks.of_blocks(group, heads, block, query)
                taken = _operands(flat, group, width)
                found, sums = fused_attention(*taken, bias, scale)
                if bias is not None:
                    sums = sums.masked_fill(bias.amax(-1) == -torch.inf, _NOTHING)
                _put(out, lse, group.rows.flatten(), (found, sums), merges=number > 0)
        if sinks is not None:
            _put_sinks(out.view(query.shape), lse.view(query.shape[:3]), sinks)
        ctx.save_for_backward(query, key, value, sinks, out, lse)
        ctx.others = layout, masks, scale
        return out.view(query.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """Add up the gradients of the parts."""
        query, key, value, sinks, out, lse = ctx.saved_tensors
        layout, masks, scale = ctx.others
        block, heads, width = layout.block, query.shape[1], query.shape[3]
        flat = [_blocks(each, block) for each in (query, key, value, gradient.contiguous())]
        parts = layout.chunks(query.shape, query.device, is_causal=masks.is_causal, splits=True)
        # Sums over many chunks, in 16 bits, would lose small terms.
        totals = [torch.zeros_like(each, dtype=lse.dtype) for each in flat[:3]]
        for part in parts:
            for group in part:
                rows = group.rows.flatten()
                bias = masks.of_blocks(group, heads, block, query)
                taken = _operands(flat, group, width)
                result = (
                    _taken(out, group.rows, width),
                    lse.index_select(0, rows).view(len(group.rows), 1, -1),
                )
                onto = _taken(flat[3], group.rows, width)
                found = fused_attention_backward(onto, taken, result, bias, scale)
                places = rows, group.columns.flatten(), group.columns.flatten()
                for total, place, one in zip(totals, places, found, strict=True):
                    total.index_add_(0, place, one.reshape(len(place), -1).to(total.dtype))
        gradients = [total.to(query.dtype).view(query.shape) for total in totals]
        by_sinks = None
        if sinks is not None and ctx.needs_input_grad[3]:
            # A sink's value is zero, so only the second term of dS = P (dP - rowsum(dO O)) remains.
            sums = (flat[3].view(query.shape) * out.view(query.shape)).sum(-1, dtype=lse.dtype)
            shares = (sinks.to(lse.dtype)[:, None] - lse.view(sums.shape)).exp_()
            by_sinks = -(shares * sums).sum((0, 2)).to(sinks.dtype)
        return (*gradients, by_sinks, None, None, None)


def _put(
    out: Tensor, lse: Tensor, rows: Tensor, found: tuple[Tensor, Tensor], *, merges: bool
) -> None:
    """Write a chunk's output and log-sum-exp, merged with those of earlier parts."""
    block = lse.shape[1]
    new, sums = found[0].reshape(len(rows), block, -1), found[1].reshape(len(rows), block)
    if merges:
        old, before = out.index_select(0, rows).view_as(new), lse.index_select(0, rows)
        total = torch.logaddexp(before, sums)
        of_old, of_new = (before - total).exp_()[..., None], (sums - total).exp_()[..., None]
        new, sums = (old * of_old).add_(new * of_new).to(out.dtype), total
    out.index_copy_(0, rows, new.reshape(len(rows), -1))
    lse.index_copy_(0, rows, sums)


def _put_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> None:
    """Merge a key with a value of zero into the output and the log-sum-exp."""
    total = torch.logaddexp(lse, sinks.to(lse.dtype)[:, None])
    out *= (lse - total).exp_()[..., None].to(out.dtype)
    lse.copy_(total)
