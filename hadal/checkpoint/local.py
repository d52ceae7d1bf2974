"""A directory of this machine, or one that it mounts, as a `Storage`."""

from __future__ import annotations

import errno
import os
import shutil
import stat
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

from hadal.checkpoint.direct import Kept, Output, blocks_of, read_exactly, read_into, read_on
from hadal.checkpoint.storage import Chunk, StorageItem


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
