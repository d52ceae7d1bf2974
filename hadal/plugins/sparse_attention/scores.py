"""Attention scores beyond a scaled product: soft caps and sinks."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional


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
