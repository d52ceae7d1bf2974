"""Cuts of one dimension of a weight over ranks: sizes, whole heads, fused parts. Arithmetic."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from hadal.config.parallelism import Shape, shape_fault
from hadal.errors import ModelError

# Layers of a feed-forward block, and output layers, are not multiples of heads.
_FEED_FORWARD = frozenset({"gate_proj", "up_proj", "down_proj", "w1", "w2", "w3"})
HEAD_NAMES = ("lm_head", "embed_out")


def shard_sizes(
    total: int, ranks: int, *, heads: int | None = None, grain: int = 1, name: str = ""
) -> list[int]:
    """Return how many of `total` rows each rank gets; the first ranks get more.

    Args:
        total: the length of the dimension.
        ranks: the number of ranks.
        heads: key-value heads; rows of an attention are cut between them.
        grain: other rows are cut at multiples of this, and the last rank gets the rest.
        name: the layer's name, which distinguishes attentions from other layers.
    """
    if heads and total % heads == 0 and not _is_headless(name):
        return [count * (total // heads) for count in _even(heads, ranks)]
    if total < grain:
        grain = 1
    sizes = [count * grain for count in _even(total // grain, ranks)]
    sizes[-1] += total % grain
    return sizes


def _is_headless(name: str) -> bool:
    words = name.split(".")
    return "mlp" in name or any(word in _FEED_FORWARD or word in HEAD_NAMES for word in words)


def _even(total: int, ranks: int) -> list[int]:
    return [total // ranks + (rank < total % ranks) for rank in range(ranks)]


def subparameter_sizes(length: int, shape: Shape | None, dim: int) -> tuple[int, ...]:
    """Return the sizes of the parts that are fused along a dimension; one if nothing is fused.

    A shape splits the dimension into equal parts (`(3, -1)`) or parts of given sizes
    (`((16, 4, 4), -1)`).

    Raises:
        ModelError: the parts do not add up to `length`.
    """
    if shape is None:
        return (length,)
    fault = shape_fault(shape, dim)
    if fault is not None:
        raise ModelError(fault)
    entry = shape[dim]
    if isinstance(entry, tuple):
        if sum(entry) != length:
            raise ModelError(
                f"the parts {list(entry)} have {sum(entry):,} rows, but the weight {length:,}; set"
                " the rows of each part"
            )
        return entry
    if entry == -1:
        return (length,)
    if length % entry:
        raise ModelError(
            f"{length:,} rows do not split into {entry} equal parts; set the rows of each part, as"
            " [[a, b, c], -1]"
        )
    return (length // entry,) * entry


@dataclass(frozen=True, slots=True)
class WeightCut:
    """A dimension of a weight, and the parts of it that each rank holds."""

    dim: int
    parts: tuple[tuple[int, ...], ...]
    """For each fused part (one if nothing is fused), the size of every rank's slice of it."""

    @classmethod
    def of(cls, dim: int, parts: Sequence[Sequence[int]]) -> WeightCut:
        """Return the cut of parts along a dimension."""
        return cls(dim, tuple(tuple(sizes) for sizes in parts))

    @property
    def length(self) -> int:
        """The length of the whole dimension."""
        return sum(map(sum, self.parts))

    @property
    def sizes(self) -> list[int]:
        """The number of rows that each rank holds."""
        return [sum(shares) for shares in zip(*self.parts, strict=True)]

    def spans(self, rank: int) -> list[tuple[int, int]]:
        """Return first row and number of rows of each range that a rank holds, in its order."""
        starts = accumulate((sum(sizes) for sizes in self.parts), initial=0)
        return [
            (start + sum(sizes[:rank]), sizes[rank])
            for start, sizes in zip(starts, self.parts, strict=False)
        ]

    def take(self, whole: Tensor, rank: int) -> Tensor:
        """Return a rank's slice of a whole weight, as a copy."""
        pieces = [whole.narrow(self.dim, *span) for span in self.spans(rank)]
        return (
            pieces[0].clone(memory_format=torch.contiguous_format)
            if len(pieces) == 1
            else torch.cat(pieces, self.dim)
        )

    def join(self, shares: Sequence[Tensor]) -> Tensor:
        """Return the whole weight from all ranks' slices."""
        cut = [
            share.split([sizes[rank] for sizes in self.parts], self.dim)
            for rank, share in enumerate(shares)
        ]
        return torch.cat([piece for part in zip(*cut, strict=True) for piece in part], self.dim)
