"""The common interface to a checkpoint of any writer: named values, read a slice at a time.

A `Source` needs no model, no ranks and no memory beyond what is read. Hadal's own folders are one
(`stored.py`); any format that implements `read` loads in the same way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hadal.checkpoint.contents import SavedGroup
from hadal.checkpoint.storage import Location
from hadal.errors import CheckpointError
from hadal.zero.boxes import Placement
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


class Source:
    """Named values and the other state of training.

    `entries` lists the values by name and kind ("weight", "master", "buffer", "state.<key>"). A
    trained parameter has a weight, a master if it was kept in addition, and state for each
    of the optimizer's keys; state of another shape than its parameter's has that shape.

    The defaults are those of a format of one part, without buckets and without state of ranks.
    """

    path: Location
    """The folder or file, for error messages."""
    writer: str
    """The name of the library that wrote it."""
    mark: str
    """An identifier that distinguishes this checkpoint from another of the same name."""
    entries: Mapping[tuple[str, str], Entry]
    aliases: Mapping[str, str] = {}
    """Other names of tied parameters, mapped to their names in `entries`."""
    state: Mapping[str, Mapping[str, Any]] = {}
    """State that is not per element (numbers, 0-dim step counts), by parameter and key."""
    groups: Sequence[SavedGroup] = ()
    optimizer: str | None = None
    """The optimizer's class name; None if unknown."""
    scalars: Any = None
    """The engine's counters and loss scale; None if there are none."""
    schedule: Any = None
    """The schedule's state; None if there is none."""
    stage: int | None = None
    """The ZeRO stage that saved it; None if unknown."""
    saved_at: float | None = None
    """The time of the save; None if unknown."""
    world_size: int = 1
    """The number of ranks that saved it."""
    parts: int = 1
    """The number of parts: those of the model, and sets of experts."""
    ranks_of_part: int = 1
    """The number of ranks that saved each part of the model."""
    placements: Mapping[str, Placement] = {}
    """The boxes of the whole model that values hold, by name; others are whole tensors."""
    unknown: frozenset[str] = frozenset()
    """Names of slices whose position in the whole model is not recorded."""
    jobs: tuple[str, ...] = ()
    """The jobs of the run that saved it, the last of which did; see `keep.JOBS`."""

    @property
    def notes(self) -> Sequence[str]:
        """Messages about state that a load does not restore."""
        return ()

    def of_part(self, part: int) -> Source:
        """Return another part of the same checkpoint, which shares its open files.

        Raises:
            CheckpointError: there is no such part, or the index is inconsistent.
        """
        return self

    def expect(self, name: str, kind: str, start: int, stop: int) -> None:
        """Check that elements can be read, before anything is changed.

        Raises:
            CheckpointError: they cannot; the message names the file.
        """
        numel = self.entries[name, kind].numel
        if not 0 <= start <= stop <= numel:
            raise CheckpointError(
                f"{self.path}: elements {start} to {stop} of {kind} of {name} are requested, which"
                f" has {numel}"
            )

    def read(self, name: str, kind: str, start: int, stop: int) -> Tensor:
        """Return elements [start, stop) of a value in row-major order: 1-D, on the host, temporary.

        Raises:
            CheckpointError: they cannot be read; the message names the file.
        """
        raise NotImplementedError

    def read_own(self, name: str, kind: str, rank: int) -> Tensor:
        """Return a whole value in its shape; if each rank has its own, that of `rank` of the part.

        Raises:
            CheckpointError: it cannot be read; the message names the file.
        """
        entry = self.entries[name, kind]
        return self.read(name, kind, 0, entry.numel).view(entry.shape)

    def has_slice(self, kind: str, slots: Sequence[Slot], start: int, stop: int) -> bool:
        """Return whether elements [start, stop) of a bucket with the layout `slots` are contiguous.

        If no saved bucket has that layout, its parameters are read one by one.

        Raises:
            CheckpointError: they are, but cannot be read; the message names the file.
        """
        return False

    def read_slice(self, kind: str, slots: Sequence[Slot], start: int, out: Tensor) -> None:
        """Read them into `out` (1-D); elements that belong to no parameter become zero.

        Raises:
            CheckpointError: they cannot be read; the message names the file.
        """
        raise CheckpointError(f"{self.path} holds no buckets")

    def take_slice(self, kind: str, slots: Sequence[Slot], start: int, stop: int) -> Tensor | None:
        """Return the same elements in host memory that the caller then owns.

        None if they would have to be copied: `read_slice` does that.
        """
        return None

    def own(self, rank: int) -> RankState | None:
        """Return the own state of a rank of the part; None if it was not saved."""
        return None

    def client_state(self) -> dict[str, Any]:
        """Return the caller's own values, as copies."""
        return {}

    @property
    def files(self) -> Sequence[Location]:
        """All files of the checkpoint."""
        return ()

    def checks(self) -> Iterator[tuple[Callable[[], None], int]]:
        """Yield checks of all bytes of a file each, which raise CheckpointError, and its bytes."""
        yield from ()

    def verify(
        self, share: int = 0, shares: int = 1, *, spread: bool = True, room: int = 0
    ) -> None:
        """Compare every byte of files with their checksums: each `shares`-th file from `share` on.

        With `spread` false (this rank does not see other ranks' files) Hadal's own files are
        verified if they have been used so far. Up to `room` bytes are kept until `close`, so that
        they are not read again.

        Raises:
            CheckpointError: a file is missing or damaged.
        """
        for check, _ in list(self.checks())[share::shares]:
            check()

    def close(self) -> None:
        """Close all files."""
