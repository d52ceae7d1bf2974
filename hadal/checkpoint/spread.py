"""Parameters of experts that are distributed over ranks, gathered on the first of them.

Tests: tests/moe/test_checkpoints.py
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from hadal.checkpoint.huggingface import Value
from hadal.checkpoint.live import Live
from hadal.comm import Ranks
from hadal.comm.collectives import broadcast_, gather_objects
from hadal.comm.expert_groups import expert_group_names, expert_groups
from hadal.errors import ModelError, few
from hadal.zero.boxes import ATTRIBUTE, Box


@dataclass(frozen=True, slots=True)
class Spread:
    """A parameter of experts, of which each of several ranks holds one or some."""

    ranks: Ranks
    boxes: tuple[Box, ...]
    """The box of each rank, in their order; all have the same size."""

    @property
    def _is_stacked(self) -> bool:
        return not self.boxes[0].is_whole

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the whole tensors that the ranks hold together."""
        return tuple(dict.fromkeys(box.name for box in self.boxes))

    def values(self, dtype: torch.dtype) -> Iterator[Value]:
        """Yield the whole tensors, in the order of `wholes`."""
        shapes = {box.name: box.shape for box in self.boxes}
        for name in self.names:
            yield Value(name, shapes[name], dtype)

    def wholes(self, mine: Tensor) -> Iterator[Tensor]:
        """Yield the whole tensors, which are complete on the first rank only.

        A collective. Each tensor is valid until the next one is requested.
        """
        whole = None
        if self._is_stacked and self.ranks.rank == 0:
            whole = mine.new_empty(self.boxes[0].shape)
        piece = mine.new_empty(mine.shape)
        for number, box in enumerate(self.boxes):
            if number == self.ranks.rank:
                piece.copy_(mine.detach())
            broadcast_(piece, number, self.ranks, f"the experts of {box.name}")
            if not self._is_stacked:
                yield piece
            elif whole is not None:
                whole[box.index] = piece
        if self._is_stacked:
            yield piece if whole is None else whole


def spread_experts(live: Live) -> dict[Tensor, Spread]:
    """Return the parameters that are distributed over ranks, with each rank's box. A collective.

    Raises:
        ModelError: the experts of a rank are not marked.
    """
    found: dict[Ranks, dict[nn.Parameter, str]] = {}
    for parameter, names in live.names().items() if live.has_experts else ():
        ranks = _sharers_of(parameter)
        if ranks is not None:
            found.setdefault(ranks, {})[parameter] = names[0]
    unknown = [name for some in found.values() for p, name in some.items() if _box_of(p) is None]
    if unknown:
        raise ModelError(
            f"each rank has other experts, and nothing says which are in {few(unknown)}: set"
            " parameter.hadal_box (hadal.zero.boxes) before initialize"
        )
    spread: dict[Tensor, Spread] = {}
    for ranks, members in found.items():
        rows = gather_objects([_box_of(parameter) for parameter in members], ranks)
        for parameter, boxes in zip(members, zip(*rows, strict=True), strict=True):
            spread[parameter] = Spread(ranks, boxes)
    return spread


def _box_of(parameter: nn.Parameter) -> Box | None:
    found = getattr(parameter, ATTRIBUTE, None)
    return found if isinstance(found, Box) else None


def _sharers_of(parameter: nn.Parameter) -> Ranks | None:
    """Return the ranks over which an expert's parameter is distributed; None for any other."""
    name = getattr(parameter, "group_name", None)
    if getattr(parameter, "allreduce", True) or name not in expert_group_names():
        return None
    ranks = expert_groups(name).parallel
    return ranks if ranks.size > 1 else None
