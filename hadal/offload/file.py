"""A file with reserved space in a folder of this process; faults are raised as `OffloadError`."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import re
import secrets
import socket
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Literal, TypeAlias

from hadal.errors import OffloadError
from hadal.offload.direct import Move, moved, set_direct

Act: TypeAlias = Literal["read", "written"]

_log = logging.getLogger(__name__)

_ELSEWHERE = "free some space there, or use a folder on another disk (`nvme_path`)"
_REMEDIES = {
    errno.ENOSPC: _ELSEWHERE,
    errno.EDQUOT: _ELSEWHERE,
    errno.EFBIG: "raise the limit for the length of files (`ulimit -f`)",
    errno.EIO: "check the disk's health (`dmesg`), and use a folder on another (`nvme_path`)",
}
_GONE = "do not change the folders hadal-* during training; resume from the last checkpoint"


class DiskFile:
    """A new file that several threads read and write at given positions.

    Args:
        path: the path of the file.
        disk: the configured folder, for error messages.
    """

    def __init__(self, path: Path, disk: Path) -> None:
        self.path = path
        self._disk = disk
        self.nbytes = 0
        """The reserved bytes."""
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        self._descriptor = os.open(path, flags, 0o600)
        self._is_direct = True
        self._go_direct(True)

    def reserve(self, nbytes: int, what: str) -> None:
        """Extend the file to `nbytes`, with all of it allocated on the disk.

        Raises:
            OffloadError: there is no room for `what`; or the file was truncated by someone else, so
                that extending it would only restore its length.
        """
        needed = nbytes - self.nbytes
        if needed <= 0:
            return
        try:
            self._check(f"{self.path}: {what} cannot be added", self.nbytes)
            status = os.statvfs(self._disk)
            free = None if not status.f_blocks else status.f_bavail * status.f_frsize
            if free is not None and free < needed:
                raise OffloadError(
                    f"no room for {what} on the disk of {self._disk}: {needed} bytes are"
                    f" needed, but {free} are free; {_ELSEWHERE}"
                )
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(self._descriptor, self.nbytes, needed)
            else:
                os.ftruncate(self._descriptor, nbytes)
        except OffloadError:
            raise
        except OSError as error:
            with suppress(OSError):
                os.ftruncate(self._descriptor, self.nbytes)
            raise OffloadError(
                f"no room for {what}: {needed} more bytes of {self.path} cannot be reserved:"
                f" {error.strerror}; {_remedy(error)}"
            ) from error
        self.nbytes = nbytes

    def shrink(self, nbytes: int) -> None:
        """Truncate the file to `nbytes`, to free the space on the disk."""
        if nbytes < self.nbytes:
            self.nbytes = nbytes
            if os.fstat(self._descriptor).st_size > nbytes:
                os.ftruncate(self._descriptor, nbytes)

    def read(self, parts: Sequence[memoryview], place: int, what: str) -> None:
        """Fill the parts, in order, from position `place`.

        Raises:
            OffloadError: the read failed.
        """
        self._move(os.preadv, "read", parts, place, what)

    def write(self, parts: Sequence[memoryview], place: int, what: str) -> None:
        """Write the parts, in order, at position `place`.

        Raises:
            OffloadError: the write failed.
        """
        self._move(os.pwritev, "written", parts, place, what)

    def close(self) -> None:
        """Close the file without removing it."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def _move(
        self, move: Move, act: Act, parts: Sequence[memoryview], place: int, what: str
    ) -> None:
        wanted = sum(map(len, parts))
        where = f"{self.path}: {what}, {wanted} bytes at {place}, cannot be {act}"
        try:
            self._check(where, place + wanted)
            done = self._moved(move, parts, place)
            if act == "written" and not self._is_direct:
                # Otherwise a fault would occur much later and go unnoticed.
                os.fdatasync(self._descriptor)
        except OffloadError:
            raise
        except OSError as error:
            raise OffloadError(f"{where}: {error.strerror}; {_remedy(error)}") from error
        if done < wanted:
            self._check(where, place + wanted)
            raise OffloadError(f"{where}: it ended after {done} bytes; {_REMEDIES[errno.EIO]}")

    def _check(self, where: str, needed: int) -> None:
        """Check that the file was not deleted or truncated to less than `needed` by someone else.

        Only these bytes are stable, because other threads reserve and free the rest.
        """
        status = os.fstat(self._descriptor)
        if not status.st_nlink:
            raise OffloadError(f"{where}: the file was deleted; {_GONE}")
        if status.st_size < min(needed, self.nbytes):
            raise OffloadError(
                f"{where}: the file was truncated to {status.st_size} bytes, but {self.nbytes} were"
                f" reserved; {_GONE}"
            )

    def _moved(self, move: Move, parts: Sequence[memoryview], place: int) -> int:
        try:
            return moved(move, self._descriptor, parts, place)
        except OSError as error:
            # A file system that accepts the flag but refuses transfers, or needs larger alignment.
            if error.errno != errno.EINVAL:
                raise
            self._go_direct(False)
            return moved(move, self._descriptor, parts, place)

    def _go_direct(self, wanted: bool) -> None:
        is_direct = set_direct(self._descriptor, wanted)
        if self._is_direct and not is_direct:
            _log.warning(
                "the file system of %s does not support direct I/O (O_DIRECT); reads and writes go"
                " through the system's cache, which is slower and uses host memory",
                self._disk,
            )
        self._is_direct = is_direct


