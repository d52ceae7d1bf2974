"""Leases: a small file next to a save's folder names the process that is saving.

A lease `<tag>/<mark>.lease` exists before the first file of the save `<tag>/<mark>/` and until its
outcome is final, and is refreshed every few seconds. It is dead if its process has ended, which
only the same machine can see, or if it has not been refreshed for a while by the storage's clock.
"""

from __future__ import annotations

import json
import logging
import os
import re
import socket
import threading
import time
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from hadal.checkpoint.files import read_small, replace_file, storage_of
from hadal.checkpoint.storage import Location, StorageItem
from hadal.errors import CheckpointError

_log = logging.getLogger(__name__)
_LEASE = re.compile(r"(?P<mark>[0-9a-f]{16})\.lease")
_LIMIT = 1 << 16
REFRESH_S, DEAD_S = 15.0, 120.0
"""Seconds between two refreshes of a lease, and seconds without one after which it is dead."""
_LOOK_S = 1.0
# The marks of this process's own leases.
_held: set[str] = set()


class Holder(NamedTuple):
    """The process that holds a lease."""

    host: str
    machine: str
    """The running system and its PID namespace; processes of another are not visible."""
    pid: int
    start: str
    """The start time of the process, which distinguishes it from a later one with the same pid."""

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"


def lease_of(folder: Location, mark: str) -> Location:
    """Return the location of the lease on the save with this mark in a tag's folder."""
    return folder / f"{mark}.lease"


def mark_of(item: StorageItem) -> str | None:
    """Return the mark of a lease's file; None for any other file."""
    found = _LEASE.fullmatch(item.name)
    return found["mark"] if found and not item.is_folder else None


class Lease:
    """A held lease; a thread refreshes it until `release`."""

    def __init__(self, folder: Location, mark: str) -> None:
        """Write the lease.

        Raises:
            CheckpointError: it cannot be written.
        """
        self._path, self._mark = lease_of(folder, mark), mark
        self._ended = threading.Event()
        _held.add(mark)
        try:
            self._write()
        except CheckpointError:
            _held.discard(mark)
            raise
        self._thread = threading.Thread(target=self._refresh, name="hadal-lease", daemon=True)
        self._thread.start()

    def _write(self) -> None:
        content = {**_this_process()._asdict(), "since": time.time()}
        replace_file(self._path, json.dumps(content))

    def _refresh(self) -> None:
        while not self._ended.wait(REFRESH_S):
            try:
                if storage_of(self._path).find(self._path) is None:
                    return  # `expect_held` reports it
                self._write()
            except (CheckpointError, OSError) as error:
                _log.warning("%s: the lease was not refreshed: %s", self._path, error)

    def written_at(self) -> float:
        """Return when the lease was last written, by the storage's clock if it has one."""
        found = storage_of(self._path).find(self._path)
        return (found and found.modified) or time.time()

    def expect_held(self) -> None:
        """Check that no other job has removed the lease as dead.

        Raises:
            CheckpointError: it is gone.
        """
        if storage_of(self._path).find(self._path) is None:
            raise CheckpointError(
                f"{self._path} was removed: another job considered this save abandoned, as it had"
                f" not been refreshed for {DEAD_S:.0f} s; save again"
            )

    def release(self) -> None:
        """Remove the lease if possible; otherwise a later save removes it."""
        self._ended.set()
        self._thread.join()
        with suppress(OSError):
            storage_of(self._path).remove(self._path)
        _held.discard(self._mark)


def holder_of(folder: Location, mark: str) -> Holder | None:
    """Return the process that holds a lease; None if it is gone or incomplete."""
    try:
        content: dict[str, Any] = json.loads(read_small(lease_of(folder, mark), _LIMIT))
        return Holder(
            str(content["host"]),
            str(content["machine"]),
            int(content["pid"]),
            str(content["start"]),
        )
    except (CheckpointError, ValueError, KeyError, TypeError):
        return None


def is_alive(folder: Location, mark: str, now: float | None = None) -> bool:
    """Return whether the lease exists and its save may still be under way.

    `now` is the time by the storage's clock; None: this machine's.
    """
    if mark in _held:
        return True
    holder, here = holder_of(folder, mark), _this_process()
    if holder is not None and holder.machine == here.machine:
        return holder.pid != here.pid and _start_of(holder.pid) == holder.start
    found = storage_of(folder).find(lease_of(folder, mark))
    return found is not None and (now or time.time()) - found.modified < DEAD_S


def expect_alone(folder: Location, mark: str, now: float) -> None:
    """Check that no other process saves the same checkpoint; `mark` is this process's own lease.

    `now` is the time by the storage's clock.

    A lease of another machine is watched until it is refreshed or dead, so a job that restarts on
    another machine can continue after the previous one was lost.

    Raises:
        CheckpointError: another process is saving it; the message names the process.
    """
    began = time.monotonic()
    others = [
        (found, item.modified)
        for item in storage_of(folder).items(folder)
        if (found := mark_of(item)) is not None and found != mark
    ]
    for other, modified in others:
        while True:
            if not is_alive(folder, other, now + time.monotonic() - began):
                break
            holder = holder_of(folder, other)
            lease = storage_of(folder).find(lease_of(folder, other))
            is_here = holder is not None and holder.machine == _this_process().machine
            if is_here or (lease is not None and lease.modified != modified):
                raise CheckpointError(
                    f"{folder} is being saved by {holder or 'another process'}; save under another"
                    " tag, or when that save has ended"
                )
            time.sleep(_LOOK_S)


def _this_process() -> Holder:
    return _holder(os.getpid())


@cache
def _holder(process: int) -> Holder:
    """Return this process as a holder; a forked one may be in another PID namespace."""
    host, system = socket.gethostname(), []
    with suppress(OSError):
        system.append(Path("/proc/sys/kernel/random/boot_id").read_text().strip())
        system.append(os.readlink("/proc/self/ns/pid"))
    return Holder(host, "/".join([host, *system]), process, _start_of(process))


def _start_of(pid: int) -> str:
    """Return when a process of this machine started; empty if there is none."""
    try:
        # The command's name may contain any character, including brackets.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return "" if fields[0] in ("Z", "X") else fields[19]
    except (OSError, IndexError):
        return ""
