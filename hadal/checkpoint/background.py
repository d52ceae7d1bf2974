"""Saves of one engine: synchronous, or by a thread that writes a copy while training goes on.

The copy is in host memory, or in files on this machine, which the thread then uploads.
"""

from __future__ import annotations

import atexit
import concurrent.futures.thread  # noqa: F401 - see `_finish_all`
import logging
import os
import sys
import threading
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor

from hadal.checkpoint.storage import Location
from hadal.checkpoint.together import together
from hadal.comm import Ranks
from hadal.comm.collectives import gather_codes
from hadal.device import current_device, device_thread, host_empty, read_on_host, synchronize
from hadal.errors import CheckpointError
from hadal.offload.file import OwnFolder

if TYPE_CHECKING:
    from hadal.checkpoint.collecting import Values
    from hadal.checkpoint.live import Live
    from hadal.checkpoint.saving import SaveJob, SaveRequest

_log = logging.getLogger(__name__)
_WHAT = "what is to be saved"
_FAILED = 1
"""The exit code of a program whose last save failed."""


class Saver:
    """Saves one engine's state, one save at a time.

    The thread communicates with the other ranks' threads in a group of its own, so its messages
    never mix with those of training. The next save, a load and the end of the program wait for it.
    """

    def __init__(self, world: Ranks) -> None:
        self._world = world
        self._apart: Ranks | None = None
        self._thread: threading.Thread | None = None
        self._fault: CheckpointError | None = None
        # Host memory for copies of the state, reused because first writes to memory are slow.
        self._memory: dict[str, Tensor] = {}
        self._folder: OwnFolder | None = None
        self._has_warned = False
        _finish_at_exit()

    def save(self, request: SaveRequest, live: Live) -> Location:
        """Save; with `Rules.is_async`, return once the state is staged. All ranks must call it.

        Returns the checkpoint's folder, which is the same on all ranks.

        A save before it that failed in the background has been logged; this one goes on.

        Raises:
            CheckpointError: on every rank: this save failed, or cannot begin.
        """
        from hadal.checkpoint.saving import begin  # for this alone

        self._join()
        self._fault = None
        _failed.discard(self)
        job = begin(request, live)
        why_not = self._why_not_staged(job, live) if live.rules.is_async else None
        if why_not is not None and not self._has_warned and self._world.rank == 0:
            self._has_warned = True
            _log.warning(
                "checkpoint.async_save: %s, so training waits until the checkpoint is written",
                why_not,
            )
        if why_not is not None or not live.rules.is_async:
            job.write(self._world)
            return job.path
        if self._apart is None:
            self._apart = self._world.apart()
        folder = live.rules.staging.folder
        job = self._detached(job) if folder is None else self._on_disk(job, folder)
        self._thread = device_thread(
            self._write, job, self._apart, name="hadal-checkpoint", daemon=False
        )
        _running.add(self)
        self._thread.start()
        return job.path

    def _why_not_staged(self, job: SaveJob, live: Live) -> str | None:
        """Return why a state cannot be staged, the same on all ranks; None if it can."""
        folder, limit = live.rules.staging
        if folder is None and live.loads_on_use:
            return "state on disk, or stored as int8, is not copied to host memory"
        if limit is None:
            return None
        largest = max(gather_codes(job.nbytes, self._world))
        if largest <= limit:
            return None
        return f"a rank's state takes {largest:,} bytes, and checkpoint.staging.size is {limit:,}"

    def _on_disk(self, job: SaveJob, folder: Path) -> SaveJob:
        """Write this rank's files into a directory; return the job of uploading them."""
        rank = self._world.rank
        try:
            with together(self._world, f"checkpoint {job.path} was not staged in {folder}"):
                self._folder = OwnFolder(folder, "checkpoint.staging.folder")
                return job.staged_in(self._folder.path, rank)
        except BaseException:
            self._forget_folder()
            raise

    def _forget_folder(self) -> None:
        folder, self._folder = self._folder, None
        if folder is not None:
            folder.remove()

    def _detached(self, job: SaveJob) -> SaveJob:
        """Return the job with copies of all tensors in host memory."""
        contents = replace(job.contents, tensors=self._copied(job.contents.tensors))
        own, client = (
            plain._replace(
                tensors={
                    name: read_on_host(one, _WHAT).clone() for name, one in plain.tensors.items()
                }
            )
            for plain in (job.own, job.client)
        )
        synchronize(current_device(), _WHAT)
        # The end of the program waits for this thread, which then cannot start another one.
        writing = job.rules.writing._replace(is_doubled=False)
        rules = job.rules._replace(writing=writing)
        return replace(job, contents=contents, own=own, client=client, rules=rules)

    def _copied(self, tensors: Mapping[str, Values]) -> dict[str, Values]:
        """Return copies of the tensors in the memory, of which nothing else is kept."""
        known, self._memory = self._memory, {}
        for name, value in tensors.items():
            if not isinstance(value, Tensor):
                continue  # a save with state on a disk is never detached
            buffer = known.get(name)
            if buffer is None or buffer.shape != value.shape or buffer.dtype != value.dtype:
                pin = value.device.type != "cpu"
                buffer = host_empty(value.numel(), value.dtype, pinned=pin).view(value.shape)
            self._memory[name] = buffer.copy_(value, non_blocking=True)
        return {**self._memory}

    def _write(self, job: SaveJob, ranks: Ranks) -> None:
        try:
            job.write(ranks)
        except CheckpointError as error:
            self._fault = error
        except Exception as error:  # the other ranks are gone, for example
            self._fault = CheckpointError(f"checkpoint {job.path} was not saved: {error!r}")
        self._forget_folder()
        if self._fault is not None:
            _log.error("%s", self._fault)
            _failed.add(self)
        _running.discard(self)

    def _join(self) -> bool:
        """Wait for the thread; return whether there was one."""
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.join()
        return thread is not None

    def wait(self) -> None:
        """Wait for the save in progress. All ranks must call it.

        Raises:
            CheckpointError: on every rank: it failed.
        """
        if not self._join():
            return
        fault, self._fault = self._fault, None
        _failed.discard(self)
        with together(self._world, "the checkpoint saved in the background"):
            if fault is not None:
                raise fault


# ---- the end of the program ----------------------------------------------------------------------

# The savers with a save in progress, and those whose last save failed and was not waited for.
_running: set[Saver] = set()
_failed: set[Saver] = set()


def _finish_all() -> None:
    """Wait for all saves.

    Python calls this before it stops its pools of threads, with which packages upload: functions
    are called in the reverse order of their registration, and the pools' was registered first.
    """
    for saver in list(_running):
        saver._join()


def _leave() -> None:
    """End the program with exit code 1 if its last save failed, which was logged as an error.

    Functions registered with `atexit` before Hadal was imported do not run: there is no other way
    to change the exit code at this point.
    """
    if _failed:
        logging.shutdown()
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(_FAILED)


@cache
def _finish_at_exit() -> None:
    atexit.register(_leave)
    # Without it the program also waits for the threads, but later.
    register = getattr(threading, "_register_atexit", None)
    if register is not None:
        register(_finish_all)
