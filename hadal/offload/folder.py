"""A process's own folder on a disk, and the cleanup after dead processes.

Its name is `hadal-<host>-<process>-<mark>`. A lock on the file `lock` in it shows that the process
is alive: the system releases the lock however the process ends.
"""

from __future__ import annotations

import fcntl
import logging
import os
import re
import secrets
import socket
from contextlib import suppress
from pathlib import Path

from hadal.errors import OffloadError

STATES = "states"
"""The file that holds all regions."""
_LOCK = "lock"
_STAGED = ".safetensors"  # files of a checkpoint that are still to be uploaded
_NAME = re.compile(r"hadal-(?P<host>.+)-\d+-[0-9a-f]{8}")

_log = logging.getLogger(__name__)


class OwnFolder:
    """A folder that lasts until it is removed or its process ends.

    `key` is the configuration key that sets `parent`, for error messages.
    """

    def __init__(self, parent: Path, key: str = "nvme_path") -> None:
        try:
            parent.mkdir(parents=True, exist_ok=True)
            _sweep(parent)
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


def _sweep(parent: Path) -> None:
    """Remove the folders of this host's dead processes."""
    for path in sorted(parent.glob(f"hadal-{socket.gethostname()}-*")):
        found = _NAME.fullmatch(path.name)
        if not found or found["host"] != socket.gethostname() or path.is_symlink():
            continue
        with suppress(OSError):  # it is another user's, or another process is sweeping it
            _sweep_one(path)


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
