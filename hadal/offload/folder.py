"""The folder that a process has for itself on a disk, and what dead processes have left there.

It is called `hadal-<host>-<process>-<mark>`, and a lock on the file `lock` in it says that its
process lives: the system lets go of it with the process, however that ends.
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
"""The file that all regions lie in."""
_LOCK = "lock"
_NAME = re.compile(r"hadal-(?P<host>.+)-\d+-[0-9a-f]{8}")

_log = logging.getLogger(__name__)


class OwnFolder:
    """A folder that lasts as long as its process, or until it is removed."""

    def __init__(self, parent: Path) -> None:
        try:
            parent.mkdir(parents=True, exist_ok=True)
            _sweep(parent)
            self.path, self._lock = _made(parent)
        except OSError as error:
            raise OffloadError(
                f"{parent} cannot hold offloaded state: {error.strerror}; name a folder that"
                " this process may write to (`nvme_path`)"
            ) from error

    def remove(self) -> None:
        """Remove it with all that is in it; what cannot be removed is told."""
        try:
            _remove(self.path)
        except OSError as error:
            _log.warning("%s cannot be removed: %s", self.path, error.strerror)
        finally:
            os.close(self._lock)


def _made(parent: Path) -> tuple[Path, int]:
    """A new folder, and the descriptor that holds its lock.

    A sweep may find it before its lock is held, and remove it; then another is made.
    """
    while True:
        mark = secrets.token_hex(4)  # moves no random generator
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
                "the file system of %s knows no locks (%s); what a crash leaves there will not be"
                " removed by itself",
                parent,
                error.strerror,
            )
            return path, lock
        if is_ours and (path / _LOCK).exists():
            return path, lock
        os.close(lock)


def _is_locked(lock: int) -> bool:
    """Take the lock, and say whether that went."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _sweep(parent: Path) -> None:
    """Remove the folders of this host's processes that are dead."""
    for path in sorted(parent.glob(f"hadal-{socket.gethostname()}-*")):
        found = _NAME.fullmatch(path.name)
        if not found or found["host"] != socket.gethostname() or path.is_symlink():
            continue
        with suppress(OSError):  # another user's, or another process sweeps it just now
            _sweep_one(path)


def _sweep_one(path: Path) -> None:
    try:
        lock = os.open(path / _LOCK, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        path.rmdir()  # empty: its sweep was cut short, or it is being made and will be made anew
        return
    try:
        if _is_locked(lock):
            _remove(path)
            _log.info("removed %s, which a process that is dead has left", path)
    finally:
        os.close(lock)


def _remove(path: Path) -> None:
    """The lock goes last, so that a removal that is cut short is taken up again."""
    for name in (STATES, _LOCK):
        with suppress(FileNotFoundError):
            (path / name).unlink()
    with suppress(FileNotFoundError):
        path.rmdir()
