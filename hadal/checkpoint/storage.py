"""The interface between checkpoints and the place where they are stored.

A location is a `Path`, or a `RemotePath` for a URL. A `Storage` has the six methods that a
checkpoint needs; none of them renames. `local.py` and `remote.py` implement it.
"""

from __future__ import annotations

import errno
import os
import shutil
import stat
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol, TypeVar

from hadal.offload.direct import Kept, Output, blocks_of, read_exactly, read_into, read_on

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


# ---- a directory ---------------------------------------------------------------------------------


class LocalFile:
    """A regular file; each read opens it, as direct I/O belongs to an open file."""

    def __init__(self, path: Path) -> None:
        status = os.stat(path)
        # A pipe or a device could block forever.
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "it is not a file")
        self._path = path
        self.nbytes = status.st_size

    def read(self, start: int, stop: int) -> bytes:
        """Return bytes [start, stop); the system does not read ahead."""
        with open(self._path, "rb", buffering=0) as file:
            read_on(file.fileno(), False)
            return bytes(read_exactly(file.fileno(), start, stop))

    def blocks(self, start: int, stop: int, kept: Kept | None = None) -> Iterator[memoryview]:
        """Yield bytes [start, stop); a thread reads some blocks while the caller uses another."""
        with open(self._path, "rb", buffering=0) as file:
            yield from blocks_of(file.fileno(), start, stop, kept)

    def read_into(self, out: memoryview, start: int, kept: Kept | None = None) -> None:
        """Fill `out` with the bytes from `start` on."""
        with open(self._path, "rb", buffering=0) as file:
            read_into(out, file.fileno(), start, kept)


class LocalStorage:
    """Files of this machine, which survive a loss of power once written."""

    def write(self, path: Path, chunks: Iterable[Chunk], *, doubled: bool = False) -> None:
        """Write a new file past the page cache, and wait until it and its name are on disk."""
        self._make(path.parent)
        _write(path, chunks, doubled=doubled)
        sync_folder(path.parent)

    def replace(self, path: Path, content: bytes, mark: str = "") -> None:
        """Write a draft next to the file, and rename it."""
        draft = draft_of(path, mark)
        self._make(path.parent)
        try:
            _write(draft, [content], doubled=False)
            if LocalFile(draft).read(0, len(content)) != content:
                raise OSError(errno.EIO, "it does not read back as written")
            os.replace(draft, path)
        except OSError:
            with suppress(OSError):
                draft.unlink()
            raise
        sync_folder(path.parent)

    def _make(self, folder: Path) -> None:
        """Create a folder and its parents durably."""
        if not folder.is_dir():
            self._make(folder.parent)
            with suppress(FileExistsError):  # another rank made it, or `write` will report a file
                folder.mkdir()
            sync_folder(folder.parent)

    def open(self, path: Path) -> LocalFile:
        """Return a regular file."""
        return LocalFile(path)

    def find(self, path: Path) -> StorageItem | None:
        """Return the file or folder at a path, links followed."""
        try:
            status = os.stat(path)
        except (FileNotFoundError, NotADirectoryError):
            return None
        return _item(path.name, status, is_link=path.is_symlink())

    def items(self, path: Path) -> list[StorageItem]:
        """Return the items of a folder, without broken links."""
        try:
            entries = list(os.scandir(path))
        except (FileNotFoundError, NotADirectoryError):
            return []
        found = []
        for entry in entries:
            with suppress(FileNotFoundError):  # removed since the listing
                found.append(_item(entry.name, entry.stat(), is_link=entry.is_symlink()))
        return sorted(found)

    def remove(self, path: Path) -> None:
        """Remove a file or a folder; other processes may remove it at the same time."""
        while os.path.lexists(path):
            with suppress(FileNotFoundError):
                if path.is_dir() and not path.is_symlink():
                    shutil.rmtree(path)
                else:
                    path.unlink()


def draft_of(path: Path, mark: str) -> Path:
    """Return the name of a file while the save with this mark writes it."""
    return path.with_name(f".{path.name}.{mark or os.urandom(8).hex()}.partial")


def _item(name: str, status: os.stat_result, *, is_link: bool) -> StorageItem:
    is_folder = stat.S_ISDIR(status.st_mode)
    return StorageItem(
        name, is_folder, 0 if is_folder else status.st_size, status.st_mtime, is_link
    )


def _write(path: Path, chunks: Iterable[Chunk], *, doubled: bool) -> None:
    with open(path, "xb", buffering=0) as file:
        with Output(file.fileno(), doubled=doubled) as output:
            for chunk in chunks:
                output.write(chunk)
        os.fsync(file.fileno())


def sync_folder(path: Path) -> None:
    """Wait until creations, renames and removals in a folder are on disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        # Some network file systems sync folders by themselves and do not support the call.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(handle)
