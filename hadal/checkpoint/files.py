"""Durable, verified files at any location: checksums, and errors that name the file.

The checksum is 64-bit XXH3, which runs at memory speed (CRC-32 takes several times as long). It
detects damage, not forgery: a forger could write another checkpoint.
"""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, NamedTuple, TypeVar

import xxhash

from hadal.checkpoint.remote import FsspecStorage, filesystem_of
from hadal.checkpoint.storage import (
    Chunk,
    LocalStorage,
    Location,
    RemotePath,
    Storage,
    StorageItem,
    StoredFile,
)
from hadal.errors import CheckpointError
from hadal.offload.direct import Kept

_Folder = TypeVar("_Folder", Path, RemotePath, Location)
Given = str | os.PathLike[str] | RemotePath
"""A location as users give it: text, which may be a URL, or a path."""
_READ_NBYTES = 1 << 20
# The number of files that are copied at a time.
_AT_ONCE = 4
_LOCAL, _REMOTE = LocalStorage(), FsspecStorage()
# One slash is enough: `pathlib` makes one of two.
_URL = re.compile(r"(?P<scheme>[A-Za-z][A-Za-z0-9+.-]+)://?(?P<rest>.+)", re.DOTALL)


CHECKSUM = "xxh3_64"
"""The checksum that new files are written with."""


class Seal(NamedTuple):
    """A file's expected size and checksum, and those of its first chunk."""

    nbytes: int
    checksum: int
    head_nbytes: int
    head_checksum: int


@contextmanager
def system_errors(path: Location, act: str) -> Iterator[None]:
    """Re-raise system errors of the block as CheckpointError, with the file and the reason."""
    try:
        yield
    except CheckpointError:
        raise
    except (OSError, ValueError) as error:  # ValueError: a name with a zero byte
        reason = (isinstance(error, OSError) and error.strerror) or str(error)
        raise CheckpointError(f"{path} cannot be {act}: {reason}") from error


_FAULTS: tuple[type[Exception], ...] = (
    *(OSError, ValueError, TypeError, KeyError, IndexError, AttributeError),
    *(RuntimeError, OverflowError),
)


@contextmanager
def parsing_errors(what: str, *more: type[Exception]) -> Iterator[None]:
    """Re-raise parsing errors of the block as CheckpointError, with `what` and the cause.

    `more` are exceptions of a library that parses the contents.
    """
    try:
        yield
    except CheckpointError:
        raise
    except _FAULTS + more as error:
        raise CheckpointError(f"{what}: {type(error).__name__}: {error}") from error


def new_mark() -> str:
    """Return a token unique to one save; it leaves the program's random generators unchanged."""
    return secrets.token_hex(8)


class _Summed:
    """Chunks whose checksum is computed as they are used; each iteration starts over."""

    def __init__(self, chunks: Iterable[Chunk]) -> None:
        self._chunks = chunks
        self.seal = Seal(0, 0, 0, 0)

    def __iter__(self) -> Iterator[Chunk]:
        nbytes = head_nbytes = head_checksum = 0
        found = xxhash.xxh3_64()
        for number, chunk in enumerate(self._chunks):
            for start in range(0, len(chunk), _READ_NBYTES):
                # The checksum and the copy use it while it is in the processor's cache.
                piece = chunk[start : start + _READ_NBYTES]
                found.update(piece)
                yield piece
            nbytes += len(chunk)
            if number == 0:
                head_nbytes, head_checksum = nbytes, found.intdigest()
        self.seal = Seal(nbytes, found.intdigest(), head_nbytes, head_checksum)


def storage_of(path: Location) -> Storage[Any]:
    """Return the storage that a location belongs to."""
    return _REMOTE if isinstance(path, RemotePath) else _LOCAL


def location_of(text: Given) -> Location:
    """Return the location that a user's text names: a directory, or a URL of fsspec.

    A URL of this machine's files (`file://`) is a directory. No request is sent.

    Raises:
        CheckpointError: it is empty or no path, or a URL of an unknown scheme or of one whose
            package is not installed; the message names what to install.
    """
    if isinstance(text, RemotePath):
        return text
    if not isinstance(text, str | os.PathLike) or not str(text):
        raise CheckpointError(
            f"a checkpoint's directory is {text!r}, expected a path or a URL; '.' is the current"
            " directory"
        )
    found = _URL.fullmatch(str(text))
    if found is None:
        return Path(text)
    if found["scheme"] in ("file", "local"):
        return Path("/" + found["rest"].lstrip("/"))
    path = RemotePath(f"{found['scheme']}://{found['rest'].rstrip('/')}")
    filesystem_of(path)
    return path


def write_file(path: Location, chunks: Iterable[Chunk], *, doubled: bool = False) -> Seal:
    """Write a new file, wait until it is durable, and check its size and first chunk.

    With `doubled` one block is written while the next is filled.

    Raises:
        CheckpointError: it cannot be written, or does not read back as written.
    """
    once = iter(chunks) is chunks
    summed = _Summed(chunks)
    with system_errors(path, "written"):
        storage_of(path).write(path, iter(summed) if once else summed, doubled=doubled)
    check_file(path, summed.seal, whole=False)
    return summed.seal


@contextmanager
def torch_save_errors(path: Path) -> Iterator[None]:
    """Re-raise errors of `torch.save` as CheckpointError, with the file and the reason."""
    with system_errors(path, "written"):
        try:
            yield
        except RuntimeError as error:  # a full disk, among others
            raise CheckpointError(f"{path} cannot be written: {error}") from error


@contextmanager
def open_new(path: Path) -> Iterator[BinaryIO]:
    """Open a new file for `torch.save`.

    Raises:
        CheckpointError: it cannot be written.
    """
    with torch_save_errors(path), open(path, "xb") as file:
        yield file


