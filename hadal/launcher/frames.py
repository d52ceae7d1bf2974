"""What ranks and hosts tell the command that started them: lines among whatever else is printed.

A frame is one line: a mark, then JSON. Several processes may share the pipe or connection that
it travels on, so a frame is short enough to be written in one piece (POSIX: 4096 bytes).
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field

_MARK = b"\x1ehadal "
PIECE_NBYTES = 2700
"""What is printed travels in pieces of this length: base64 makes 3600 bytes of it."""


@dataclass(frozen=True, slots=True)
class Hello:
    """A host is reached and ready to start ranks."""

    hostname: str
    addresses: tuple[str, ...]
    reached_at: str
    """The address at which ssh reached it; empty where it was not started by ssh."""


@dataclass(frozen=True, slots=True)
class Began:
    """A rank's process runs."""

    rank: int
    host: str
    pid: int


@dataclass(frozen=True, slots=True)
class Said:
    """A rank has printed."""

    rank: int
    is_error: bool
    text: bytes


@dataclass(frozen=True, slots=True)
class Ended:
    """A rank's process is gone. A `code` below 0 is the signal that ended it."""

    rank: int
    code: int
    was_stopped: bool
    """It was asked to end before it ended."""


@dataclass(frozen=True, slots=True)
class Left:
    """All of a host's processes are gone."""

    code: int
    notes: str = field(default="")
    """The last lines that torch's agent wrote."""


@dataclass(frozen=True, slots=True)
class Asked:
    """A host of an elastic job has no rank under way, and asks for a round."""

    port: int
    """Where its agent listens for the others, should it be the first of them."""


Frame = Hello | Began | Said | Ended | Left | Asked
_KINDS = {kind.__name__: kind for kind in (Hello, Began, Said, Ended, Left, Asked)}


def encoded(frame: Frame) -> bytes:
    """One frame as a line."""
    told = asdict(frame)
    if isinstance(frame, Said):
        told["text"] = base64.b64encode(frame.text).decode()
    return _MARK + json.dumps([type(frame).__name__, told]).encode() + b"\n"


def said(rank: int, is_error: bool, text: bytes) -> Iterator[bytes]:
    """The frames for what a rank has printed."""
    for start in range(0, len(text), PIECE_NBYTES):
        yield encoded(Said(rank, is_error, text[start : start + PIECE_NBYTES]))


def decoded(line: bytes) -> Frame | None:
    """The frame in a line; None where it holds none.

    Some launchers put a label before each line: what stands before the mark is passed over.
    """
    _, mark, told = line.partition(_MARK)
    if not mark:
        return None
    try:
        name, fields = json.loads(told)
        if name == "Said":
            fields["text"] = base64.b64decode(fields["text"])
        elif name == "Hello":
            fields["addresses"] = tuple(fields["addresses"])
        frame: Frame = _KINDS[name](**fields)
    except (ValueError, TypeError, KeyError):
        return None
    return frame


class Lines:
    """Cuts a stream into lines; a carriage return ends one too, as in progress bars."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []
        self.rest_nbytes = 0

    @property
    def rest(self) -> bytes:
        """What is no whole line yet."""
        return b"".join(self._parts)

    def feed(self, piece: bytes) -> list[bytes]:
        """The lines that are whole now, each with its end."""
        # A \r at the very end may be one half of \r\n.
        is_open = bool(self._parts) and self._parts[-1].endswith(b"\r")
        if not is_open and b"\n" not in piece and b"\r" not in piece:
            self._keep(piece)  # a long line is not looked through again with each of its pieces
            return []
        lines = (self.take() + piece).splitlines(keepends=True)
        if lines and not lines[-1].endswith(b"\n"):
            self._keep(lines.pop())
        return lines

    def take(self) -> bytes:
        """The rest, which is then empty."""
        rest, self._parts, self.rest_nbytes = self.rest, [], 0
        return rest

    def _keep(self, piece: bytes) -> None:
        self._parts.append(piece)
        self.rest_nbytes += len(piece)
