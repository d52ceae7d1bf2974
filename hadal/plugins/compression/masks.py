"""Masks: which weights are kept, and the blocks by which they are chosen. Pure arithmetic.

A mask is 1.0 for what is kept and 0.0 for the rest.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from hadal.device import read_on_host
from hadal.plugins.compression.quantizers import largest, straight_through

# The largest fraction that a layer loses, so that a signal still passes.
MOST = 0.98
# The largest float32 as an integer of the same bits: those of floats above 0 are in their order.
_ALL_BITS = 0x7F800000
Sum = Callable[[Tensor], Tensor]
"""Sums integers over the ranks."""


def rows_of(weight: Tensor) -> Tensor:
    """Return the L1 norm of each row or output channel, in the shape of a mask of rows."""
    found = weight.abs().flatten(1).sum(1)
    return found.reshape(-1, *(1,) * (weight.dim() - 1))


def chosen(scores: Tensor, ratio: float) -> Tensor:
    """Return the mask of the largest scores; its gradient goes to the scores unchanged."""
    return straight_through(scores, largest(scores.detach(), ratio))


def masked_heads(weight: Tensor, mask: Tensor) -> Tensor:
    """Return a matrix whose columns are multiplied block by block.

    Args:
        weight: (out, heads * size).
        mask: (1, heads).
    """
    heads = mask.numel()
    blocks = weight.reshape(weight.shape[0], heads, -1)
    return (blocks * mask.reshape(1, heads, 1)).reshape(weight.shape)


@dataclass(frozen=True, slots=True)
class Blocks:
    """A pattern of blocks: `rows x columns`, or the `rows` smallest of every `columns` inputs."""

    rows: int
    columns: int
    is_n_of_m: bool

    @staticmethod
    def parse(pattern: str) -> Blocks | None:
        """Return the pattern of a text such as "4x1" or "2:4"; None if it is invalid."""
        found = re.fullmatch(r"([1-9]\d*)([x:])([1-9]\d*)", pattern)
        if found is None:
            return None
        rows, columns = int(found[1]), int(found[3])
        is_n_of_m = found[2] == ":"
        return None if is_n_of_m and rows >= columns else Blocks(rows, columns, is_n_of_m)

    @property
    def share(self) -> float:
        """The fraction of elements that are pruned if all units are."""
        return self.rows / self.columns if self.is_n_of_m else 1.0

    def fits(self, shape: tuple[int, int]) -> bool:
        """Return whether the blocks divide a matrix."""
        out, inputs = shape
        return inputs % self.columns == 0 and (self.is_n_of_m or out % self.rows == 0)

    def shape(self, shape: tuple[int, int]) -> tuple[int, int]:
        """Return the shape of a matrix's scores: one per block, or one per element."""
        out, inputs = shape
        return shape if self.is_n_of_m else (out // self.rows, inputs // self.columns)

    def reduce(self, values: Tensor) -> Tensor:
        """Return the scores of a matrix's values: their means over blocks."""
        if self.is_n_of_m:
            return values
        out, inputs = self.shape((values.shape[0], values.shape[1]))
        return values.reshape(out, self.rows, inputs, self.columns).mean((1, 3))

    def units(self, scores: Tensor) -> Tensor:
        """Return the scores, 1-D, of units that are pruned together: blocks or groups of inputs."""
        if not self.is_n_of_m:
            return scores.flatten()
        groups = scores.reshape(-1, self.columns)
        return (groups * self._candidates(groups)).mean(1)

    def mask(self, scores: Tensor, threshold: Tensor | float) -> Tensor:
        """Return the mask, in the shape of the scores, that prunes units up to a threshold."""
        if not self.is_n_of_m:
            return (scores > threshold).to(scores.dtype)
        groups = scores.reshape(-1, self.columns)
        is_pruned = (self.units(scores) <= threshold).unsqueeze(1)
        return (1.0 - is_pruned * self._candidates(groups)).to(scores.dtype).reshape(scores.shape)

    def expand(self, mask: Tensor) -> Tensor:
        """Return a mask for each element of the matrix."""
        if self.is_n_of_m:
            return mask
        return mask.repeat_interleave(self.rows, 0).repeat_interleave(self.columns, 1)

    def _candidates(self, groups: Tensor) -> Tensor:
        order = groups.argsort(dim=1, stable=True)
        return torch.zeros_like(groups).scatter_(1, order[:, : self.rows], 1.0)


def as_matrix(weight: Tensor) -> Tensor:
    """Return a weight as (out, inputs); the input channels of a convolution are innermost."""
    return weight if weight.dim() == 2 else weight.permute(0, 2, 3, 1).flatten(1)


def as_weight(matrix: Tensor, shape: torch.Size) -> Tensor:
    """Undo `as_matrix` for a weight of this shape."""
    if len(shape) == 2:
        return matrix
    out, channels, high, wide = shape
    return matrix.reshape(out, high, wide, channels).permute(0, 3, 1, 2)


def sparsity_at(number: int, last: int, target: float) -> float:
    """Return the fraction to prune at a pruning: 0 at the first, `target` at the last.

    Args:
        number: the number of prunings before this one.
        last: the number of the last pruning; 0 if there is only one.
        target: the fraction at the end.
    """
    if last == 0:
        return target
    # This order of operations rounds as DeepSpeed's does.
    kept = (1.0 - min(target, MOST)) ** (1 / last)
    return float(1.0 - kept**number)


def thresholds(
    units: list[Tensor], sizes: list[int], count: int, sum_: Sum, most: float = MOST
) -> list[Tensor | float]:
    """Return, for each layer, the score up to which its units are pruned; -1 prunes nothing.

    The `count` smallest of all layers, but no more than a fraction `most` of a layer. Waits for the
    device once, and once more each time that layers reach the fraction.

    Args:
        units: this rank's slices of each layer's scores, 0 or more, fp32.
        sizes: the number of each layer's scores on all ranks together.
        count: how many to prune.
        sum_: sums integers over the ranks.
        most: the largest fraction of one layer.
    """
    found: list[Tensor | float] = [-1.0] * len(units)
    free = list(range(len(units)))
    while free and count > 0:
        value = _smallest([units[index] for index in free], count, sum_)
        below = [(units[index] <= value).sum() for index in free]
        pruned = read_on_host(sum_(torch.stack(below)), "the blocks up to a score").tolist()
        full = [i for i, number in zip(free, pruned, strict=True) if number / sizes[i] > most]
        if not full:
            for index in free:
                found[index] = value
            break
        for index in full:
            limit = int(sizes[index] * most)
            found[index] = _smallest([units[index]], limit, sum_) if limit else -1.0
            count -= limit
            free.remove(index)
    return found


def _smallest(parts: list[Tensor], count: int, sum_: Sum) -> Tensor:
    """Return the value of the `count`-th smallest of all parts of all ranks, by bisection.

    The bounds stay on the device, so that the host does not wait in each round.
    """
    bits = [part.contiguous().view(torch.int32) for part in parts]
    low = torch.zeros((), dtype=torch.int64, device=bits[0].device)
    high = torch.full_like(low, _ALL_BITS)
    for _ in range(_ALL_BITS.bit_length()):
        middle = (low + high) // 2
        within = sum_(torch.stack([(part <= middle).sum() for part in bits]).sum().reshape(1))
        is_high = within[0] >= count
        low, high = torch.where(is_high, low, middle + 1), torch.where(is_high, middle, high)
    return low.to(torch.int32).view(torch.float32)
