"""One file on a disk: room is reserved in it, and every fault of the disk becomes an error."""

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

_ELSEWHERE = "free some space there, or name a folder on another disk (`nvme_path`)"
_REMEDIES = {
    errno.ENOSPC: _ELSEWHERE,
    errno.EDQUOT: _ELSEWHERE,
    errno.EFBIG: "raise the limit for the length of files (`ulimit -f`)",
    errno.EIO: "look at the disk's health (`dmesg`), and name a folder on another (`nvme_path`)",
}
_GONE = "leave the folders hadal-* alone while a training runs; go on from the last checkpoint"


class DiskFile:
    """A new file, which is read and written at places, by several threads at a time.

    Args:
        path: where it is made.
        disk: the folder that the user has named, as errors call the disk.
    """

    def __init__(self, path: Path, disk: Path) -> None:
        self.path = path
        self._disk = disk
        self.nbytes = 0
        """How much of it is reserved."""
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        self._descriptor = os.open(path, flags, 0o600)
        self._is_direct = True
        self._go_direct(True)

    def reserve(self, nbytes: int, what: str) -> None:
        """Let the file be so long, all of it on the disk from now on.

        Raises:
            OffloadError: there is no room for `what`, or somebody else has shortened the file,
                which would be whole again in length alone.
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
                    f" needed, {free} are free; {_ELSEWHERE}"
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
        """Give what lies beyond so many bytes back to the disk."""
        if nbytes < self.nbytes:
            self.nbytes = nbytes
            if os.fstat(self._descriptor).st_size > nbytes:
                os.ftruncate(self._descriptor, nbytes)

    def read(self, parts: Sequence[memoryview], place: int, what: str) -> None:
        """Fill the parts, one after the other, from a place on.

        Raises:
            OffloadError: that cannot be.
        """
        self._move(os.preadv, "read", parts, place, what)

    def write(self, parts: Sequence[memoryview], place: int, what: str) -> None:
        """Write the parts, one after the other, from a place on.

        Raises:
            OffloadError: that cannot be.
        """
        self._move(os.pwritev, "written", parts, place, what)

    def close(self) -> None:
        """Let go of it; it stays where it is."""
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
                # Else a fault would be told to nobody, long after.
                os.fdatasync(self._descriptor)
        except OffloadError:
            raise
        except OSError as error:
            raise OffloadError(f"{where}: {error.strerror}; {_remedy(error)}") from error
        if done < wanted:
            self._check(where, place + wanted)
            raise OffloadError(f"{where}: only {done} bytes were; {_REMEDIES[errno.EIO]}")

    def _check(self, where: str, needed: int) -> None:
        """See that nobody else has removed the file, or cut off some of the bytes before `needed`.

        Only these are sure to stay meanwhile: the rest comes and goes with what other threads
        reserve and give back.
        """
        status = os.fstat(self._descriptor)
        if not status.st_nlink:
            raise OffloadError(f"{where}: the file was deleted; {_GONE}")
        if status.st_size < min(needed, self.nbytes):
            raise OffloadError(
                f"{where}: the file was shortened to {status.st_size} bytes, {self.nbytes} were"
                f" reserved; {_GONE}"
            )

    def _moved(self, move: Move, parts: Sequence[memoryview], place: int) -> int:
        try:
            return moved(move, self._descriptor, parts, place)
        except OSError as error:
            # A file system that takes the flag and refuses the transfers, or wants larger borders.
            if error.errno != errno.EINVAL:
                raise
            self._go_direct(False)
            return moved(move, self._descriptor, parts, place)

    def _go_direct(self, wanted: bool) -> None:
        is_direct = set_direct(self._descriptor, wanted)
        if self._is_direct and not is_direct:
            _log.warning(
                "the file system of %s does not let files be read and written past the system's"
                " cache (O_DIRECT); they go through it, which is slower and takes host memory",
                self._disk,
            )
        self._is_direct = is_direct


def _free_nbytes(folder: Path) -> int | None:
    """What an ordinary user may still write there; None where the file system does not tell."""
    status = os.statvfs(folder)
    return None if not status.f_blocks else status.f_bavail * status.f_frsize


def _remedy(error: OSError) -> str:
    return _REMEDIES.get(error.errno or 0, "name another folder (`nvme_path`)")
