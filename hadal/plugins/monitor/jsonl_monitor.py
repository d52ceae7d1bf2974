"""`jsonl_monitor`: everything about a run in one file, a JSON object on each line."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from hadal.config.monitors import JsonlMonitor
from hadal.plugins.monitor.lines import LineFile
from hadal.plugins.monitor.record import ScalarRecord, Value

FILE = "events.jsonl"


def path_of(config: JsonlMonitor) -> Path:
    """Return the file that a section configures."""
    return Path(config.output_path) / config.job_name / FILE


class JsonlWriter:
    """Appends to one file: a line that describes the run, then one line for each record.

    Each line is written at once. Resumed runs append to the same file.
    """

    section = "jsonl_monitor"

    def __init__(self, config: JsonlMonitor, run: Mapping[str, Any]) -> None:
        """Create the directory, and write the line about the run.

        Raises:
            OSError: the file cannot be written.
        """
        path = path_of(config)
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = LineFile(path)
        self._write({"kind": "run", **run})

    def write(self, record: ScalarRecord) -> None:
        """Append one line: step, samples and time, and the values by name."""
        head: dict[str, Any] = {"kind": "events"}
        if record.step is not None:
            head = {"kind": "update", "step": record.step}
        head |= {"samples": record.samples, "time": record.time}
        self._write(head | {name: _plain(value) for name, value in record.values.items()})

    def flush(self) -> None:
        """Do nothing: nothing is buffered."""

    def close(self) -> None:
        """Append the line that distinguishes a normal exit from a kill."""
        try:
            self._write({"kind": "end", "time": time.time()})
        finally:
            self._file.close()

    def _write(self, line: Mapping[str, Any]) -> None:
        self._file.write(json.dumps(line, allow_nan=False, separators=(",", ":")) + "\n")


def _plain(value: Value) -> Value | str:
    """Return a value that every JSON reader accepts: JSON has no infinity."""
    if math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Return the objects of a file, in order, skipping damaged lines such as a truncated last one.

    Values that are not finite are the texts "NaN", "Infinity" and "-Infinity", which `float` takes.
    """
    with path.open("rb") as file:
        for line in file:
            try:
                found = json.loads(line)
            except ValueError:
                continue
            if isinstance(found, dict):
                yield found
