"""The end of a job: the first failure, the report of it, and the exit code (arithmetic)."""

from __future__ import annotations

import re
import signal
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from hadal.launcher.processes import exit_code

TRACEBACK = b"Traceback (most recent call last):"
BY_TORCH = re.compile(rb"(?m)^\[rank\d+\]: ?")
"""torch's prefix on each line of a traceback, once ranks have joined a process group."""
WAITED_IN_VAIN = "hadal.errors.CommunicationError"
"""The name, in a traceback's last line, of what a rank raises if another process has ended."""
_LAST_LINES = 20
_WORDLESS_S = 0.5


@dataclass(frozen=True, slots=True)
class Failure:
    """The failure of a rank that nobody had asked to end."""

    rank: int
    host: str
    code: int
    at: float
    """The time at which its traceback began, or, without one, of its end."""
    text: str
    """Its traceback, or the last lines of its standard error."""
    has_traceback: bool = True

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
        """The last non-blank line of its output."""
        lines = [line for line in self.text.splitlines() if line.strip()]
        return lines[-1].strip() if lines else self.how


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
) -> list[str]:
    """Return the lines to show: the first failure in full, the others folded.

    Args:
        failures: at least one.
        names_hosts: whether there is more than one host.
        logs: the directory of the ranks' logs, if they are kept.
        succeeded: the ranks whose program ended without a failure.
    """
    first, *others = sorted(failures, key=lambda failure: failure.order)
    lines = [f"{_who([first], names_hosts)} failed first: {first.how}"]
    if succeeded and WAITED_IN_VAIN in first.reason:
        noun = "rank" if len(succeeded) == 1 else "ranks"
        lines.insert(
            0,
            f"{noun} {runs(succeeded)} finished while {_who(failures, names_hosts)} still trained:"
            " the ranks ran different numbers of steps (uneven data?). Give every rank as many"
            " batches, for example by hadal.initialize(training_data=...)",
        )
    lines += [f"  {line}" for line in first.text.splitlines()]
    if not first.text:
        lines.append("  it has written nothing to its standard error")
    folded: dict[str, list[Failure]] = {}
    for failure in others:
        folded.setdefault(f"{failure.how}: {failure.reason}"[:200], []).append(failure)
    for reason, same in folded.items():
        lines.append(f"{_who(same, names_hosts)} failed after it, {reason}")
    hint = _hint(first)
    if hint:
        lines.append(hint)
    if others:
        lines.append(
            f"all that each rank has printed is in {logs}"
            if logs
            else "--enable_each_rank_log DIR keeps all that each rank prints"
        )
    return lines


def agents_words(notes: str, port: int) -> list[str]:
    """Return the lines to show of an agent's last messages."""
    if "EADDRINUSE" in notes:
        return [f"port {port} is in use on that host; take another one by --master_port"]
    return notes.splitlines()


def _hint(first: Failure) -> str:
    if "unrecognized arguments: --local_rank" in first.text:
        return "the script knows no --local_rank: start it with --no_local_rank"
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
