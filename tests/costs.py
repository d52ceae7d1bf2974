"""The processor time of tests: of this process and of all that were started for it.

How long `make test` takes follows from the sum. A test that is not `slow` fails if it takes more
than `LIMIT_S`, twice what any should take, since slower and busier machines need more for the same
work. Ranks that it shares with others are started `aside` and count for none. The end of a longer
run lists what took most.

Nothing here knows pytest: `conftest.py` asks before and after each test.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

import forks

LIMIT_S = 30.0
COMPLAINT = (
    "it took {:.1f} s of processor time, more than {:g} s: test less at a time, share what is"
    " started, or mark a rare case as slow (tests/cases.py)"
)
WORTH_TELLING_S = 60.0
FILES, TESTS = 5, 10

_TICKS = os.sysconf("SC_CLK_TCK")
_aside = 0.0


def seconds() -> float:
    """Processor time so far, without what was spent `aside`.

    Forked processes are asked while they run; their servers count them afterwards.
    """
    return sum(os.times()[:4]) + sum(map(_of, forks.processes())) - _aside


@contextlib.contextmanager
def aside() -> Iterator[None]:
    """Count what is spent meanwhile for no test."""
    global _aside
    before = seconds()
    yield
    _aside += seconds() - before


def _of(process: int) -> float:
    try:
        with open(f"/proc/{process}/stat") as file:
            fields = file.read().rpartition(")")[2].split()
    except OSError:  # it has ended, or this is no Linux
        return 0.0
    return sum(map(int, fields[11:15])) / _TICKS  # as of proc(5): itself, and ended children


def summary(seconds_of_tests: dict[str, float]) -> list[str]:
    """Lines for the end of a run: its sum, and the files and tests that took most."""
    files: dict[str, float] = {}
    for test, spent in seconds_of_tests.items():
        file = test.partition("::")[0]
        files[file] = files.get(file, 0.0) + spent
    total = sum(files.values())
    if total < WORTH_TELLING_S:
        return []
    most = ", ".join(f"{file} {files[file]:.0f} s" for file in _greatest(files)[:FILES])
    lines = [f"processor time of tests: {total:.0f} s; most in {most}"]
    most_of_all = _greatest(seconds_of_tests)[:TESTS]
    return lines + [f"{seconds_of_tests[test]:6.1f} s {test}" for test in most_of_all]


def _greatest(values: dict[str, float]) -> list[str]:
    return sorted(values, key=lambda name: values[name], reverse=True)
