"""`csv_monitor`: a CSV file for each name; `jsonl_monitor`: all of a run, a JSON object a line."""

from __future__ import annotations

import errno
import json
import math
import os
import sys
import time
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from hadal.config.monitors import CsvMonitor, JsonlMonitor
from hadal.plugins.monitor.record import ScalarRecord, Value


class LineFile:
    """A file to which text is appended, each time in one write.

    Thus a killed process leaves no partial line. A full disk does, and the partial line is removed
    again. If a file ends with a partial line nevertheless, the next line begins on a new one.
    """

    def __init__(self, path: Path, header: str = "") -> None:
        """Open the file, which gets `header` if it is empty.

        Raises:
            OSError: the file cannot be opened or written.
        """
        flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
        self._file = os.open(path, flags, 0o666)
        try:
            size = os.fstat(self._file).st_size
            if not size and header:
                self.write(header)
            elif size and os.pread(self._file, 1, size - 1) != b"\n":
                self.write("\n")
        except OSError:
            self.close()
            raise

    def write(self, text: str) -> None:
        """Append `text` completely or not at all.

        Raises:
            OSError: it cannot be written.
        """
        data = text.encode()
        written = os.write(self._file, data)
        if written < len(data):
            os.ftruncate(self._file, os.fstat(self._file).st_size - written)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def close(self) -> None:
        """Close the file."""
        os.close(self._file)


# A process may have 1024 files open, on most systems.
_MOST_OPEN = 64
_LONGEST_NAME = 250  # bytes, without the suffix


class CsvWriter:
    """Appends to the CSV files of one directory, and keeps the most recently used ones open.

    A file is named after its event, with "/" and blanks replaced by "_". It begins with the header
    `step,<last part of the name>`; lines end with a carriage return and a newline.
    """

    section = "csv_monitor"

    def __init__(self, config: CsvMonitor, run: Mapping[str, Any]) -> None:
        """Create the directory.

        Raises:
            OSError: it cannot be created.
        """
        self.folder = Path(config.output_path) / config.job_name
        self.folder.mkdir(parents=True, exist_ok=True)
        self._files: OrderedDict[str, LineFile] = OrderedDict()
        self.paths: list[Path] = []
        """The files written so far."""

    def write(self, record: ScalarRecord) -> None:
        """Append one line to the file of each name."""
        for name, value in record.values.items():
            self._file(name).write(f"{record.samples},{value}\r\n")

    def flush(self) -> None:
        """Do nothing: nothing is buffered."""

    def close(self) -> None:
        """Close the files."""
        while self._files:
            self._files.popitem()[1].close()

    def _file(self, name: str) -> LineFile:
        found = self._files.get(name)
        if found is None:
            header = f"step,{name.rpartition('/')[2]}\r\n"
            path = self.folder / file_name(name)
            found = LineFile(path, header)
            if path not in self.paths:
                self.paths.append(path)
            self._files[name] = found
            if len(self._files) > _MOST_OPEN:
                self._files.popitem(last=False)[1].close()
        self._files.move_to_end(name)
        return found


def file_name(name: str) -> str:
    """Return the file of an event. Its name has no separator, so it stays inside the directory."""
    safe = "".join("_" if one in "/ " or not one.isprintable() else one for one in name)
    return safe.encode()[:_LONGEST_NAME].decode(errors="ignore") + ".csv"


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
        """Append the line that distinguishes an exit from a kill, with the error if one caused it.

        That error is on its way now, or has ended the program. In an interactive interpreter, which
        outlives errors, the last one says nothing about the run.
        """
        error = sys.exc_info()[1]
        if error is None and not hasattr(sys, "ps1"):
            error = getattr(sys, "last_value", None)
        shown = {} if error is None else {"error": f"{type(error).__name__}: {error}"[:500]}
        try:
            self._write({"kind": "end", "time": time.time(), **shown})
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
