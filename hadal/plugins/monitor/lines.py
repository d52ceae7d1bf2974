"""A text file that grows by whole lines; several runs and processes may follow it."""

from __future__ import annotations

import errno
import os
from pathlib import Path


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
