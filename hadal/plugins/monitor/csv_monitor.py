"""`csv_monitor`: one CSV file for each name, with the columns samples and value."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hadal.config.monitors import CsvMonitor
from hadal.plugins.monitor.lines import LineFile
from hadal.plugins.monitor.record import ScalarRecord

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
