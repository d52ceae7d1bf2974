"""Durable, verified files: syncs, checksums and atomic renames.

The checksum is 64-bit XXH3: it finds damage at the speed of memory (CRC-32, which earlier versions
wrote, takes several times as long). It is no protection against a forger, who could write another
checkpoint altogether.

Tests: tests/checkpoint/test_damage.py, tests/checkpoint/test_crash.py
"""

from __future__ import annotations

import errno
import os
import secrets
import stat
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath
from typing import BinaryIO, NamedTuple, Protocol

import xxhash

from hadal.checkpoint.direct import Kept, Output, blocks_of, read_on
from hadal.errors import CheckpointError

Chunk = bytes | memoryview
_READ_NBYTES = 1 << 20


CHECKSUM = "xxh3_64"
"""The checksum that new files are written with."""


class Seal(NamedTuple):
    """A file's expected size and checksum, and those of its first chunk."""

    nbytes: int
    checksum: int
    head_nbytes: int
    head_checksum: int
    kind: str = CHECKSUM
    """The kind of checksum: one of `CHECKSUMS`."""

    @property
    def numbers(self) -> list[int]:
        """All fields but the kind, which is the same for all files."""
        return [self.nbytes, self.checksum, self.head_nbytes, self.head_checksum]


class _Sum(Protocol):
    """A running checksum."""

    def update(self, given: Chunk, /) -> None: ...

    def intdigest(self) -> int: ...


class _Crc32:
    """The checksum of formats before 6."""

    def __init__(self) -> None:
        self._value = 0

    def update(self, given: Chunk, /) -> None:
        self._value = zlib.crc32(given, self._value)

    def intdigest(self) -> int:
        return self._value


_KINDS: dict[str, Callable[[], _Sum]] = {CHECKSUM: xxhash.xxh3_64, "crc32": _Crc32}
CHECKSUMS = frozenset(_KINDS)


@contextmanager
def system_errors(path: Path, act: str) -> Iterator[None]:
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


def write_file(path: Path, chunks: Iterable[Chunk], *, doubled: bool = False) -> Seal:
    """Write a new file, wait until it is on disk, and check its size and first chunk.

    With `doubled` one block is written while the next is filled.

    Raises:
        CheckpointError: it cannot be written, or does not read back as written.
    """
    nbytes = head_nbytes = head_checksum = 0
    found = _KINDS[CHECKSUM]()
    with system_errors(path, "written"), open(path, "xb", buffering=0) as file:
        with Output(file.fileno(), doubled=doubled) as output:
            for number, chunk in enumerate(chunks):
                for start in range(0, len(chunk), _READ_NBYTES):
                    # Copied and summed while it is in the cache.
                    piece = chunk[start : start + _READ_NBYTES]
                    output.write(piece)
                    found.update(piece)
                nbytes += len(chunk)
                if number == 0:
                    head_nbytes, head_checksum = nbytes, found.intdigest()
        os.fsync(file.fileno())
    seal = Seal(nbytes, found.intdigest(), head_nbytes, head_checksum)
    check_file(path, seal, whole=False)
    return seal


def check_file(path: Path, seal: Seal, *, whole: bool, kept: Kept | None = None) -> None:
    """Compare a file with its seal: its size and first chunk, or, if `whole`, every byte.

    The bytes read are kept as far as `kept` has room.

    Raises:
        CheckpointError: the file is missing, cannot be read, or is damaged.
    """
    with open_regular(path) as file, system_errors(path, "read"):
        found = os.fstat(file.fileno()).st_size
        if found != seal.nbytes:
            raise CheckpointError(f"{path} is damaged: {found} bytes, expected {seal.nbytes}")
        nbytes, checksum = seal.nbytes, seal.checksum
        if not whole:
            nbytes, checksum = seal.head_nbytes, seal.head_checksum
            read_on(file.fileno(), False)
        # Memory is constant, apart from the kept bytes.
        sum_of_it = _KINDS[seal.kind]()
        for block in blocks_of(file.fileno(), 0, nbytes, kept):
            sum_of_it.update(block)
        if sum_of_it.intdigest() != checksum:
            raise CheckpointError(
                f"{path} is damaged, or belongs to another checkpoint or rank: its checksum is not"
                " the one in the index; use another checkpoint"
            )


@contextmanager
def open_regular(path: Path) -> Iterator[BinaryIO]:
    """Open a file for reading; refuse a pipe or a device, which could block forever.

    Raises:
        CheckpointError: there is no such regular file.
    """
    with system_errors(path, "read"):
        if not stat.S_ISREG(os.stat(path).st_mode):
            raise CheckpointError(f"{path} cannot be read: it is not a file")
        file = open(path, "rb", buffering=0)  # noqa: SIM115 - closed below
    with file:
        yield file


def read_small(path: Path, limit: int) -> bytes:
    """Return the contents of a file of at most `limit` bytes."""
    with open_regular(path) as file, system_errors(path, "read"):
        if os.fstat(file.fileno()).st_size > limit:
            raise CheckpointError(f"{path} is damaged: larger than {limit} bytes")
        return file.read()


def inside(folder: Path, name: str) -> Path:
    """Return the path of a name that a checkpoint's contents give; links on the way are followed.

    Raises:
        CheckpointError: the name is absolute, or leads out of `folder` by `..`.
    """
    if "\0" in name or PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
        raise CheckpointError(
            f"{folder} names {name!r}, which leads out of the checkpoint's folder; do not trust it"
        )
    return folder / name


def replace_file(path: Path, text: str, mark: str = "") -> None:
    """Replace a file's contents atomically: after a crash it has the old or the new contents."""
    draft = path.with_name(f".{path.name}.{mark or new_mark()}.partial")
    with system_errors(path, "written"):
        try:
            write_file(draft, [text.encode()])
            os.replace(draft, path)
        except OSError:
            with suppress(OSError):
                draft.unlink()
            raise
        sync_folder(path.parent)


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
