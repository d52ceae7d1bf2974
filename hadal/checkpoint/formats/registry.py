"""The formats of checkpoints that can be read: one row for each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING, NamedTuple

from hadal.checkpoint.deepspeed.folder import is_deepspeed
from hadal.checkpoint.files import is_file
from hadal.checkpoint.index import INDEX
from hadal.checkpoint.storage import Location
from hadal.errors import CheckpointError

if TYPE_CHECKING:
    from hadal.checkpoint.source import Source

METADATA = ".metadata"


class Format(NamedTuple):
    """A format of checkpoints."""

    name: str
    recognizes: Callable[[Location], bool]
    """Returns whether a folder is a checkpoint of this format, by the names in it."""
    source: str
    """Path of the class of its sources, created with a folder, a part and names."""
    has_tags: bool = True
    """True if a directory of checkpoints has a file `latest`; else each is found by its path."""

    def open(
        self, folder: Location, part: int = 0, names: Sequence[Sequence[str]] | None = None
    ) -> Source:
        """Open a checkpoint; see `open_source`."""
        source: Source = resolve_name(self.source)(folder, part=part, names=names)
        return source


def _is_dcp(folder: Location) -> bool:
    with suppress(CheckpointError):  # not a valid path: the caller that opens it reports so
        return is_file(folder / METADATA)
    return False


_OWN = Format(
    "hadal", lambda folder: is_file(folder / INDEX), "hadal.checkpoint.stored:StoredSource"
)
_DEEPSPEED = Format("deepspeed", is_deepspeed, "hadal.checkpoint.deepspeed.source:DeepSpeedSource")
FORMATS = (
    _OWN,
    Format("dcp", _is_dcp, "hadal.checkpoint.formats.dcp_source:DcpSource", has_tags=False),
    _DEEPSPEED,
)


def format_of(folder: Location) -> Format | None:
    """Return the format of a checkpoint; None if the folder is not a checkpoint."""
    return next((one for one in FORMATS if one.recognizes(folder)), None)


def is_found_by_path(folder: Location) -> bool:
    """Return whether a folder is a checkpoint of a format without tags."""
    return any(one.recognizes(folder) for one in FORMATS if not one.has_tags)


def open_source(
    folder: Location, part: int = 0, names: Sequence[Sequence[str]] | None = None
) -> Source:
    """Open a checkpoint; `part` selects one part of a model saved in model-parallel parts.

    `names` lists the parameters of each param group, for a checkpoint that does not store them.

    Raises:
        CheckpointError: it is damaged, or not a checkpoint.
    """
    # A folder of no format: what is missing in it is told by the source.
    nearest = _DEEPSPEED if isinstance(folder, Path) else _OWN
    return (format_of(folder) or nearest).open(folder, part, names)
