"""Running `hadal run` as users do, and finding processes that it left behind."""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

ROOT = Path(__file__).parents[2]
LIMIT_S = 180  # against hanging


def command(*words: object) -> list[str]:
    return [sys.executable, "-m", "hadal", "run", *map(str, words)]


def environment(**variables: str) -> dict[str, str]:
    plain = {k: v for k, v in os.environ.items() if k not in ("OMP_NUM_THREADS", "DS_ENV_FILE")}
    return {**plain, "PYTHONPATH": str(ROOT), **variables}


def run(*words: object, folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(*words),
        cwd=folder,
        env=environment(HOME=str(folder), **variables),
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )


def start(
    *words: object, folder: Path, before: Sequence[str] = (), **variables: str
) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*before, *command(*words)],
        cwd=folder,
        env=environment(HOME=str(folder), **variables),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


# The command gets SIGINT when the job is over: before its end is printed, or after.
LATE = """
import signal, sys
from hadal.cli.main import main
from hadal.launcher.front import Front
when, *words = sys.argv[1:]
end = Front._end
def late(front):
    if when == "before":
        signal.raise_signal(signal.SIGINT)
    code = end(front)
    if when == "after":
        signal.raise_signal(signal.SIGINT)
    return code
Front._end = late
sys.exit(main(["run", *words]))
"""


def run_interrupted_late(
    when: str, *words: object, folder: Path
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", LATE, when, *map(str, words)],
        cwd=folder,
        env=environment(HOME=str(folder)),
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )


def quiet_port() -> int:
    """Return a free port outside the range of ephemeral ports."""
    for port in random.sample(range(20_000, 32_000), 100):
        with socket.socket() as tried, suppress(OSError):
            tried.bind(("127.0.0.1", port))
            return port
    raise OSError("no port from 20000 to 31999 is free")


def alive(mark: object) -> list[str]:
    """Return the processes whose command line or folder contains this mark."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal() and int(entry.name) != os.getpid():
            try:
                words = (entry / "cmdline").read_bytes()
                folder = os.readlink(entry / "cwd")
            except OSError:
                continue
            if str(mark).encode() in words or folder.startswith(str(mark)):
                found.append(words.replace(b"\0", b" ").decode(errors="replace"))
    return found


def descendants(ancestor: int) -> list[tuple[int, list[str]]]:
    """Return a process's descendants with their command lines; some that end may be missing."""
    found = []
    for child in children(ancestor):
        with suppress(FileNotFoundError, ProcessLookupError):
            words = Path(f"/proc/{child}/cmdline").read_bytes().decode().split("\0")
            found += [(child, words), *descendants(child)]
    return found


def children(parent: int) -> list[int]:
    """Return a process's children; none if it has ended."""
    with suppress(FileNotFoundError, ProcessLookupError):
        tasks = list(Path(f"/proc/{parent}/task").iterdir())
        return [int(child) for task in tasks for child in (task / "children").read_text().split()]
    return []


def wait_for(holds: Callable[[], bool], seconds: float = LIMIT_S) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.05)


def interrupt(job: subprocess.Popen[str], sent: signal.Signals) -> tuple[str, float]:
    """Send a signal; return the output, and the seconds until the command ended."""
    began = time.monotonic()
    job.send_signal(sent)
    _, told = job.communicate(timeout=LIMIT_S)
    return told, time.monotonic() - began
