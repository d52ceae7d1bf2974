"""A file with reserved space on a disk; every disk fault is raised as an `OffloadError`."""

from __future__ import annotations

import errno
import logging
import os
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
            free = _free_nbytes(self._disk)
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


def _free_nbytes(folder: Path) -> int | None:
    """Return the bytes that an unprivileged user may still write; None if unknown."""
    status = os.statvfs(folder)
    return None if not status.f_blocks else status.f_bavail * status.f_frsize


def _remedy(error: OSError) -> str:
    return _REMEDIES.get(error.errno or 0, "use another folder (`nvme_path`)")
