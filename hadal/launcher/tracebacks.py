"""Tracebacks as text: the error at their end, and the frames that are the user's own."""

from __future__ import annotations

import re
from dataclasses import dataclass

from hadal.launcher.job import where_hadal_is

HEAD = "Traceback (most recent call last):"
_FRAME = re.compile(r'  File "(?P<file>[^"]+)", line \d+')
_ERROR = re.compile(r"(?:\w+\.)*(?P<kind>\w+)(?:: (?P<message>.*))?$")
_OURS = "hadal.errors."
_LIBRARY = re.compile(r"/lib/python3(\.\d+)?/")
# Lines that torch's C++ code logs as a process ends.
_LOGGED = re.compile(r"\[[WEIF]\d{4} ")


@dataclass(frozen=True, slots=True)
class RaisedError:
    """The last error of a traceback."""

    kind: str
    """The name of its class."""
    is_ours: bool
    message: tuple[str, ...]
    frames: tuple[tuple[str, ...], ...]
    """The lines of each frame, outermost first: its place, and its code."""

    @property
    def lines(self) -> list[str]:
        """The error as Python writes it."""
        first, *more = self.message or ("",)
        return [f"{self.kind}: {first}" if first else self.kind, *more]

    def own_frames(self, folder: str) -> list[str]:
        """Return the frames outside Hadal and Python's libraries, with paths seen from `folder`."""
        lines: list[str] = []
        for place, *code in self.frames:
            found = _FRAME.match(place)
            if found is not None and not _is_library(found["file"]):
                lines.append(place.replace(f'"{folder.rstrip("/")}/', '"'))
                lines += [line for line in code if line.strip(" ^~")]
        return lines


def _is_library(file: str) -> bool:
    is_pythons = _LIBRARY.search(file) is not None
    return is_pythons or file.startswith(("<", f"{where_hadal_is()}/hadal/"))


def error_in(text: str) -> RaisedError | None:
    """Read the error at the end of a traceback; None if there is no traceback."""
    _, head, last = text.rpartition(f"{HEAD}\n")
    if not head:
        return None
    frames: list[list[str]] = []
    lines = iter(last.splitlines())
    for line in lines:
        if _FRAME.match(line):
            frames.append([line])
        elif line.startswith("  ") or not line.strip():
            if frames:
                frames[-1].append(line)
        else:
            break
    else:
        return None
    found, is_ours = _ERROR.match(line), line.startswith(_OURS)
    if found is None:
        return None
    message = [found["message"] or ""]
    for more in lines:
        if _LOGGED.match(more):
            break
        message.append(more)
    return RaisedError(found["kind"], is_ours, tuple(message), tuple(map(tuple, frames)))
