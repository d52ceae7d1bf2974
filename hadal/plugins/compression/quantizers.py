"""Values rounded to few bits, group by group; a gradient passes unchanged.

An input is split evenly into groups in memory order, each with a scale of its own. Values are those
of DeepSpeed, except for groups without a range, where it divides by zero: a group of zeros stays
zero, and a constant one stays as it is.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

# Integers up to 2 ** 8 are exact in bf16.
_NARROW_BITS = 8


def quantize(
    x: Tensor, bits: int, groups: int = 1, *, symmetric: bool = True, stochastic: bool = False
) -> Tensor:
    """Return `x` with at most `2 ** bits` values per group, in its shape and dtype.

    With 2 bits the values are -a, 0 and a; with 1 bit -a and a (and 0 for zeros). Both need
    `symmetric`, and round to the nearest.

    Args:
        x: any shape, floating point; `groups` divides its elements.
        bits: 1 or more.
        groups: number of groups.
        symmetric: scales without an offset.
        stochastic: whether noise of at most half a step is added before rounding.
    """
    if bits <= 2:
        return _ternary(x, groups) if bits == 2 else _binary(x, groups)
    return in_steps(x, bits, groups, symmetric=symmetric, stochastic=stochastic)


def in_steps(
    x: Tensor, bits: int, groups: int = 1, *, symmetric: bool = True, stochastic: bool = False
) -> Tensor:
    """Return `x` in equal steps for any number of bits, as `quantize` does for 3 and more."""
    flat = x.reshape(groups, -1)
    wide = _widened(flat, bits)
    low, high = _range_of(wide, symmetric=symmetric)
    noise = torch.empty_like(wide).uniform_(-0.5, 0.5) if stochastic else None
    found = _rounded(wide, bits, low, high, symmetric=symmetric, noise=noise)
    return found.to(x.dtype).reshape(x.shape)


def quantize_in_range(
    x: Tensor, bits: int, low: Tensor, high: Tensor, *, symmetric: bool
) -> Tensor:
    """Return `x` with at most `2 ** bits` values in a range that was measured before.

    Args:
        x: any shape, floating point.
        bits: 3 or more.
        low: the smallest value, 0-dim.
        high: the largest value, 0-dim.
        symmetric: whether the range is that of the larger magnitude, around zero.
    """
    low, high = low.to(x.dtype), high.to(x.dtype)
    if symmetric:
        high = torch.maximum(low.abs(), high)
    return _rounded(x, bits, low, high, symmetric=symmetric, noise=None)


def scales_of(
    x: Tensor, bits: int, groups: int = 1, *, symmetric: bool = True
) -> tuple[Tensor, Tensor | None]:
    """Return the scale and the zero of each group, from which `quantize` computes its values.

    Each value is an integer times the scale, plus the zero; both are (groups, 1).
    """
    flat = x.reshape(groups, -1)
    if bits <= 2:
        return (_ternary_scale(flat)[0] if bits == 2 else _binary_scale(flat)), None
    low, high = _range_of(_widened(flat, bits), symmetric=symmetric)
    scale, zero, is_flat = _scale_and_zero(bits, low, high, symmetric=symmetric)
    return scale, None if symmetric else torch.where(is_flat, low, zero)


def _widened(flat: Tensor, bits: int) -> Tensor:
    return flat.float() if bits > _NARROW_BITS and flat.element_size() < 4 else flat


def _range_of(flat: Tensor, *, symmetric: bool) -> tuple[Tensor, Tensor]:
    if symmetric:
        return flat.new_zeros(()), flat.abs().amax(1, keepdim=True)
    return flat.amin(1, keepdim=True), flat.amax(1, keepdim=True)


def _scale_and_zero(
    bits: int, low: Tensor, high: Tensor, *, symmetric: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the scales, the zeros, and whether a group has no range."""
    steps: int = 2**bits
    scale = 2 * high / steps if symmetric else (high - low) / steps
    is_flat = scale == 0
    divisor = torch.where(is_flat, torch.ones_like(scale), scale)
    zero = torch.zeros_like(scale) if symmetric else (low / divisor).round() * scale
    return scale, zero, is_flat


def _rounded(
    x: Tensor, bits: int, low: Tensor, high: Tensor, *, symmetric: bool, noise: Tensor | None
) -> Tensor:
    if symmetric:
        levels, scale = symmetric_levels(x, bits, high, noise)
        return levels.mul_(scale)
    scale, zero, is_flat = _scale_and_zero(bits, low, high, symmetric=False)
    divisor = torch.where(is_flat, torch.ones_like(scale), scale)
    level = ((x - zero) / divisor).add_(0 if noise is None else noise)
    found = level.round_().clamp_(0, 2**bits - 1).mul_(scale).add_(zero)
    return torch.where(is_flat, x, found)


def symmetric_levels(
    x: Tensor, bits: int, high: Tensor, noise: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return integers, in the dtype of `x`, and the scale that turns them into values around zero.

    Args:
        x: any shape, floating point.
        bits: 3 or more.
        high: the largest magnitude of each group; broadcast to `x`.
        noise: added before rounding, in the shape of `x`.
    """
    steps: int = 2**bits
    scale = 2 * high / steps
    level = x / torch.where(scale == 0, torch.ones_like(scale), scale)
    if noise is not None:
        level.add_(noise)
    return level.round_().clamp_(-steps // 2, steps // 2 - 1), scale


def _ternary(x: Tensor, groups: int) -> Tensor:
    flat = x.reshape(groups, -1)
    alpha, is_kept = _ternary_scale(flat)
    return (flat.sign() * is_kept * alpha).reshape(x.shape)


def _ternary_scale(flat: Tensor) -> tuple[Tensor, Tensor]:
    size = flat.abs()
    is_kept = size > 0.7 * size.mean(1, keepdim=True)
    count = is_kept.sum(1, keepdim=True).clamp(min=1)
    return (size * is_kept).sum(1, keepdim=True) / count, is_kept


def _binary(x: Tensor, groups: int) -> Tensor:
    flat = x.reshape(groups, -1)
    return (flat.sign() * _binary_scale(flat)).reshape(x.shape)


def _binary_scale(flat: Tensor) -> Tensor:
    return flat.abs().mean(1, keepdim=True)


class StraightThrough(torch.autograd.Function):
    """Replaces a tensor by another in forward; passes the gradient to the first one unchanged."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, shown: Tensor) -> Tensor:
        """Return `shown`."""
        del ctx, x
        return shown.view_as(shown)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Any, None]:
        """Pass the gradient to `x`."""
        del ctx
        return gradients[0], None


def straight_through(x: Tensor, shown: Tensor) -> Tensor:
    """Return `shown`, whose gradient goes to `x`."""
    found: Tensor = StraightThrough.apply(x, shown)  # type: ignore[no-untyped-call]
    return found


def largest(scores: Tensor, ratio: float) -> Tensor:
    """Return 1.0 for the largest values and 0.0 for the rest, in shape and dtype of `scores`.

    Args:
        scores: any shape.
        ratio: the fraction to keep, 0 to 1; the number is rounded up. Among equal values, the
            first are kept.
    """
    flat = scores.reshape(-1)
    count = math.ceil(ratio * flat.numel())
    order = flat.argsort(descending=True, stable=True)
    mask = torch.zeros_like(flat)
    mask[order[:count]] = 1.0
    return mask.reshape(scores.shape)
