"""All monitors of a training run behind one object, whose errors stay out of training."""

from __future__ import annotations

import atexit
import logging
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from hadal.plugins.monitor.record import GivenScalars, ScalarDraft, ScalarRecord, events_of

_log = logging.getLogger(__name__)

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 300.0


class Writer(Protocol):
    """The interface of one monitor."""

    section: str
    """The section of the configuration that enables it."""

    def write(self, record: ScalarRecord) -> None:
        """Write the scalars of one record."""

    def flush(self) -> None:
        """Write what is buffered."""

    def close(self) -> None:
        """Write what is buffered, and release files and connections."""


class GuardedWriter:
    """A writer whose errors do not stop training.

    The first error is logged. Scalars that cannot be written are counted, and writing is retried
    after a pause, which grows from a second to five minutes. `close` logs how many were lost.
    """

    def __init__(self, writer: Writer) -> None:
        self.writer = writer
        self.lost = 0
        """Scalars that were not written."""
        self._first_fault: Exception | None = None
        self._pause = 0.0
        self._again_at = 0.0

    def write(self, record: ScalarRecord) -> None:
        """Write the scalars of one record, or count them as lost."""
        if self._pause and time.monotonic() < self._again_at:
            self.lost += len(record.values)
            return
        try:
            self.writer.write(record)
            self._pause = 0.0
        except Exception as error:  # any exception of a service's package
            self.lost += len(record.values)
            self._fail(error)

    def flush(self) -> None:
        """Write what is buffered."""
        if not self._pause:
            try:
                self.writer.flush()
            except Exception as error:  # any exception of a service's package
                self._fail(error)

    def close(self) -> None:
        """Close the writer and log how many scalars were lost, if any."""
        try:
            self.writer.close()
        except Exception as error:  # any exception of a service's package
            self._fail(error)
        if self.lost:
            _log.warning(
                "%s: %d scalars of this run were not written; the first error was %s",
                self.writer.section,
                self.lost,
                _shown(self._first_fault),
            )

    def _fail(self, error: Exception) -> None:
        self._pause = min(max(2 * self._pause, _FIRST_PAUSE_S), _LONGEST_PAUSE_S)
        self._again_at = time.monotonic() + self._pause
        if self._first_fault is None:
            self._first_fault = error
            _log.warning(
                "%s: cannot write (%s); training continues, scalars are lost until writing works"
                " again, and their number is logged at the end",
                self.writer.section,
                _shown(error),
            )


def _shown(error: Exception | None) -> str:
    return f"{type(error).__name__}: {error}"


# How long the end of a program waits for values that the device has not yet computed.
_LAST_LOOK_S = 2.0


class Monitor:
    """Writes scalars to every enabled monitor.

    Rank 0 writes; on the other ranks `write_events` does nothing. Values that the device is still
    computing are written once they are known, in the order of the calls: nothing waits for the
    device before `flush` or `close`.
    """

    def __init__(self, *, enabled: bool) -> None:
        self.enabled = enabled
        """True if the configuration enables any monitor. It is the same on every rank."""
        self._guards: tuple[GuardedWriter, ...] = ()
        self._drafts: deque[ScalarDraft] = deque()
        self._lock = threading.RLock()

    def open(self, writers: Sequence[Writer]) -> None:
        """Write to `writers` from now on, up to the end of the program at the latest."""
        self._guards = tuple(GuardedWriter(writer) for writer in writers)
        if self._guards:
            atexit.register(_close_at_exit, weakref.ref(self), os.getpid())

    @property
    def writers(self) -> tuple[Writer, ...]:
        """The writers of this rank."""
        return tuple(guard.writer for guard in self._guards)

    def write_events(self, event_list: Iterable[Any], flush: bool = True) -> None:
        """Write a program's own scalars.

        Args:
            event_list: tuples (name, value, samples): a text, a number or a tensor of one element,
                and the x-coordinate, which is `engine.global_samples` for the engine's own scalars.
            flush: no effect. Files are written at once, TensorBoard's within a second.

        Raises:
            UsageError: an item of the list is not such a triple.
        """
        if not self.enabled:
            return
        events = events_of(event_list)
        if self._guards and events:
            self.write(GivenScalars(events, time.time()))

    def write(self, draft: ScalarDraft) -> None:
        """Write a draft when its values are known, after all earlier drafts."""
        if self._guards:
            with self._lock:
                self._drafts.append(draft)
                self.write_known()

    def write_known(self) -> None:
        """Write the drafts whose values are known, up to the first whose values are not."""
        with self._lock:
            while self._drafts and self._drafts[0].is_known:
                self._write(self._drafts.popleft())

    def flush(self) -> None:
        """Write everything given so far. Waits for the device."""
        with self._lock:
            while self._drafts:
                self._write(self._drafts.popleft())
            for guard in self._guards:
                guard.flush()

    def close(self) -> None:
        """Write everything and close the writers; later scalars are dropped."""
        self.flush()
        self._close()

    def close_in_time(self, seconds: float = _LAST_LOOK_S) -> None:
        """Close, but wait for the device, which may hang, for at most this long."""
        deadline = time.monotonic() + seconds
        self.write_known()
        while self._drafts and time.monotonic() < deadline:
            time.sleep(0.01)
            self.write_known()
        self._drafts.clear()
        self._close()

    def _write(self, draft: ScalarDraft) -> None:
        for record in draft.records():
            for guard in self._guards:
                guard.write(record)

    def _close(self) -> None:
        guards, self._guards = self._guards, ()
        for guard in guards:
            guard.close()


def _close_at_exit(reference: weakref.ref[Monitor], process: int) -> None:
    """Write what is known when the program ends without `engine.destroy()`."""
    monitor = reference()
    if monitor is not None and os.getpid() == process:
        monitor.close_in_time()
