"""Leaf modules, which stage 3 gathers as a whole, and large linear layers made of them (tiles)."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from functools import reduce
from itertools import accumulate
from typing import Any, cast

import torch
from torch import Tensor, nn

from hadal.errors import ModelError, UsageError, nearest
from hadal.zero.access import is_kept_by_engine
from hadal.zero.grouping import LeafModules
from hadal.zero.parameters import Attached

_log = logging.getLogger(__name__)

# Parameters of modules that a program has marked.
leaf_parameters: Attached[bool] = Attached("leaf")


def set_z3_leaf_modules(
    model: nn.Module, leaf_modules: Iterable[type[nn.Module] | str], raise_if_not_found: bool = True
) -> list[nn.Module]:
    """Make stage 3 gather modules as a whole when they are called, and not module by module.

    Use it for modules that run different parts on each rank or in each step, such as a layer of
    experts. Call it before `initialize`. The JSON key for it is `zero_optimization.leaf_module`.

    Args:
        model: the model that contains them.
        leaf_modules: classes, names of classes (bare or dotted), or full names of modules.
        raise_if_not_found: True makes it an error if none of them is in the model.

    Returns:
        The modules that were marked.

    Raises:
        ModelError: none was found.
        UsageError: the model is already in an engine.
    """
    found = _find(model, leaf_modules, raise_if_not_found)
    mark(found, True)
    return found


def unset_z3_leaf_modules(
    model: nn.Module, leaf_modules: Iterable[type[nn.Module] | str], raise_if_not_found: bool = True
) -> list[nn.Module]:
    """Undo `set_z3_leaf_modules`, with the same arguments, results and errors."""
    found = _find(model, leaf_modules, raise_if_not_found)
    mark(found, False)
    return found


def mark(modules: Iterable[nn.Module], flag: bool) -> None:
    """Mark modules as leaf modules, or not; copies of them keep the mark."""
    for module in modules:
        setattr(module, "_z3_leaf", flag)  # noqa: B010 - DeepSpeed's name, which programs read
        for parameter in module.parameters():
            leaf_parameters[parameter] = flag


def _find(
    model: nn.Module, asked: Iterable[type[nn.Module] | str], raises: bool
) -> list[nn.Module]:
    if any(is_kept_by_engine(parameter) for parameter in model.parameters()):
        raise UsageError(
            "leaf modules must be chosen before hadal.initialize, but this model is already in an"
            " engine"
        )
    given = [asked] if isinstance(asked, (str, type)) else list(asked)
    modules = dict(model.named_modules())
    found: dict[nn.Module, None] = {}
    for each in given:
        if isinstance(each, str):
            leaf = LeafModules(classes=(each,), names=(each,))
            mine = [m for name, m in modules.items() if leaf.selects(name, m)]
        else:
            mine = [m for m in modules.values() if isinstance(m, each)]
        if not mine:
            _log.warning("leaf modules: %s", _not_found(each, modules))
        found.update(dict.fromkeys(mine))
    if not found and raises:
        missing = "; ".join(_not_found(each, modules) for each in given) or "none were given"
        raise ModelError(f"leaf modules: {missing}")
    return list(found)


def _not_found(each: type[nn.Module] | str, modules: dict[str, nn.Module]) -> str:
    name = each if isinstance(each, str) else each.__name__
    known = {type(module).__name__ for module in modules.values()} | set(modules)
    near = nearest(name, sorted(known))
    hint = f"; did you mean {near!r}?" if near else ""
    return f"no module of the model has the class or name {name!r}{hint}"


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
        self._columns = even_parts(in_features, in_splits)
        self._heights = even_parts(out_features, out_splits)
        self.in_parts = [0, *accumulate(self._columns)]
        """The first column of each tile of a row, and the end."""
        self.out_parts = [0, *accumulate(self._heights)]
        """The first row of each tile of a column, and the end."""
        last = in_splits - 1
        self.linears = nn.ModuleList(
            nn.ModuleList(
                linear_cls(columns, rows, bias=bias and place == last, **kwargs)
                for place, columns in enumerate(self._columns)
            )
            for rows in self._heights
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
        parts = self._split(input_)
        return self._joined([_sum_of(row, parts) for row in self._rows()])

    def _split(self, input_: Tensor | Sequence[Tensor]) -> Sequence[Tensor]:
        is_whole = isinstance(input_, Tensor) and not self.input_is_already_split
        return cast(Tensor, input_).split(self._columns, dim=-1) if is_whole else list(input_)

    def _joined(self, outputs: list[Tensor]) -> Tensor | list[Tensor]:
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
        for row, weights in zip(rows, other.weight.split(self._heights), strict=True):
            for tile, weight in zip(row, weights.split(self._columns, dim=1), strict=True):
                tile.weight.copy_(weight)
        if other.bias is not None:
            for row, bias in zip(rows, other.bias.split(self._heights), strict=True):
                row[-1].bias.copy_(bias)


class TiledLinearReturnBias(TiledLinear):
    """The same of layers that return their product and, apart from it, their bias or None.

    Megatron-LM's parallel layers do, which add the bias later.
    """

    def forward(self, input_: Tensor | Sequence[Tensor]) -> Any:
        """Return the product, and the biases of all rows or None."""
        products: list[Tensor] = []
        biases: list[Tensor] = []
        for row in self._rows():
            pairs = [tile(part) for tile, part in zip(row, self._split(input_), strict=True)]
            products.append(reduce(torch.add, (product for product, _ in pairs)))
            biases += [bias for _, bias in pairs if bias is not None]
        return self._joined(products), self._joined(biases) if biases else None


def _with_bias(has_none: bool) -> str:
    return "without a bias" if has_none else "with a bias"


def _sum_of(row: Sequence[nn.Linear], parts: Sequence[Tensor]) -> Tensor:
    total: Tensor = reduce(torch.add, (t(part) for t, part in zip(row, parts, strict=True)))
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
