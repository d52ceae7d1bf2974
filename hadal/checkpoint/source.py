"""The common interface to a checkpoint of any writer: named values, read a slice at a time.

A `Source` needs no model, no ranks and no memory beyond what is read. Hadal's own folders are one
(`stored.py`); any format that implements the protocol loads in the same way.

Tests: tests/checkpoint/test_export.py, tests/checkpoint/test_loading.py
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from hadal.checkpoint.contents import SavedGroup
from hadal.checkpoint.storage import Location
from hadal.errors import CheckpointError
from hadal.zero.layout import Slot

OWN = "hadal"
"""The header key of the rank's own state."""


class Entry(NamedTuple):
    """The full shape and the dtype of a value in a source."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    is_rounded: bool = False
    """True if the whole weight is its rounded master: the master is read instead."""

    @property
    def numel(self) -> int:
        """The number of elements."""
        return prod(self.shape)


@dataclass(frozen=True, slots=True)
class RankState:
    """The state that one rank saved for itself."""

    loader: Any
    random: dict[str, Any]
    extra: dict[str, Any]
    """Each module's extra state, by its path."""
    exchange: Any = None
    """The exchange state of an optimizer that communicates by itself; None: there was none."""


class Source(Protocol):
    """Named values and the other state of training.

    `entries` lists the values by name and kind ("weight", "master", "buffer", "state.<key>"). A
    trained parameter has a weight, a master if it was kept in addition, and state for each
    of the optimizer's keys; state of another shape than its parameter's has that shape.
    """

    entries: Mapping[tuple[str, str], Entry]
    aliases: Mapping[str, str]
    """Other names of tied parameters, mapped to their names in `entries`."""
    state: Mapping[str, Mapping[str, Any]]
    """State that is not per element (numbers, 0-dim step counts), by parameter and key."""
    groups: Sequence[SavedGroup]
    optimizer: str | None
    """The optimizer's class name; None if unknown."""
    scalars: Any
    """The engine's counters and loss scale; None if there are none."""
    schedule: Any
    """The schedule's state; None if there is none."""
    world_size: int
    """The number of ranks that saved it."""
    parts: int
    """The number of parts: those of the model, and sets of experts."""
    ranks_of_part: int
    """The number of ranks that saved each part of the model."""
    jobs: tuple[str, ...]
    """The jobs of the run that saved it, the last of which did; see `keep.JOBS`."""

    @property
    def notes(self) -> Sequence[str]:
        """Messages about state that a load does not restore."""

    def expect(self, name: str, kind: str, start: int, stop: int) -> None:
        """Check that elements can be read, before anything is changed.

        Raises:
            CheckpointError: they cannot; the message names the file.
        """

    def read(self, name: str, kind: str, start: int, stop: int) -> Tensor:
        """Return elements [start, stop) of a value in row-major order: 1-D, on the host, temporary.

        Raises:
            CheckpointError: they cannot be read; the message names the file.
        """

    def read_own(self, name: str, kind: str, rank: int) -> Tensor:
        """Return a whole value in its shape; if each rank has its own, that of `rank` of the part.

        Raises:
            CheckpointError: it cannot be read; the message names the file.
        """

    def has_slice(self, kind: str, slots: Sequence[Slot], start: int, stop: int) -> bool:
        """Return whether elements [start, stop) of a bucket with the layout `slots` are contiguous.

        If no saved bucket has that layout, its parameters are read one by one.

        Raises:
            CheckpointError: they are, but cannot be read; the message names the file.
        """

    def read_slice(self, kind: str, slots: Sequence[Slot], start: int, out: Tensor) -> None:
        """Read them into `out` (1-D); elements that belong to no parameter become zero.

        Raises:
            CheckpointError: they cannot be read; the message names the file.
        """

    def take_slice(self, kind: str, slots: Sequence[Slot], start: int, stop: int) -> Tensor | None:
        """Return the same elements in host memory that the caller then owns.

        None if they would have to be copied: `read_slice` does that.
        """

    def own(self, rank: int) -> RankState | None:
        """Return the own state of a rank of the part; None if it was not saved."""

    def client_state(self) -> dict[str, Any]:
        """Return the caller's own values, as copies."""

    @property
    def path(self) -> Location:
        """The folder or file, for error messages."""

    def close(self) -> None:
        """Close all files."""


class ForeignSource:
    """The part of a `Source` that formats without buckets and without state of ranks share."""

    path: Location
    entries: Mapping[tuple[str, str], Entry]
    jobs: tuple[str, ...] = ()

    @property
    def notes(self) -> Sequence[str]:
        """Return nothing."""
        return ()

    def read(self, name: str, kind: str, start: int, stop: int) -> Tensor:
        """Return elements of a value."""
        raise NotImplementedError

    def read_own(self, name: str, kind: str, rank: int) -> Tensor:
        """Return a whole value in its shape."""
        entry = self.entries[name, kind]
        return self.read(name, kind, 0, entry.numel).view(entry.shape)

    def _expect_within(self, name: str, kind: str, start: int, stop: int) -> None:
        """Raise CheckpointError unless a value has these elements."""
        numel = self.entries[name, kind].numel
        if not 0 <= start <= stop <= numel:
            raise CheckpointError(
                f"{self.path}: elements {start} to {stop} of {kind} of {name} are requested, which"
                f" has {numel}"
            )

    def has_slice(self, kind: str, slots: Sequence[Slot], start: int, stop: int) -> bool:
        """Return False: the files have no buckets."""
        return False

    def read_slice(self, kind: str, slots: Sequence[Slot], start: int, out: Tensor) -> None:
        """Raise CheckpointError: the files have no buckets."""
        raise CheckpointError(f"{self.path} holds no buckets")

    def take_slice(self, kind: str, slots: Sequence[Slot], start: int, stop: int) -> None:
        """Return None: all values are copied."""

    def own(self, rank: int) -> RankState | None:
        """Return None: the format has no state of single ranks."""
        return None
