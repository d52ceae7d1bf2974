"""Random subsets of the tokens of sequences: draw, gather and scatter.

Indices are [batch, kept] and ascending, which preserves causal order. Masks and position
embeddings are gathered at the same indices as the hidden states.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from hadal.errors import UsageError

Order = Literal["batch_seq_dim", "seq_batch_dim"]
_CACHES = ("past_key_values", "past_key_value", "layer_past", "past")
_PACKED = ("cu_seq_lens_q", "cu_seq_lens_k", "cu_seqlens", "cu_seqlens_q", "cu_seqlens_k")
# The golden ratio shifts the draws of ranks against each other, evenly for any number of ranks.
_SHIFT = 0.6180339887498949


def draw(batch: int, length: int, kept: int, rank: int, device: torch.device) -> Tensor:
    """Return `kept` ascending indices for each sequence, [batch, kept], uniform without repeats.

    They come from torch's generator of the device, whose state a recomputation restores. Ranks
    with the same seed draw different indices.
    """
    scores = (torch.rand(batch, length, device=device) + rank * _SHIFT % 1.0) % 1.0
    index: Tensor = scores.topk(kept, dim=1, sorted=False).indices.sort(dim=1).values
    return index


def take(hidden: Tensor, index: Tensor, order: Order) -> Tensor:
    """Return the hidden states at the indices: [batch, kept, ...], or [kept, batch, ...]."""
    flat = hidden.flatten(0, 1).index_select(0, _rows(hidden, index, order))
    shape = index.shape if order == "batch_seq_dim" else index.T.shape
    return flat.view(*shape, *flat.shape[1:])


def put_back(hidden: Tensor, part: Tensor, index: Tensor, order: Order) -> Tensor:
    """Return hidden states with `part` at the indices; the others are unchanged."""
    part = part.flatten(0, 1).to(hidden.dtype)
    whole = hidden.flatten(0, 1).index_copy(0, _rows(hidden, index, order), part)
    return whole.view(hidden.shape)


def _rows(hidden: Tensor, index: Tensor, order: Order) -> Tensor:
    """Return the indices into hidden states whose first two dimensions are flattened."""
    sequences = torch.arange(index.shape[0], device=index.device)[:, None]
    if order == "batch_seq_dim":
        return (index + sequences * hidden.shape[1]).flatten()
    return (index * hidden.shape[1] + sequences).T.flatten()


@dataclass(frozen=True, slots=True)
class Subset:
    """Tokens that one call of a layer sees."""

    index: Tensor
    length: int
    """Tokens of the whole sequence."""
    order: Order
    mask_name: str | None
    is_causal: bool
    """True for decoders, whose masks may be shared by all sequences."""
    layer: str
    """The layer's full name, for messages."""
    number: int
    """The layer's number, which is its index in a cache."""

    def of(self, name: str, value: Any) -> Any:
        """Return an argument of the layer for only these tokens.

        Raises:
            UsageError: the argument has a sequence dimension but cannot be reduced.
        """
        if value is None or name.startswith("encoder_"):
            return value
        if name in _PACKED:
            raise self._refusal(name, value, "pad sequences to one length instead of packing them")
        if name in _CACHES:
            return self._without_cache(name, value)
        if name == self.mask_name or "mask" in name:
            return self._mask(name, value)
        if isinstance(value, list | tuple):
            taken = [self.of(name, each) for each in value]
            return type(value)(*taken) if hasattr(value, "_fields") else type(value)(taken)
        return self._positions(name, value) if isinstance(value, Tensor) else value

    def _without_cache(self, name: str, value: Any) -> None:
        """Leave out a cache that is empty for this layer: programs create one in training, too."""
        length = getattr(value, "get_seq_length", None)
        if length is None or length(self.number):
            raise self._refusal(name, value, "train without a cache (use_cache=False)")

    def _mask(self, name: str, value: Any) -> Tensor:
        if not isinstance(value, Tensor):
            raise self._refusal(name, value, "pass the mask as a tensor (attn_implementation=sdpa)")
        shape, length = value.shape, self.length
        kept = self.index.shape[1]
        if value.dim() == 2 and shape == (length, length) and not self._is_by_row(value):
            if self.is_causal:
                shared: Tensor = value[:kept, :kept]
                return shared
            raise self._refusal(name, value, "give it a batch dimension: mask[None, None]")
        taken: Tensor = value
        dims = (1,) if value.dim() == 2 else (value.dim() - 2, value.dim() - 1)
        for dim in dims:
            if shape[dim] == length:
                taken = self._along(taken, dim)
        return taken

    def _is_by_row(self, value: Tensor) -> bool:
        """Return whether a square mask has a row for each sequence of the batch."""
        is_integer = not value.is_floating_point() and value.dtype != torch.bool
        return len(value) == len(self.index) and is_integer

    def _positions(self, name: str, value: Tensor) -> Tensor:
        shape, sequences = value.shape, (1, len(self.index))
        if name == "cache_position":
            return value.narrow(0, 0, self.index.shape[1])
        by_order = self.order == "seq_batch_dim" and value.dim() >= 2
        if by_order and shape[0] == self.length and shape[1] in sequences:
            return self._along(value.transpose(0, 1), 1).transpose(0, 1)
        if value.dim() >= 2 and shape[0] in sequences and self.length in shape[1:]:
            return self._along(value, list(shape).index(self.length, 1))
        if self.length in shape and self.length not in sequences:
            raise self._refusal(
                name,
                value,
                "give it a batch dimension, since sequences keep different tokens",
            )
        return value

    def _along(self, value: Tensor, dim: int) -> Tensor:
        shape = [1] * value.dim()
        shape[0], shape[dim] = self.index.shape
        taken: Tensor = torch.take_along_dim(value, self.index.view(shape), dim)
        return taken

    def _refusal(self, name: str, value: Any, remedy: str) -> UsageError:
        kind = f"{type(value).__name__} {list(getattr(value, 'shape', ()))}".removesuffix(" []")
        return UsageError(
            f"random_ltd: layer {self.layer} drops tokens, but its argument {name} ({kind}) cannot"
            f" be reduced to the kept tokens; {remedy}"
        )
