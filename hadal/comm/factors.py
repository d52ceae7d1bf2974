"""The arithmetic of a sum over ranks: factors and rounding."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

# Elements that are summed at a time: a block in float32 stays in the cache, and calls are few.
_BLOCK_NUMEL = 1 << 18


class Factors(NamedTuple):
    """The factors of a sum over ranks, before and after the addition."""

    before: float
    """Factor of the values on each rank, before they are rounded to the wire's dtype."""
    after: float
    """Factor of the sum, before it is rounded to its final dtype."""

    @classmethod
    def of_mean(cls, world_size: int) -> Factors:
        """Return the factors of the plain mean: nothing before, everything after."""
        return cls(1.0, 1.0 / world_size)

    def among(self, copies: int) -> Factors:
        """Return the factors of one of several groups, such that the mean over groups is these."""
        return Factors(self.before, self.after * copies)

    def divided_first(self, world_size: int) -> Factors:
        """Return factors for a sum in fp16, which overflows only if a value does."""
        before = min(self.before, 1.0 / world_size)
        return Factors(before, self.before * self.after / before)

    def at_owner_and_on_arrival(self, is_narrow: bool) -> tuple[float, float]:
        """Split `after` in two: for the owner's sum, and for after it has travelled on.

        A factor that shrinks the sum applies before a narrow dtype carries it, one above 1 after.
        """
        return (1.0, self.after) if is_narrow and self.after > 1.0 else (self.after, 1.0)


def for_the_wire(values: Tensor, before: float, wire: torch.dtype) -> Tensor:
    """Return `values` times `before`, rounded once to `wire`; `values` themselves if they fit."""
    if before == 1.0:
        return values if values.dtype == wire else values.to(wire)
    if values.dtype == wire:
        return values * before
    exact = torch.promote_types(values.dtype, torch.float32)
    return values.to(exact, copy=True).mul_(before).to(wire)


def sum_into(out: Tensor, pieces: Sequence[Tensor], after: float, accumulate: bool) -> None:
    """Put the sum of the 1-D `pieces`, times `after`, into `out`, or add it to what `out` holds.

    Computed in float32 (float64 for float64) and rounded once. `out` may be one of the pieces.
    """
    if len(pieces) == 1 and after == 1.0 and not accumulate:
        if out.data_ptr() != pieces[0].data_ptr():
            out.copy_(pieces[0])
        return
    if _is_pair(out, pieces) and after == 0.5 and not accumulate:
        # One pass in the commonest case: torch computes 16-bit lerp in float32.
        torch.lerp(pieces[0], pieces[1], 0.5, out=out)
        return
    exact = torch.promote_types(torch.float32, out.dtype)
    block = min(_BLOCK_NUMEL, out.numel()) if out.device.type == "cpu" else out.numel()
    is_apart = all(piece.data_ptr() != out.data_ptr() for piece in pieces)
    adds_in_place = not accumulate and is_apart and out.dtype == exact
    # A power of two rounds nothing, so that scaling and adding may be one.
    scales_at_last = accumulate and out.dtype == exact and math.frexp(after)[0] == 0.5
    total = torch.empty(0 if adds_in_place else block, dtype=exact, device=out.device)
    for start in range(0, out.numel(), max(block, 1)):
        target = out[start : start + block]
        part = target if adds_in_place else total[: target.numel()]
        part.copy_(pieces[0][start : start + block])
        for piece in pieces[1:]:
            part.add_(piece[start : start + block])
        if scales_at_last:
            target.add_(part, alpha=after)
            continue
        if after != 1.0:
            part.mul_(after)
        if accumulate:
            part.add_(target)
        if not adds_in_place:
            target.copy_(part)


def _is_pair(out: Tensor, pieces: Sequence[Tensor]) -> bool:
    """Return True for the mean of two 16-bit tensors in their own dtype."""
    alike = all(piece.dtype == out.dtype for piece in pieces)
    return len(pieces) == 2 and alike and out.dtype in (torch.bfloat16, torch.float16)
