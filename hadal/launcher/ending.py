"""The end of a job: the first failure, the report of it, and the exit code (arithmetic)."""

from __future__ import annotations

import re
import signal
import textwrap
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from hadal.launcher.job import where_hadal_is
from hadal.launcher.processes import exit_code

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


# ---- the report ----------------------------------------------------------------------------------


TRACEBACK = b"Traceback (most recent call last):"
ADDED = re.compile(rb"(?m)^\[rank\d+\]: ?|\x1b\[[0-9;]*m")
"""torch's prefix on each line of a traceback, once ranks have joined a process group; colours."""
WAITED_IN_VAIN = "CommunicationError"
"""The error that a rank raises if another process has ended."""
_LAST_LINES = 20
_FOLDED_LENGTH = 200
_WORDLESS_S = 0.5


@dataclass(frozen=True, slots=True)
class Failure:
    """The failure of a rank that had not been requested to end."""

    rank: int
    host: str
    code: int
    at: float
    """The time at which its traceback began, or, without one, of its end."""
    text: str
    """Its traceback, or the last lines of its standard error."""
    has_traceback: bool = True
    is_shown: bool = False
    """True if the whole traceback was printed before the job's end."""

    @property
    def order(self) -> float:
        """The sort key: the later a failure, the more likely it is a consequence of others.

        A rank that dies without a message is noticed only once its process is gone; the ranks that
        waited for it may have begun their tracebacks by then.
        """
        return self.at if self.has_traceback else self.at - _WORDLESS_S

    @property
    def how(self) -> str:
        """A short description of its end."""
        if self.code >= 0:
            return f"exit code {self.code}"
        return f"ended by {signal_name(-self.code)}"

    @property
    def reason(self) -> str:
        """The error of its traceback, or the last non-blank line of its output."""
        error = error_in(self.text)
        if error is not None:
            return " ".join(" ".join(error.lines).split())
        lines = [line for line in self.text.splitlines() if line.strip()]
        return lines[-1].strip() if lines else self.how

    @property
    def signature(self) -> str:
        """The reason without the number of the rank, to find other ranks' repeats of it."""
        return re.sub(rf"\brank {self.rank}\b", "rank N", self.reason)


def signal_name(number: int) -> str:
    """Return a signal's name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def worst(failures: Iterable[Failure]) -> int:
    """Return the highest exit code; 0 if no rank failed."""
    return max((exit_code(failure.code) for failure in failures), default=0)


def report(
    failures: Sequence[Failure],
    *,
    names_hosts: bool,
    logs: str = "",
    succeeded: Collection[int] = (),
    folder: str = "",
    is_full: bool = False,
) -> list[str]:
    """Return the lines to show: the first failure in full, the others folded.

    If the first failure is an error of Hadal, its message comes first, then the frames of the
    user's program.

    Args:
        failures: at least one.
        names_hosts: whether there is more than one host.
        logs: the directory of the ranks' logs, if they are kept.
        succeeded: the ranks whose program ended without a failure.
        folder: the directory of the job; files in it are shown by their path from there.
        is_full: show tracebacks of Hadal's errors as any other.
    """
    first, *others = sorted(failures, key=lambda failure: failure.order)
    error = error_in(first.text)
    lines: list[str] = []
    if succeeded and error is not None and error.is_ours and error.kind == WAITED_IN_VAIN:
        noun = "rank" if len(succeeded) == 1 else "ranks"
        lines.append(
            f"{noun} {runs(succeeded)} finished while {_who(failures, names_hosts)} still trained:"
            " the ranks ran different numbers of steps (uneven data?). Give every rank as many"
            " batches, for example by hadal.initialize(training_data=...)"
        )
    hints = [_hint(first)]
    if error is not None and error.is_ours and not is_full:
        lines += _message_first(_who([first], names_hosts), error, folder)
        if not first.is_shown:
            hints.append("HADAL_TRACEBACK=full shows the frames inside Hadal, too")
    else:
        lines.append(f"{_who([first], names_hosts)} failed first: {first.how}")
        lines += [f"  {line}" for line in first.text.splitlines()]
    if not first.text:
        lines.append("  it wrote nothing to standard error")
    folded: dict[str, list[Failure]] = {}
    for failure in others:
        # An error that names several ranks has the same words on each of them.
        is_same = failure.signature == first.signature or failure.reason == first.reason
        is_same = is_same and error is not None
        how = "with the same error" if is_same else f"after it, {_folded(failure)}"
        folded.setdefault(how, []).append(failure)
    lines += [f"{_who(same, names_hosts)} failed {how}" for how, same in folded.items()]
    if others and logs:
        hints.append(f"the full output of each rank is in {logs}")
    elif others:
        hints.append("--enable_each_rank_log DIR saves the full output of each rank")
    return lines + [f"hint: {hint}" for hint in hints if hint]


def _message_first(who: str, error: RaisedError, folder: str) -> list[str]:
    head, *more = error.lines
    own = error.own_frames(folder)
    place = ["  raised by this program at", *(f"  {line}" for line in own)] if own else []
    return [f"{who} failed first: {head}", *(f"  {line}" for line in more), *place]


def _folded(failure: Failure) -> str:
    """Return a failure in one line that ends at a whole word."""
    text = f"{failure.how}: {failure.reason}"
    return textwrap.shorten(text, _FOLDED_LENGTH, placeholder=" ...")


def agents_words(notes: str, port: int) -> list[str]:
    """Return the lines to show of an agent's last messages."""
    if "EADDRINUSE" in notes:
        return [f"port {port} is in use on that host; choose another one with --master_port"]
    return notes.splitlines()


def _hint(first: Failure) -> str:
    if "unrecognized arguments: --local_rank" in first.text:
        return "the program does not accept --local_rank: add --no_local_rank to hadal run"
    if "required: --local_rank" in first.text:
        return "the program requires --local_rank: add --local_rank to hadal run"
    if first.code == -signal.SIGKILL:
        return "SIGKILL often comes from the kernel when memory is exhausted: see `dmesg`"
    return ""


def _who(failures: Sequence[Failure], names_hosts: bool) -> str:
    ranks = runs([failure.rank for failure in failures])
    noun = "rank" if len(failures) == 1 else "ranks"
    hosts = list(dict.fromkeys(failure.host for failure in failures))
    return f"{noun} {ranks} on {', '.join(hosts)}" if names_hosts else f"{noun} {ranks}"


def runs(numbers: Iterable[int]) -> str:
    """Format numbers as ranges: `0, 2-5`."""
    parts: list[list[int]] = []
    for number in sorted(numbers):
        if parts and number == parts[-1][-1] + 1:
            parts[-1].append(number)
        else:
            parts.append([number])
    return ", ".join(str(part[0]) if len(part) == 1 else f"{part[0]}-{part[-1]}" for part in parts)


def last_lines(text: str) -> str:
    """Return the last lines of a standard error without a traceback."""
    return "\n".join(text.splitlines()[-_LAST_LINES:])
