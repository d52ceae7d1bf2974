"""Printing of ranks' output: each line with its rank, and tracebacks held back.

When a job fails, most ranks print a traceback at nearly the same time, interleaved. So a traceback
is held back until its rank has ended, and the report shows the first one in full. If ranks survive,
or end late, the first traceback is shown meanwhile, and of the others their errors.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import BinaryIO

from hadal.launcher.ending import ADDED, TRACEBACK, error_in, last_lines
from hadal.launcher.job import Lines

HOLD_S = 10.0
"""A rank that still runs this long after a traceback has survived it: the traceback is shown.

Tracebacks of other ranks that began as soon after it are folded to their errors.
"""
_TAIL_LINES = 20
_CLEAR = b"\x1b[K"
"""Erases a terminal's line from the cursor on."""
_LONGEST_NBYTES = 1 << 20
"""A longer line is split instead of held until its end."""


@dataclass
class _RankOutput:
    """The recent output of one rank."""

    prefix: bytes
    out: Lines = field(default_factory=Lines)
    error: Lines = field(default_factory=Lines)
    tail: deque[bytes] = field(default_factory=lambda: deque(maxlen=_TAIL_LINES))
    traceback: list[bytes] = field(default_factory=list)
    began_at: float | None = None
    """The time at which its last traceback began."""
    is_held: bool = False
    is_shown: bool = False
    """True if the traceback was printed in full."""


class Printer:
    """A printer of ranks' output. A rank is identified with its host, as it may move to another."""

    def __init__(
        self,
        out: BinaryIO,
        error: BinaryIO,
        prefix_of: Callable[[str, int], str],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._out = out
        self._error = error
        self._prefix_of = prefix_of
        self._clock = clock
        self._outputs: dict[tuple[str, int], _RankOutput] = {}
        self._shown_in_full: _RankOutput | None = None
        """The rank whose traceback was shown last."""
        self._shown_at = -math.inf
        self._terminals = [each for each in (out, error) if each.isatty()]
        self._written_to = error
        """The stream that the terminal got its last text from."""
        self._end = b"\n"
        """The end of that text; after a carriage return the cursor is on a line that has text."""

    def began(self, host: str, rank: int) -> None:
        """Forget a rank's output: its process has just started."""
        self._outputs.pop((host, rank), None)

    def said(self, host: str, rank: int, is_error: bool, piece: bytes) -> None:
        """Print some of a rank's output."""
        output = self._output(host, rank)
        lines = output.error if is_error else output.out
        for line in lines.feed(piece):
            self._line(output, is_error, line)
        # A single rank's output is shown at once; that of several ranks only in whole lines.
        if (
            not output.prefix
            and lines.rest
            and not (is_error and self._may_begin(output, lines.rest))
        ):
            self._line(output, is_error, lines.take())
        if lines.rest_nbytes > _LONGEST_NBYTES:
            self._line(output, is_error, lines.take() + b"\n")

    def unlabelled(self, piece: bytes) -> None:
        """Print output that belongs to no rank, unchanged."""
        self._write(self._error, piece)

    def look(self) -> None:
        """Show the tracebacks of ranks that still run."""
        for output in sorted(self._outputs.values(), key=lambda output: output.began_at or 0):
            held_for = self._clock() - (output.began_at or 0)
            if output.is_held and held_for > HOLD_S:
                self._release(output)
        self.flush()

    def has_shown(self, host: str, rank: int) -> bool:
        """Return whether a rank's last traceback was printed in full."""
        return self._output(host, rank).is_shown

    def begin_line(self) -> None:
        """Let the terminal's next line begin on an empty one, not on a rank's progress bar."""
        if self._end != b"\n":
            self._written_to.write(_CLEAR if self._end == b"\r" else b"\n")
        self._end = b"\n"
        self.flush()

    def ended(self, host: str, rank: int, *, shows: bool) -> tuple[float | None, str]:
        """Return the start and text of an ended rank's last traceback, or None and its last lines.

        With `shows` a held traceback is printed.
        """
        output = self._output(host, rank)
        for is_error, lines in ((False, output.out), (True, output.error)):
            if lines.rest_nbytes:
                self._line(output, is_error, lines.take() + b"\n" * bool(output.prefix))
        if shows and output.is_held:
            self._release(output)
        output.is_held = False
        if output.began_at is not None:
            return output.began_at, b"".join(output.traceback).decode(errors="replace").rstrip()
        return None, last_lines(b"".join(output.tail).decode(errors="replace"))

    def flush(self) -> None:
        """Flush both outputs."""
        self._out.flush()
        self._error.flush()

    def _output(self, host: str, rank: int) -> _RankOutput:
        if (host, rank) not in self._outputs:
            self._outputs[host, rank] = _RankOutput(self._prefix_of(host, rank).encode())
        return self._outputs[host, rank]

    def _line(self, output: _RankOutput, is_error: bool, line: bytes) -> None:
        if is_error:
            plain = ADDED.sub(b"", line)
            if plain.startswith(TRACEBACK) and not output.is_held:
                output.traceback, output.began_at = [], self._clock()
                output.is_held, output.is_shown = True, False
            output.tail.append(plain)
            if output.is_held:
                output.traceback.append(plain)
                return
        if output.prefix and line == b"\r":
            return  # a progress bar returns to the beginning of a line, where it is already
        self._write(self._error if is_error else self._out, output.prefix + line)

    def _may_begin(self, output: _RankOutput, rest: bytes) -> bool:
        rest = ADDED.sub(b"", rest)
        return output.is_held or TRACEBACK.startswith(rest[: len(TRACEBACK)])

    def _release(self, output: _RankOutput) -> None:
        output.is_held = False
        began_at = output.began_at or 0
        follows = self._shown_in_full not in (None, output) and began_at - self._shown_at <= HOLD_S
        error = error_in(b"".join(output.traceback).decode(errors="replace")) if follows else None
        if error is None:
            self._shown_in_full, self._shown_at, output.is_shown = output, began_at, True
            lines = output.traceback
        else:
            lines = [line.encode() + b"\n" for line in error.lines]
            lines[0] = b"(traceback folded) " + lines[0]
        for line in lines:
            self._write(self._error, output.prefix + line)

    def _write(self, stream: BinaryIO, text: bytes) -> None:
        if stream in self._terminals:
            if stream is not self._written_to:
                self._written_to.flush()
            text = _CLEAR * (self._end == b"\r") + text
            self._written_to, self._end = stream, text[-1:]
        stream.write(text)
