"""What a checkpoint holds, whoever wrote it: named values that are read a few elements at a time.

A `Source` needs no model, no ranks and no memory beyond what is read. Hadal's own folders are one
(`stored.py`); whatever else can be told in these words loads by the same way.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from hadal.checkpoint.contents import SavedGroup
from hadal.zero.layout import Slot

OWN = "hadal"
"""The header's text of what each rank has for itself."""


class Entry(NamedTuple):
    """A value that a source holds: its whole shape, and its dtype."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    is_rounded: bool = False
    """Whether all of a weight is the rounding of its master, which is read in its place."""

    @property
    def numel(self) -> int:
        """Its elements."""
        return prod(self.shape)


@dataclass(frozen=True, slots=True)
class Own:
    """What one rank had for itself."""

    loader: Any
    random: dict[str, Any]
    extra: dict[str, Any]
    """By a module's path: its extra state."""
    exchange: Any = None
    """What an optimizer that sends by itself remembered; None: there was no such."""


class Source(Protocol):
    """Named values and what else training needs.

    `entries` tells what there is: by name and kind ("weight", "master", "buffer", "state.<key>").
    A trained parameter has a weight, a master beside it where it was not the weight itself, and
    state for each of the optimizer's keys; state of another shape than its parameter's is a value
    of that shape.
    """

    path: Path
    """The folder, or file: named in errors."""
    entries: Mapping[tuple[str, str], Entry]
    aliases: Mapping[str, str]
    """Further names of tied parameters, and the names that `entries` has for them."""
    state: Mapping[str, Mapping[str, Any]]
    """By parameter and key: state without elements: numbers, 0-dim tensors (counts of steps)."""
    groups: Sequence[SavedGroup]
    optimizer: str | None
    """The optimizer's class; None where that is not known."""
    scalars: Any
    """The engine's counters and loss scale; None where there are none."""
    schedule: Any
    """The schedule's state; None where there is none."""
    world_size: int
    """Ranks that saved it."""
    parts: int
    """Into how many model-parallel parts the model was cut."""

    def expect(self, name: str, kind: str, start: int, stop: int) -> None:
        """See that elements can be read, before anything is changed.

        Raises:
            CheckpointError: they cannot; the file is named.
        """

    def read(self, name: str, kind: str, start: int, stop: int) -> Tensor:
        """Elements [start, stop) of a value, in row-major order: 1-D, on the host, not to be kept.

        Raises:
            CheckpointError: they cannot be read; the file is named.
        """

    def read_own(self, name: str, kind: str, rank: int) -> Tensor:
        """A whole value, in its shape: a rank's own (counted within the part), where each has one.

        Raises:
            CheckpointError: it cannot be read; the file is named.
        """

    def has_stretch(self, kind: str, slots: Sequence[Slot], start: int, stop: int) -> bool:
        """Whether elements [start, stop) of a bucket that is laid out like `slots` lie in a row.

        Where no bucket was laid out so its parameters are read one by one.

        Raises:
            CheckpointError: they should, and cannot be read; the file is named.
        """

    def read_stretch(self, kind: str, slots: Sequence[Slot], start: int, out: Tensor) -> None:
        """Read them into `out`, 1-D; zeros where no parameter lies.

        Raises:
            CheckpointError: they cannot be read; the file is named.
        """

    def taken(self, kind: str, slots: Sequence[Slot], start: int, stop: int) -> Tensor | None:
        """The same elements, on the host, in memory that is the caller's from now on.

        None where they would have to be copied: `read_stretch` does so.
        """

    def own(self, rank: int) -> Own | None:
        """What a rank had for itself (counted within the part); None where that is not known."""

    def client_state(self) -> dict[str, Any]:
        """The caller's own values, in memory of their own."""

    def close(self) -> None:
        """Let go of all files."""
