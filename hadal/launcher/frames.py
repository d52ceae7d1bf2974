"""Messages from ranks and hosts to the command that started them: lines among other output.

A frame is one line: a mark, then JSON. Several processes may share a pipe or connection, so a
frame is short enough to be written atomically (POSIX: 4096 bytes).
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field

_MARK = b"\x1ehadal "
PIECE_NBYTES = 2700
"""The most output in one frame: base64 makes 3600 bytes of it."""


@dataclass(frozen=True, slots=True)
class Hello:
    """A message that a host is reached and ready to start ranks."""

    hostname: str
    addresses: tuple[str, ...]
    reached_at: str
    """The address at which ssh reached it; empty if ssh did not start it."""


@dataclass(frozen=True, slots=True)
class RankStarted:
    """A message that a rank's process has started."""

    rank: int
    host: str
    pid: int
    cores: str = ""
    """The cores that it is bound to, and why these; empty if it is not."""


@dataclass(frozen=True, slots=True)
class RankOutput:
    """Some of a rank's output."""

    rank: int
    is_error: bool
    text: bytes


@dataclass(frozen=True, slots=True)
class RankEnded:
    """A message that a rank's process has ended; a negative `code` is the signal that ended it."""

    rank: int
    code: int
    was_stopped: bool
    """True if it had been requested to end."""


@dataclass(frozen=True, slots=True)
class HostEnded:
    """A message that all of a host's processes have ended."""

    code: int
    notes: str = field(default="")
    """The last lines that torch's agent wrote."""


@dataclass(frozen=True, slots=True)
class RoundRequest:
    """A request for a round, from a host of an elastic job on which no rank runs."""

    port: int
    """The port on which its agent listens for the others, if it becomes the first host."""


Frame = Hello | RankStarted | RankOutput | RankEnded | HostEnded | RoundRequest
_KINDS = {
    kind.__name__: kind
    for kind in (Hello, RankStarted, RankOutput, RankEnded, HostEnded, RoundRequest)
}


def encoded(frame: Frame) -> bytes:
    """Encode a frame as a line."""
    values = asdict(frame)
    if isinstance(frame, RankOutput):
        values["text"] = base64.b64encode(frame.text).decode()
    return _MARK + json.dumps([type(frame).__name__, values]).encode() + b"\n"


def said(rank: int, is_error: bool, text: bytes) -> Iterator[bytes]:
    """Yield the frames for a rank's output."""
    for start in range(0, len(text), PIECE_NBYTES):
        yield encoded(RankOutput(rank, is_error, text[start : start + PIECE_NBYTES]))


def decoded(line: bytes) -> Frame | None:
    """Return the frame in a line, or None.

    Some launchers put a label before each line: text before the mark is skipped.
    """
    _, mark, values = line.partition(_MARK)
    if not mark:
        return None
    try:
        name, fields = json.loads(values)
        if name == "RankOutput":
            fields["text"] = base64.b64decode(fields["text"])
        elif name == "Hello":
            fields["addresses"] = tuple(fields["addresses"])
        frame: Frame = _KINDS[name](**fields)
    except (ValueError, TypeError, KeyError):
        return None
    return frame


class Lines:
    """A splitter of a stream into lines; a carriage return ends one too, as in progress bars."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []
        self.rest_nbytes = 0

    @property
    def rest(self) -> bytes:
        """The incomplete last line."""
        return b"".join(self._parts)

    def feed(self, piece: bytes) -> list[bytes]:
        """Add text; return the lines that are complete now, each with its end."""
        # A \r at the very end may be one half of \r\n.
        is_open = bool(self._parts) and self._parts[-1].endswith(b"\r")
        if not is_open and b"\n" not in piece and b"\r" not in piece:
            self._keep(piece)  # a long line is not searched again for each text that is added
            return []
        lines = (self.take() + piece).splitlines(keepends=True)
        if lines and not lines[-1].endswith(b"\n"):
            self._keep(lines.pop())
        return lines

    def take(self) -> bytes:
        """Return the incomplete line and clear it."""
        rest, self._parts, self.rest_nbytes = self.rest, [], 0
        return rest

    def _keep(self, piece: bytes) -> None:
        self._parts.append(piece)
        self.rest_nbytes += len(piece)
