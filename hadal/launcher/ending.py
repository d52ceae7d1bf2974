"""How a job ended: who failed first, what to show of it, and the exit code (no processes here)."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from hadal.launcher.processes import exit_code

TRACEBACK = b"Traceback (most recent call last):"
BY_TORCH = re.compile(rb"(?m)^\[rank\d+\]: ?")
"""What torch writes before each line of a traceback, once ranks have met."""
_LAST_LINES = 20
_WORDLESS_S = 0.5


@dataclass(frozen=True, slots=True)
class Failure:
    """A rank that failed of itself."""

    rank: int
    host: str
    code: int
    at: float
    """When its traceback began to come, or where there is none its end."""
    text: str
    """Its traceback, or the last lines of its standard error."""
    has_traceback: bool = True

    @property
    def order(self) -> float:
        """The later, the rather a consequence of others.

        One that ends without a word is heard of when its process is gone: by then those that
        waited for it may have begun their tracebacks.
        """
        return self.at if self.has_traceback else self.at - _WORDLESS_S

    @property
    def how(self) -> str:
        """Its end in a few words."""
        if self.code >= 0:
            return f"exit code {self.code}"
        return f"ended by {signal_name(-self.code)}"

    @property
    def reason(self) -> str:
        """Its last line that says something."""
        lines = [line for line in self.text.splitlines() if line.strip()]
        return lines[-1].strip() if lines else self.how


def signal_name(number: int) -> str:
    """A signal by its name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def worst(failures: Iterable[Failure]) -> int:
    """The highest exit code; 0 where no rank has failed."""
    return max((exit_code(failure.code) for failure in failures), default=0)


def report(failures: Sequence[Failure], *, names_hosts: bool, logs: str = "") -> list[str]:
    """What to show: the first failure whole, the others folded."""
    first, *others = sorted(failures, key=lambda failure: failure.order)
    lines = [f"{_who([first], names_hosts)} failed first: {first.how}"]
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
    """What to show of an agent's last words."""
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
    """Numbers as people write them: `0, 2-5`."""
    parts: list[list[int]] = []
    for number in sorted(numbers):
        if parts and number == parts[-1][-1] + 1:
            parts[-1].append(number)
        else:
            parts.append([number])
    return ", ".join(str(part[0]) if len(part) == 1 else f"{part[0]}-{part[-1]}" for part in parts)


def last_lines(text: str) -> str:
    """What to show of a standard error that holds no traceback."""
    return "\n".join(text.splitlines()[-_LAST_LINES:])
