"""Ranks as a grid with named axes: the coordinates of each rank, and the ranks along an axis."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Sequence
from itertools import product
from math import prod
from typing import Any

from hadal.errors import UsageError


class ProcessTopology:
    """A grid of ranks in row-major order: adjacent ranks differ in the last axis.

    Args:
        axes: the names of the axes.
        dims: the number of ranks along each.

    Raises:
        UsageError: an axis has no ranks or no unique name, or there is not one size for each.
    """

    def __init__(self, axes: Sequence[str], dims: Sequence[int]) -> None:
        self.axes, self.dims = list(axes), list(dims)
        if len(axes) != len(dims) or len(set(axes)) != len(axes) or any(dim < 1 for dim in dims):
            raise UsageError(
                f"a topology got axes {list(axes)} with {list(dims)} ranks: expected distinct"
                " names, and a number of at least 1 for each"
            )
        make: Any = namedtuple  # its fields are known at run time only
        self.ProcessCoord = make("ProcessCoord", self.axes)
        places = product(*map(range, dims))
        self.mapping: dict[Any, int] = {
            self.ProcessCoord(*place): rank for rank, place in enumerate(places)
        }
        self._coords = list(self.mapping)

    def __str__(self) -> str:
        return str(self.mapping)

    def world_size(self) -> int:
        """Return the number of ranks."""
        return prod(self.dims)

    def get_axis_names(self) -> list[str]:
        """Return the names of the axes."""
        return self.axes

    def get_dim(self, axis: str) -> int:
        """Return the number of ranks along an axis; 0 if there is no such axis."""
        return self.dims[self.axes.index(axis)] if axis in self.axes else 0

    def get_rank(self, **coord_kwargs: int) -> int:
        """Return the rank at coordinates that include every axis.

        Raises:
            ValueError: an axis is missing or unknown, or the coordinates are outside the grid.
        """
        if set(coord_kwargs) != set(self.axes):
            raise ValueError(
                f"get_rank() got {sorted(coord_kwargs)}: expected each of the axes {self.axes}"
            )
        place = self.ProcessCoord(**coord_kwargs)
        if place not in self.mapping:
            raise ValueError(f"{place} is outside the axes {self.axes} with {self.dims} ranks")
        return self.mapping[place]

    def get_coord(self, rank: int) -> Any:
        """Return the coordinates of a rank, as a namedtuple of the axes.

        Raises:
            ValueError: there is no such rank.
        """
        if not 0 <= rank < len(self._coords):
            raise ValueError(f"rank {rank} is not in a topology of {len(self._coords)} ranks")
        return self._coords[rank]

    def get_rank_repr(
        self,
        rank: int,
        omit_axes: Sequence[str] = ("data", "pipe"),
        inner_sep: str = "_",
        outer_sep: str = "-",
    ) -> str:
        """Return the coordinates of a rank as text for file names, such as `model_00`."""
        place = self.get_coord(rank)._asdict()
        shown = (axis for axis in self.axes if axis not in frozenset(omit_axes))
        return outer_sep.join(f"{axis}{inner_sep}{place[axis]:02d}" for axis in shown)

    def filter_match(self, **filter_kwargs: int) -> list[int]:
        """Return the ranks whose coordinates have all these values, ascending."""
        wanted = filter_kwargs.items()
        return [
            rank
            for place, rank in self.mapping.items()
            if all(getattr(place, axis) == value for axis, value in wanted)
        ]

    def get_axis_list(self, axis: str, idx: int) -> list[int]:
        """Return the ranks at one index of an axis, ascending."""
        return self.filter_match(**{axis: idx})

    def get_axis_comm_lists(self, axis: str) -> list[list[int]]:
        """Return the lists of ranks that differ along one axis only; none for an unknown axis."""
        if axis not in self.axes:
            return []
        lists: dict[Any, list[int]] = {}
        for place, rank in self.mapping.items():
            others = place._replace(**{axis: 0})
            lists.setdefault(others, []).append(rank)
        return list(lists.values())


class PipeDataParallelTopology(ProcessTopology):
    """Stages of a pipeline, each on `num_dp` ranks that see different samples."""

    def __init__(self, num_pp: int, num_dp: int) -> None:
        super().__init__(["pipe", "data"], [num_pp, num_dp])


class PipeModelDataParallelTopology(ProcessTopology):
    """A `PipeDataParallelTopology` with each stage's layers split over `num_mp` adjacent ranks."""

    def __init__(self, num_pp: int, num_mp: int, num_dp: int) -> None:
        super().__init__(["pipe", "data", "model"], [num_pp, num_dp, num_mp])
