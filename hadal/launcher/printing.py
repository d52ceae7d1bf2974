"""Printing of ranks' output: each line with its rank, and tracebacks held back.

When a job fails, most ranks print a traceback at nearly the same time, interleaved. So a traceback
is held back until its rank has ended, and the report shows the first one in full.

Tests: tests/launcher/test_ending.py
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import BinaryIO

from hadal.launcher.ending import BY_TORCH, TRACEBACK, last_lines
from hadal.launcher.frames import Lines

HOLD_S = 10.0
"""A rank that still runs this long after a traceback has survived it: the traceback is shown."""
_TAIL_LINES = 20
_LONGEST_NBYTES = 1 << 20
"""A longer line is split instead of held until its end."""


@dataclass
class _Talk:
    """The recent output of one rank."""

    prefix: bytes
    out: Lines = field(default_factory=Lines)
    error: Lines = field(default_factory=Lines)
    tail: deque[bytes] = field(default_factory=lambda: deque(maxlen=_TAIL_LINES))
    traceback: list[bytes] = field(default_factory=list)
    began_at: float | None = None
    """The time at which its last traceback began."""
    is_held: bool = False


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
        self._talks: dict[tuple[str, int], _Talk] = {}

    def began(self, host: str, rank: int) -> None:
        """Forget a rank's output: its process has just started."""
        self._talks.pop((host, rank), None)

    def said(self, host: str, rank: int, is_error: bool, piece: bytes) -> None:
        """Print some of a rank's output."""
        talk = self._talk(host, rank)
        lines = talk.error if is_error else talk.out
        for line in lines.feed(piece):
            self._line(talk, is_error, line)
        # A single rank's output is shown at once; that of several ranks only in whole lines.
        if not talk.prefix and lines.rest and not (is_error and self._may_begin(talk, lines.rest)):
            self._line(talk, is_error, lines.take())
        if lines.rest_nbytes > _LONGEST_NBYTES:
            self._line(talk, is_error, lines.take() + b"\n")

    def unlabelled(self, piece: bytes) -> None:
        """Print output that belongs to no rank, unchanged."""
        self._error.write(piece)

    def look(self) -> None:
        """Show the tracebacks of ranks that still run."""
        for talk in self._talks.values():
            held_for = self._clock() - (talk.began_at or 0)
            if talk.is_held and held_for > HOLD_S:
                self._release(talk)
        self.flush()

    def ended(self, host: str, rank: int, *, shows: bool) -> tuple[float | None, str]:
        """Return the start and text of an ended rank's last traceback, or None and its last lines.

        With `shows` a held traceback is printed.
        """
        talk = self._talk(host, rank)
        for is_error, lines in ((False, talk.out), (True, talk.error)):
            if lines.rest_nbytes:
                self._line(talk, is_error, lines.take() + b"\n" * bool(talk.prefix))
        if shows and talk.is_held:
            self._release(talk)
        talk.is_held = False
        if talk.began_at is not None:
            return talk.began_at, b"".join(talk.traceback).decode(errors="replace").rstrip()
        return None, last_lines(b"".join(talk.tail).decode(errors="replace"))

    def flush(self) -> None:
        """Flush both outputs."""
        self._out.flush()
        self._error.flush()

    def _talk(self, host: str, rank: int) -> _Talk:
        if (host, rank) not in self._talks:
            self._talks[host, rank] = _Talk(self._prefix_of(host, rank).encode())
        return self._talks[host, rank]

    def _line(self, talk: _Talk, is_error: bool, line: bytes) -> None:
        if is_error:
            plain = BY_TORCH.sub(b"", line)
            if plain.startswith(TRACEBACK) and not talk.is_held:
                talk.traceback, talk.began_at, talk.is_held = [], self._clock(), True
            talk.tail.append(plain)
            if talk.is_held:
                talk.traceback.append(plain)
                return
        (self._error if is_error else self._out).write(talk.prefix + line)

    def _may_begin(self, talk: _Talk, rest: bytes) -> bool:
        rest = BY_TORCH.sub(b"", rest)
        return talk.is_held or TRACEBACK.startswith(rest[: len(TRACEBACK)])

    def _release(self, talk: _Talk) -> None:
        talk.is_held = False
        for line in talk.traceback:
            self._error.write(talk.prefix + line)
