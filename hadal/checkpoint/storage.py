"""The interface between checkpoints and the place where they are stored.

A location is a `Path`, or a `RemotePath` for a URL. A `Storage` has the six methods that a
checkpoint needs; none of them renames. `local.py` and `remote.py` implement it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol, TypeVar

from hadal.checkpoint.direct import Kept

Chunk = bytes | memoryview


@dataclass(frozen=True, slots=True)
class RemotePath:
    """The location of a URL, with the part of the `Path` interface that names need."""

    url: str
    """Without a slash at its end."""

    @property
    def name(self) -> str:
        """The last part."""
        return self.url.rpartition("/")[2]

    @property
    def parent(self) -> RemotePath:
        """The location without its last part."""
        return RemotePath(self.url.rpartition("/")[0])

    @property
    def scheme(self) -> str:
        """The part before the colon."""
        return self.url.partition(":")[0]

    def __truediv__(self, name: str) -> RemotePath:
        return RemotePath(f"{self.url}/{name}")

    def __str__(self) -> str:
        return self.url


Location = Path | RemotePath
_Of = TypeVar("_Of", contravariant=True)


class StorageItem(NamedTuple):
    """A file or a folder in a storage."""

    name: str
    is_folder: bool
    nbytes: int = 0
    modified: float = 0.0
    """The time of the last change by the storage's own clock, in seconds; 0 of folders."""
    is_link: bool = False


class StoredFile(Protocol):
    """A file to read ranges of. Each method raises OSError if the range cannot be read."""

    nbytes: int

    def read(self, start: int, stop: int) -> bytes:
        """Return bytes [start, stop), a short range; no thread is started."""

    def blocks(self, start: int, stop: int, kept: Kept | None = None) -> Iterator[memoryview]:
        """Yield bytes [start, stop) in order; each block is valid until the next one.

        Bytes in `kept` are not read again; other bytes are added to it while it has room.
        """

    def read_into(self, out: memoryview, start: int, kept: Kept | None = None) -> None:
        """Fill `out` with the bytes from `start` on; kept bytes are not read again."""


class Storage(Protocol[_Of]):
    """Files and folders at locations. Each method raises OSError if it fails."""

    def write(self, path: _Of, chunks: Iterable[Chunk], *, doubled: bool = False) -> None:
        """Write a new file and create its folders; on return all of it is durable.

        An interrupted write may leave part of the file. `chunks` may be iterated again for another
        attempt. With `doubled` one block is written while the next is filled.
        """

    def replace(self, path: _Of, content: bytes, mark: str = "") -> None:
        """Replace a file's contents atomically: a crash leaves the old or the new ones.

        `mark` is that of the save; it is part of the name of a draft that a crash may leave.
        """

    def open(self, path: _Of) -> StoredFile:
        """Return a file; FileNotFoundError if there is none."""

    def find(self, path: _Of) -> StorageItem | None:
        """Return the file or folder at a location, links followed; None if there is none."""

    def items(self, path: _Of) -> list[StorageItem]:
        """Return the items of a folder, sorted by name; an empty list if it does not exist."""

    def remove(self, path: _Of) -> None:
        """Remove a file, or a folder and its contents; it is no error if there is none."""
