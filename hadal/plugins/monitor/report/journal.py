"""Other contents of a report: warnings, checkpoints, memory, profile, communication."""

from __future__ import annotations

import json
import logging
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from hadal.config.monitors import JsonlMonitor
from hadal.errors import HadalError
from hadal.listener import Listener, Setting, Update
from hadal.plugins.monitor.files import LineFile, path_of

_log = logging.getLogger(__name__)
_house = logging.getLogger("hadal")

Lines = Mapping[str, Callable[[Any], Mapping[str, Any] | None]]
"""Functions by kind of line, called with the engine (None if it was garbage-collected). A function
returns None to leave the line out."""


class Journal(Listener):
    """Appends lines to a run's `events.jsonl`, on rank 0.

    Each line is one write at the end of the file, so it may fall between two lines of the monitor.

    Args:
        path: the file.
        first: lines that are written after the first update.
        known: lines that are written once they are known: after any update, or at the end.
        at_end: lines that are written when the engine is destroyed, or the program ends.
    """

    name = "hadal.report"

    def __init__(self, path: Path, first: Lines, known: Lines, at_end: Lines) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = LineFile(path)
        self._first, self._known, self._at_end = first, known, at_end
        self._engine: Callable[[], Any] = lambda: None
        self._updates = 0
        self._handler = _Warnings(self._append)
        _house.addHandler(self._handler)

    def on_attach(self, engine: Any) -> None:
        """Keep the engine."""
        self._engine = weakref.ref(engine)

    def after_update(self, update: Update) -> None:
        """Count updates."""
        self._updates = update.number
        first, self._first = self._first, {}
        self._write(first)
        self._write(self._known)

    def after_save(self, folder: Any, seconds: float) -> None:
        """Record the checkpoint."""
        self._append("checkpoint", {"path": str(folder), "step": self._updates, "seconds": seconds})

    def close(self) -> None:
        """Write what is known at the end."""
        _house.removeHandler(self._handler)
        self._write(self._known)
        self._write(self._at_end)
        self._file.close()

    def at_exit(self) -> None:
        """Write the same, with other ranks' records if they arrive within two seconds."""
        self.close()

    def _write(self, lines: Lines) -> None:
        engine = self._engine()
        for kind, make in lines.items():
            line = make(engine)
            if line is not None:
                self._append(kind, line)

    def _append(self, kind: str, line: Mapping[str, Any]) -> None:
        text = json.dumps({"kind": kind, "time": time.time(), **line}, default=str)
        try:
            self._file.write(text + "\n")
        except OSError:
            # The monitor that writes the same file reports it.
            _house.removeHandler(self._handler)


class PageAtEnd(Listener):
    """Writes the page of a run at its end, on rank 0, after its writers."""

    name = "hadal.report.page"

    def __init__(self, section: JsonlMonitor, setting: Setting) -> None:
        self._path = path_of(section)

    def close(self) -> None:
        """Write the page. A fault is logged: it does not end training."""
        from hadal.plugins.monitor.report.page import write_page

        try:
            _log.info("wrote %s", write_page([self._path])[0])
        except (OSError, HadalError) as error:
            _log.error("the page of %s cannot be written: %s", self._path, error)

    def at_exit(self) -> None:
        """Write it."""
        self.close()


class _Warnings(logging.Handler):
    """Appends warnings and errors."""

    def __init__(self, append: Callable[[str, Mapping[str, Any]], None]) -> None:
        super().__init__(logging.WARNING)
        self._append = append

    def emit(self, record: logging.LogRecord) -> None:
        """Append a line."""
        others = [*logging.getLogger().handlers, *_house.handlers]
        if others == [self] and logging.lastResort is not None:
            logging.lastResort.handle(record)  # as if this handler did not exist
        self._append("warning", {"level": record.levelname, "text": record.getMessage()})


def communication_lines(rows: Sequence[Any]) -> Mapping[str, Any] | None:
    """Return the rows of the communication log, the longest first; None if nothing was logged."""
    if not rows:
        return None
    ordered = sorted(rows, key=lambda row: -row.seconds)
    return {
        "rows": [
            {
                "operation": row.operation,
                "nbytes": row.nbytes,
                "ranks": len(row.ranks),
                "count": row.count,
                "total_nbytes": row.total_nbytes,
                "sent_nbytes": row.sent_nbytes,
                "seconds": row.seconds,
                "bus_gb_per_s": row.bus_bandwidth / 1e9,
                "straggler": row.straggler,
                "waited_s": max((row.lost_s or {0: 0.0}).values()) / len(row.latencies_s),
            }
            for row in ordered
        ]
    }
