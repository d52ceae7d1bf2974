"""Saves of one engine: at once, or by a thread that writes a copy while training goes on."""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from hadal.checkpoint.collecting import Values
from hadal.checkpoint.live import Live
from hadal.checkpoint.saving import Job, Order, Plain, begin
from hadal.checkpoint.together import together
from hadal.comm import Ranks
from hadal.device import current_device, synchronize
from hadal.errors import CheckpointError

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Staging:
    """Host memory that a state is copied to; kept, since fresh memory is slow to write to."""

    buffers: dict[str, Tensor] = field(default_factory=dict)

    def copied(self, tensors: Mapping[str, Values], prefix: str) -> dict[str, Values]:
        """The same tensors, in this memory."""
        return {
            name: self._copied(f"{prefix}.{name}", value)
            for name, value in tensors.items()
            if isinstance(value, Tensor)  # nothing is on a disk, or the save is not detached
        }

    def _copied(self, name: str, value: Tensor) -> Tensor:
        buffer = self.buffers.get(name)
        if buffer is None or buffer.shape != value.shape or buffer.dtype != value.dtype:
            pin = value.device.type != "cpu"
            buffer = torch.empty(value.shape, dtype=value.dtype, pin_memory=pin)
            self.buffers[name] = buffer
        return buffer.copy_(value, non_blocking=True)

    def keep_only(self, job: Job) -> None:
        """Give back what the last save did not need."""
        used = {f"share.{name}" for name in job.share.tensors}
        self.buffers = {name: self.buffers[name] for name in used if name in self.buffers}


class Saver:
    """Saves one engine's state, one save at a time.

    A thread talks to the other ranks' threads in a group of its own: messages of training never
    mix with its own. It is waited for at the next save, at a load, and at the end of the program.
    """

    def __init__(self, world: Ranks) -> None:
        self._world = world
        self._apart: Ranks | None = None
        self._thread: threading.Thread | None = None
        self._fault: CheckpointError | None = None
        self._staging = _Staging()
        self._has_told = False

    def save(self, order: Order, live: Live) -> None:
        """Save; with `Rules.is_async`, return when all is copied. All ranks must call it.

        Raises:
            CheckpointError: on every rank: it failed, or the one begun before it did.
        """
        self.wait()
        job = begin(order, live)
        is_async = live.rules.is_async and not live.loads_on_use
        if live.rules.is_async and not is_async and not self._has_told and self._world.rank == 0:
            self._has_told = True
            _log.warning(
                "checkpoint.async_save: state on the disk, or stored as int8, is not copied to"
                " host memory, so that training waits until the checkpoint is written"
            )
        if not is_async:
            job.write(self._world)
            return
        if self._apart is None:
            self._apart = self._world.apart()
        job = self._detached(job)
        self._thread = threading.Thread(
            target=self._write, args=(job, self._apart), name="hadal-checkpoint"
        )
        self._thread.start()

    def _detached(self, job: Job) -> Job:
        """The same, in host memory of its own."""
        share = replace(job.share, tensors=self._staging.copied(job.share.tensors, "share"))
        own, client = (
            Plain(
                plain.values, {name: value.cpu().clone() for name, value in plain.tensors.items()}
            )
            for plain in (job.own, job.client)
        )
        synchronize(current_device(), "what is to be saved")
        # At the end of a program this thread is waited for, but cannot start another one.
        writing = replace(job.rules.writing, is_doubled=False)
        rules = replace(job.rules, writing=writing)
        detached = replace(job, share=share, own=own, client=client, rules=rules)
        self._staging.keep_only(detached)
        return detached

    def _write(self, job: Job, ranks: Ranks) -> None:
        try:
            job.write(ranks)
        except CheckpointError as error:
            self._fault = error
        except Exception as error:  # the other ranks are gone, for example
            self._fault = CheckpointError(f"checkpoint {job.path} was not saved: {error!r}")
        if self._fault is not None:
            _log.error("%s", self._fault)

    def wait(self) -> None:
        """Wait until the save under way has ended. All ranks must call it.

        Raises:
            CheckpointError: on every rank: it failed.
        """
        if self._thread is None:
            return
        self._thread.join()
        self._thread = None
        fault, self._fault = self._fault, None
        with together(self._world, "a checkpoint that was written meanwhile"):
            if fault is not None:
                raise fault
