"""Shorter sequences: the inputs of a forward, truncated to their first tokens."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from hadal.errors import UsageError

_TOKENS = ("input_ids", "tokens", "inputs_embeds")
_POSITIONS = ("position_ids", "cache_position")
_PACKED = ("cu_seq_lens_q", "cu_seqlens", "cu_seqlens_q")


def truncate(batch: Any, length: int, *, name: str = "") -> Any:
    """Return a batch whose sequences have at most `length` tokens, the first ones.

    The full length S is that of `input_ids`, `tokens` or `inputs_embeds`, or else of the first
    integer tensor [batch, S, ...], or floating-point tensor [batch, S, width]. Each tensor
    [batch, S, ...] is truncated, and masks in both of their last dimensions. Nothing is copied.

    Args:
        batch: tensors in mappings, tuples and lists.
        length: tokens to keep.
        name: the name of the batch, if it is a single tensor.

    Raises:
        UsageError: nothing in it has a sequence, or sequences are packed into one.
    """
    flat = [(key, value) for key, value in _tensors(batch, name) if value.dim()]
    reference = _reference(flat)
    if reference is None:
        shapes = ", ".join(f"{key or '?'} {list(value.shape)}" for key, value in flat) or "none"
        raise UsageError(
            f"curriculum_learning found no sequences to truncate; expected integers [batch, length]"
            f" or floating-point values [batch, length, width], got {shapes}. Give forward a"
            " parameter curriculum_seqlen, and truncate there"
        )
    full = reference.shape[1]
    if length >= full:
        return batch
    packed = [key for key, _ in flat if key in _PACKED]
    if packed:
        raise UsageError(
            f"curriculum_learning cannot truncate packed sequences ({packed[0]} is given); pad them"
            " to one length, or give forward a parameter curriculum_seqlen, and truncate there"
        )
    return _cut(batch, name, reference.shape[0], full, length)


def _tensors(value: Any, name: str) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        yield name, value
    elif isinstance(value, Mapping):
        for key, each in value.items():
            yield from _tensors(each, str(key))
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _tensors(each, name)


def _reference(flat: list[tuple[str, Tensor]]) -> Tensor | None:
    """Return the tensor that determines the number of sequences and their length."""
    deep = [(key, value) for key, value in flat if value.dim() >= 2]
    for wanted in _TOKENS:
        for key, value in deep:
            if key == wanted:
                return value
    whole = (value for _, value in deep if _is_integer(value))
    wide = (value for key, value in deep if value.dim() == 3 and "mask" not in key)
    return next(chain(whole, wide), None)


def _is_integer(value: Tensor) -> bool:
    return not (value.is_floating_point() or value.is_complex() or value.dtype == torch.bool)


def _cut(value: Any, name: str, rows: int, full: int, length: int) -> Any:
    if isinstance(value, Tensor):
        for dim in _dims_of_sequence(name, value.shape, rows, full):
            value = value.narrow(dim, 0, length)
        return value
    if isinstance(value, Mapping):
        changed: Any = copy.copy(value)
        for key, each in value.items():
            changed[key] = _cut(each, str(key), rows, full, length)
        return changed
    if isinstance(value, list | tuple):
        cut = [_cut(each, name, rows, full, length) for each in value]
        return type(value)(*cut) if hasattr(value, "_fields") else type(value)(cut)
    return value


def _dims_of_sequence(name: str, shape: tuple[int, ...], rows: int, full: int) -> list[int]:
    """Return the sequence dimensions of a tensor."""
    count = len(shape)
    if name in _POSITIONS:
        return [count - 1] if count and shape[-1] == full else []
    is_shared = count == 2 and shape[0] == shape[1] == full != rows
    if "mask" in name and (count >= 3 or is_shared):
        return [dim for dim in (count - 2, count - 1) if shape[dim] == full]
    return [1] if count >= 2 and shape[1] == full else []
