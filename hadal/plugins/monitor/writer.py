"""The interface of one monitor, and the wrapper that keeps its errors out of training."""

from __future__ import annotations

import logging
import time
from typing import Protocol

from hadal.plugins.monitor.record import ScalarRecord

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
