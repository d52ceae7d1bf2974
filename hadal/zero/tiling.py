"""A linear layer in tiles, so that stage 3 never gathers it as a whole."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from hadal.errors import ModelError
from hadal.zero.leaves import mark


class TiledLinear(nn.Module):
    """A linear layer computed as a grid of smaller ones that are gathered one after another.

    For a layer so large that its gathered weight does not fit in memory: each tile is unsharded
    when it is needed and freed after its use. If sizes do not divide evenly, tiles differ by one
    row or column.

    Args:
        in_features: size of the input.
        out_features: size of the output.
        bias: whether to add a bias; the tiles of the last column hold it.
        in_splits: number of tiles along the input.
        out_splits: number of tiles along the output.
        input_is_already_split: the input is a list of its parts.
        combine_out_splits: return one tensor; otherwise a list of the output's parts.
        linear_cls: the class of a tile.
        init_linear: a linear layer whose values the tiles copy; by default each draws its own.
        **kwargs: further arguments of `linear_cls` (`dtype`, `device`).

    Raises:
        ModelError: there are more tiles than rows or columns, or `init_linear` has another shape.
    """

    def __init__(  # noqa: PLR0913 - the signature is DeepSpeed's
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        in_splits: int = 1,
        out_splits: int = 1,
        input_is_already_split: bool = False,
        combine_out_splits: bool = True,
        linear_cls: Callable[..., nn.Module] = nn.Linear,
        init_linear: nn.Linear | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__()
        self.in_features = in_features
        self.out_features = out_features
        self.input_is_already_split = input_is_already_split
        self.combine_out_splits = combine_out_splits
        self.in_parts = even_parts(in_features, in_splits)
        self.out_parts = even_parts(out_features, out_splits)
        last = in_splits - 1
        self.linears = nn.ModuleList(
            nn.ModuleList(
                linear_cls(columns, rows, bias=bias and place == last, **kwargs)
                for place, columns in enumerate(self.in_parts)
            )
            for rows in self.out_parts
        )
        # Each tile is gathered separately, inside a model's block too.
        mark((tile for row in self._rows() for tile in row), True)
        if init_linear is not None:
            self.copy_params_from(init_linear)

    def _rows(self) -> list[list[nn.Linear]]:
        return [
            [cast(nn.Linear, tile) for tile in cast(nn.ModuleList, row)] for row in self.linears
        ]

    def forward(self, input_: Tensor | Sequence[Tensor]) -> Tensor | list[Tensor]:
        """Return the product, computed tile by tile."""
        parts = (
            list(input_)
            if self.input_is_already_split
            else list(cast(Tensor, input_).split(self.in_parts, dim=-1))
        )
        outputs = [_sum_of(row, parts) for row in self._rows()]
        return torch.cat(outputs, dim=-1) if self.combine_out_splits else outputs

    @torch.no_grad()
    def copy_params_from(self, other: nn.Linear) -> None:
        """Copy the values of a linear layer of the same shape.

        Raises:
            ModelError: its shape or its bias differs.
        """
        rows = self._rows()
        shapes = ((self.out_features, self.in_features), rows[0][-1].bias is None)
        if shapes != (tuple(other.weight.shape), other.bias is None):
            raise ModelError(
                f"TiledLinear holds a weight of shape {shapes[0]} {_with_bias(shapes[1])}, but the"
                f" layer to copy {tuple(other.weight.shape)} {_with_bias(other.bias is None)}; give"
                " one of the same shape"
            )
        for row, weights in zip(rows, other.weight.split(self.out_parts), strict=True):
            for tile, weight in zip(row, weights.split(self.in_parts, dim=1), strict=True):
                tile.weight.copy_(weight)
        if other.bias is not None:
            for row, bias in zip(rows, other.bias.split(self.out_parts), strict=True):
                row[-1].bias.copy_(bias)


def _with_bias(has_none: bool) -> str:
    return "without a bias" if has_none else "with a bias"


def _sum_of(row: Sequence[nn.Linear], parts: Sequence[Tensor]) -> Tensor:
    total: Tensor | None = None
    for tile, part in zip(row, parts, strict=True):
        product = tile(part)
        total = product if total is None else total + product
    assert total is not None  # there is a tile in every row
    return total


def even_parts(numel: int, parts: int) -> list[int]:
    """Split `numel` into parts that differ by at most one, the larger ones first.

    Raises:
        ModelError: there are more parts than elements, or none.
    """
    if not 0 < parts <= numel:
        raise ModelError(f"{numel} features cannot be split into {parts} parts; use 1 to {numel}")
    whole, over = divmod(numel, parts)
    return [whole + (place < over) for place in range(parts)]
