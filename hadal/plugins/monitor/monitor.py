"""All monitors of a training run behind one object: `engine.monitor`."""

from __future__ import annotations

import atexit
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

from hadal.plugins.monitor.record import GivenScalars, ScalarDraft, events_of
from hadal.plugins.monitor.writer import GuardedWriter, Writer

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
