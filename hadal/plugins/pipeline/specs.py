"""Descriptions of layers, which are built later on the ranks that need them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import pairwise
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from hadal.comm import Ranks
from hadal.comm.collectives import broadcast_, sum_
from hadal.errors import UsageError, few

_log = logging.getLogger(__name__)


class LayerSpec:
    """A layer by its class and arguments.

    Args:
        typename: a subclass of `nn.Module`.
        module_args: its positional arguments; `module_kwargs` are its keyword arguments.

    Raises:
        UsageError: `typename` is not such a class.
    """

    def __init__(self, typename: type[nn.Module], *module_args: Any, **module_kwargs: Any) -> None:
        if not (isinstance(typename, type) and issubclass(typename, nn.Module)):
            raise UsageError(
                f"{type(self).__name__} takes a subclass of torch.nn.Module and its arguments, got"
                f" {typename!r}; pass a function to PipelineModule directly"
            )
        self.typename = typename
        self.module_args = module_args
        self.module_kwargs = module_kwargs
        self.global_rank = -1
        """The rank that builds it; -1 until a PipelineModule has it."""

    def __repr__(self) -> str:
        return f"{self.typename.__name__}({self.module_args}, {self.module_kwargs})"

    def build(self, log: bool = False) -> nn.Module:
        """Return a new module."""
        if log:
            _log.info("rank %d builds %r", self.global_rank, self)
        return self.typename(*self.module_args, **self.module_kwargs)


class TiedLayerSpec(LayerSpec):
    """A layer used at several positions of a model: one module with one set of weights.

    Each of its stages holds a copy; the gradients of all copies are summed.

    Args:
        key: the module's name; equal keys are one module.
        typename: a subclass of `nn.Module`, with its arguments.
        forward_fn: called with the module and its input instead of the module's forward.
        tied_weight_attr: paths of the weights that copies share, as `get_tied_weights_and_groups`
            reports them.
    """

    def __init__(
        self,
        key: str,
        typename: type[nn.Module],
        *module_args: Any,
        forward_fn: Callable[[nn.Module, Any], Any] | None = None,
        tied_weight_attr: str | Sequence[str] = ("weight",),
        **module_kwargs: Any,
    ) -> None:
        super().__init__(typename, *module_args, **module_kwargs)
        self.key = key
        self.forward_fn = forward_fn
        names = [tied_weight_attr] if isinstance(tied_weight_attr, str) else tied_weight_attr
        self.tied_weight_attr = list(names)


Layer = LayerSpec | nn.Module | Callable[..., Any]
"""A layer of a pipeline: a description, a module, or a function without weights."""


def name_of(layer: Layer) -> str:
    """Return a layer's class, or a function's name."""
    if isinstance(layer, LayerSpec):
        return layer.typename.__name__
    if isinstance(layer, nn.Module):
        return type(layer).__name__
    return getattr(layer, "__name__", type(layer).__name__)


# ---- ties ----------------------------------------------------------------------------------------

TIED_COPY = "hadal_tied_copy"
"""The mark of a tied parameter on every stage except the first that has it."""


@dataclass(frozen=True, slots=True)
class Tie:
    """A module that this stage has, and others too."""

    key: str
    module: nn.Module
    weight_attr: tuple[str, ...]
    """Paths of the weights that are reported as tied."""
    ranks: Ranks
    """One rank of each stage that has it, the first stage first."""

    def weights(self) -> Iterable[Tensor]:
        """Yield the weights that are reported as tied."""
        for path in self.weight_attr:
            weight: Any = reduce(getattr, path.split("."), self.module)
            yield weight

    @property
    def is_copy(self) -> bool:
        """True if an earlier stage has the module."""
        return self.ranks.rank > 0

    def __getitem__(self, name: str) -> Any:
        """Return a field by the name that programs use: `group`, `ranks`, `module`, ..."""
        if name == "ranks":
            return list(self.ranks.numbers)
        return self.ranks.group if name == "group" else getattr(self, name)


def owners_of(layers: Sequence[Layer], bounds: Sequence[int], stages: int) -> dict[str, list[int]]:
    """Return the stages that have each tied module, by its key in sorted order.

    `bounds` are those of chunks, which are assigned to stages in turn.
    """
    found: dict[str, set[int]] = {}
    for number, (start, stop) in enumerate(pairwise(bounds)):
        for layer in layers[start:stop]:
            if isinstance(layer, TiedLayerSpec):
                found.setdefault(layer.key, set()).add(number % stages)
    return {key: sorted(found[key]) for key in sorted(found)}


def check_weights(key: str, module: nn.Module, paths: Iterable[str]) -> None:
    """Raise `UsageError` if a tied module lacks a weight that is declared as tied."""
    for path in paths:
        found = module
        for name in path.split("."):
            found = getattr(found, name, None)  # type: ignore[assignment]
        if not isinstance(found, Tensor):
            names = few(name for name, _ in module.named_parameters()) or "none"
            raise UsageError(
                f"TiedLayerSpec({key!r}, {type(module).__name__}, tied_weight_attr={path!r}): the"
                f" module has no such tensor; its parameters are {names}"
            )


def begin_equal(ties: Mapping[str, Tie]) -> None:
    """Copy the first stage's values to all copies. All ranks that have them must call it."""
    for key, tie in ties.items():
        for name, values in [*tie.module.named_parameters(), *tie.module.named_buffers()]:
            broadcast_(values.data, 0, tie.ranks, f"the broadcast of tied_modules.{key}.{name}")
        for parameter in tie.module.parameters():
            setattr(parameter, TIED_COPY, tie.is_copy)
            parameter.ds_pipe_replicated = tie.is_copy  # type: ignore[attr-defined]


def sum_gradients(ties: Mapping[str, Tie]) -> None:
    """Sum the gradients in `.grad` over all copies. All ranks that have them must call it."""
    for key, tie in ties.items():
        for name, parameter in tie.module.named_parameters():
            if parameter.grad is not None:
                sum_(parameter.grad, tie.ranks, f"the sum of tied_modules.{key}.{name}'s gradients")


def groups_of(ties: Mapping[str, Tie]) -> list[tuple[Tensor, dist.ProcessGroup]]:
    """Return each tied weight with the ranks that have a copy."""
    return [(weight, tie.ranks.group) for tie in ties.values() for weight in tie.weights()]
