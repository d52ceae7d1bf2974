"""Modules that several stages share: the ranks with copies, and their common initial values."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import pairwise
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from hadal.comm import Ranks
from hadal.comm.collectives import broadcast_, sum_
from hadal.errors import UsageError, few
from hadal.plugins.pipeline.specs import Layer, TiedLayerSpec

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