def _remedy(error: OSError) -> str:
    return _REMEDIES.get(error.errno or 0, "use another folder (`nvme_path`)")


# ---- the folder ----------------------------------------------------------------------------------

# Its name is `hadal-<host>-<process>-<mark>`. A lock on the file `lock` in it shows that the
# process is alive: the system releases the lock however the process ends.

STATES = "states"
"""The file that holds all regions."""
_LOCK = "lock"
_STAGED = ".safetensors"  # files of a checkpoint that are still to be uploaded
_NAME = re.compile(r"hadal-(?P<host>.+)-\d+-[0-9a-f]{8}")


class OwnFolder:
    """A folder that lasts until it is removed or its process ends.

    `key` is the configuration key that sets `parent`, for error messages.
    """

    def __init__(self, parent: Path, key: str = "nvme_path") -> None:
        try:
            parent.mkdir(parents=True, exist_ok=True)
            # Remove the folders of this host's dead processes
            for path in sorted(parent.glob(f"hadal-{socket.gethostname()}-*")):
                found = _NAME.fullmatch(path.name)
                if not found or found["host"] != socket.gethostname() or path.is_symlink():
                    continue
                with suppress(OSError):  # it is another user's, or another process is sweeping it
                    _sweep_one(path)
            self.path, self._lock = _made(parent)
        except OSError as error:
            raise OffloadError(
                f"{parent} cannot hold offloaded state: {error.strerror}; use a folder that"
                f" this process may write to (`{key}`)"
            ) from error

    def remove(self) -> None:
        """Remove the folder and its contents; log a warning if that fails."""
        try:
            _remove(self.path)
        except OSError as error:
            _log.warning("%s cannot be removed: %s", self.path, error.strerror)
        finally:
            os.close(self._lock)


def _made(parent: Path) -> tuple[Path, int]:
    """Create a folder; return it and the descriptor that holds its lock.

    A sweep may remove it before its lock is held; then another one is created.
    """
    while True:
        mark = secrets.token_hex(4)  # leaves the program's random generators unchanged
        path = parent / f"hadal-{socket.gethostname()}-{os.getpid()}-{mark}"
        path.mkdir(mode=0o700)
        try:
            lock = os.open(path / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except FileNotFoundError:
            continue
        try:
            is_ours = _is_locked(lock)
        except OSError as error:
            _log.warning(
                "the file system of %s does not support locks (%s); leftovers of a crash will not"
                " be removed automatically",
                parent,
                error.strerror,
            )
            return path, lock
        if is_ours and (path / _LOCK).exists():
            return path, lock
        os.close(lock)


def _is_locked(lock: int) -> bool:
    """Try to take the lock; return True if it was free."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _sweep_one(path: Path) -> None:
    try:
        lock = os.open(path / _LOCK, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        path.rmdir()  # empty: an interrupted sweep left it, or its process creates another one
        return
    try:
        if _is_locked(lock):
            _remove(path)
            _log.info("removed %s, left by a dead process", path)
    finally:
        os.close(lock)


def _remove(path: Path) -> None:
    """Remove a folder, its lock last, so that an interrupted removal can be resumed.

    Files of others are kept, and then so is the folder; that raises OSError.
    """
    with suppress(FileNotFoundError):
        names = [name for name in os.listdir(path) if name == STATES or name.endswith(_STAGED)]
        for name in (*names, _LOCK):
            with suppress(FileNotFoundError):
                (path / name).unlink()
        path.rmdir()