class _Blocks:
    """A file's first bytes as one chunk, then its blocks; each iteration reads it again."""

    def __init__(self, path: Location, head_nbytes: int) -> None:
        self._path, self._head_nbytes = path, head_nbytes

    def __iter__(self) -> Iterator[Chunk]:
        file = open_file(self._path)
        with system_errors(self._path, "read"):
            if self._head_nbytes:
                yield file.read(0, self._head_nbytes)
            yield from file.blocks(self._head_nbytes, file.nbytes)


def copy_file(origin: Location, path: Location, seal: Seal | None = None) -> Seal:
    """Write a copy of a file, as `write_file` does; it must have this seal.

    Raises:
        CheckpointError: it cannot be written, does not read back as written, or has another seal.
    """
    found = write_file(path, _Blocks(origin, 0 if seal is None else seal.head_nbytes))
    if seal is not None and found != seal:
        raise CheckpointError(
            f"{origin} is damaged: what was read for {path} is not what was written; check its disk"
        )
    return found


def copy_folder(origin: Location, target: Location, last: str | None = None) -> None:
    """Write copies of all files below a folder, several at a time, `last` after the others.

    Raises:
        CheckpointError: one cannot be read or written.
    """
    others = [name for name in _names_below(origin) if name != last]
    with ThreadPoolExecutor(_AT_ONCE, "hadal-copy") as pool:
        for _ in pool.map(lambda name: copy_file(origin / name, inside(target, name)), others):
            pass
    if last is not None:
        copy_file(origin / last, target / last)


def _names_below(folder: Location) -> Iterator[str]:
    """Yield the names of the files in a folder and in those below it, relative to it."""
    for item in items_of(folder):
        if item.is_folder:
            yield from (f"{item.name}/{name}" for name in _names_below(folder / item.name))
        else:
            yield item.name


def check_file(path: Location, seal: Seal, *, whole: bool, kept: Kept | None = None) -> None:
    """Compare a file with its seal: its size and first chunk, or, if `whole`, every byte.

    The bytes read are kept as far as `kept` has room.

    Raises:
        CheckpointError: the file is missing, cannot be read, or is damaged.
    """
    with system_errors(path, "read"):
        file = storage_of(path).open(path)
        if file.nbytes != seal.nbytes:
            raise CheckpointError(f"{path} is damaged: {file.nbytes} bytes, expected {seal.nbytes}")
        sum_of_it, checksum = xxhash.xxh3_64(), seal.head_checksum
        if whole:
            # Memory is constant, apart from the kept bytes.
            checksum = seal.checksum
            for block in file.blocks(0, seal.nbytes, kept):
                sum_of_it.update(block)
        else:
            sum_of_it.update(file.read(0, seal.head_nbytes))
        if sum_of_it.intdigest() != checksum:
            raise CheckpointError(
                f"{path} is damaged, or belongs to another checkpoint or rank: its checksum is not"
                " the one in the index; use another checkpoint"
            )


def open_file(path: Location) -> StoredFile:
    """Return a file to read ranges of; pipes and devices, which could block, are refused.

    Raises:
        CheckpointError: there is no such file.
    """
    with system_errors(path, "read"):
        return storage_of(path).open(path)


def read_small(path: Location, limit: int) -> bytes:
    """Return the contents of a file of at most `limit` bytes; a save may replace it meanwhile."""
    storage = storage_of(path)
    with system_errors(path, "read"):
        while True:
            file = storage.open(path)
            if file.nbytes > limit:
                raise CheckpointError(f"{path} is damaged: larger than {limit} bytes")
            content: bytes | OSError
            try:
                content = file.read(0, file.nbytes)
            except OSError as error:
                content = error
            now = storage.find(path)
            if now is not None and now.nbytes != file.nbytes:
                continue  # replaced: these may be the first bytes of the new file
            if isinstance(content, OSError):
                raise content
            return content


def inside(folder: _Folder, name: str) -> _Folder:
    """Return the path of a name that a checkpoint's contents give; links on the way are followed.

    Raises:
        CheckpointError: the name is absolute, or leads out of `folder` by `..`.
    """
    if "\0" in name or PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
        raise CheckpointError(
            f"{folder} names {name!r}, which leads out of the checkpoint's folder; do not trust it"
        )
    return folder / name


def replace_file(path: Location, content: str | bytes, mark: str = "") -> None:
    """Replace a file's contents atomically: after a crash it has the old or the new contents."""
    given = content.encode() if isinstance(content, str) else content
    with system_errors(path, "written"):
        storage_of(path).replace(path, given, mark)


def exists(path: Location) -> bool:
    """Return whether there is a file or a folder at a location."""
    return _found(path) is not None


def is_file(path: Location) -> bool:
    """Return whether there is a file at a location."""
    found = _found(path)
    return found is not None and not found.is_folder


def items_of(path: Location) -> list[StorageItem]:
    """Return the items of a folder, sorted by name; an empty list if it does not exist."""
    with system_errors(path, "read"):
        return storage_of(path).items(path)


def is_folder(path: Location) -> bool:
    """Return whether there is a folder at a location."""
    found = _found(path)
    return found is not None and found.is_folder


def _found(path: Location) -> StorageItem | None:
    with system_errors(path, "read"):
        return storage_of(path).find(path)


def nbytes_at(path: Location) -> int:
    """Return the size of a file, or of all files in a folder; 0 if there is none."""
    found = _found(path)
    if found is None or not found.is_folder:
        return 0 if found is None else found.nbytes
    return sum(nbytes_at(path / item.name) for item in items_of(path))
