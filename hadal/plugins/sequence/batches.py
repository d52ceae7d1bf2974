"""Splits batches of whole sequences into one slice for each rank: arithmetic on tensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from hadal.errors import SequenceError
from hadal.plugins.sequence.tiles import IGNORED

_TOKENS = ("input_ids", "inputs_embeds")


def length_of(batch: Mapping[str, Any]) -> int | None:
    """Return the length of a batch's sequences; None if it has none."""
    tokens = tokens_of(batch)
    return None if tokens is None else tokens.shape[1]


def tokens_of(batch: Mapping[str, Any]) -> Tensor | None:
    """Return a batch's sequences, [batch, length, ...]; None if it has none."""
    for name in _TOKENS:
        tokens = batch.get(name)
        if isinstance(tokens, Tensor) and tokens.dim() >= 2:
            return tokens
    return None


def padded(batch: Mapping[str, Any], size: int) -> dict[str, Any]:
    """Return a batch of whole sequences with shifted labels and a length that `size` divides.

    `labels` [batch, length] become `shift_labels`, each position's next token; the last position
    has none. Padding at the end has no targets, is masked, and continues the positions.

    Raises:
        SequenceError: there are no sequences, or a tensor has another length.
    """
    length = length_of(batch)
    if length is None:
        raise SequenceError(
            f"a batch with {_shown(batch)} has neither input_ids nor inputs_embeds [batch, length,"
            " ...]; sequences cannot be split over ranks without"
        )
    found = dict(batch)
    if isinstance(labels := found.pop("labels", None), Tensor):
        found["shift_labels"] = F.pad(labels[:, 1:], (0, 1), value=IGNORED)
    missing = -length % size
    for name, value in found.items():
        if is_cut(value):
            if value.shape[1] != length:
                raise SequenceError(
                    f"{name} has the shape {tuple(value.shape)}, but the batch's sequences"
                    f" {length} positions; expected [batch, {length}, ...]"
                )
            found[name] = _extended(name, value, missing) if missing else value
    return found


def check_padding(mask: Tensor) -> None:
    """Raise an error if a mask [batch, length] masks positions before others that count.

    Slices attend causally, without the mask, so only positions at the end stay unseen.
    """
    begins = (mask[:, :-1] == 0) & (mask[:, 1:] != 0)
    if bool(begins.any()):
        sample = int(begins.any(1).nonzero()[0])
        raise SequenceError(
            f"attention_mask of sample {sample} masks positions before others; sequences that ranks"
            " share are padded at the end: set the tokenizer's padding_side = 'right', or give"
            " position_ids that begin at 0 after the padding"
        )


def is_cut(value: Any) -> bool:
    """Return True if a batch's value is split along the sequence."""
    return isinstance(value, Tensor) and value.dim() >= 2


def slice_of_rank(value: Tensor, rank: int, size: int) -> Tensor:
    """Return a rank's slice of a tensor [batch, length, ...] whose length `size` divides."""
    length = value.shape[1] // size
    return value[:, rank * length : (rank + 1) * length].contiguous()


def _extended(name: str, value: Tensor, missing: int) -> Tensor:
    if name == "position_ids":
        more = torch.arange(1, missing + 1, dtype=value.dtype, device=value.device)
        return torch.cat([value, value[:, -1:] + more], dim=1)
    fill = IGNORED if "labels" in name else 0
    return F.pad(value, (*(0, 0) * (value.dim() - 2), 0, missing), value=fill)


def _shown(batch: Mapping[str, Any]) -> str:
    return ", ".join(map(str, batch)) or "nothing"
