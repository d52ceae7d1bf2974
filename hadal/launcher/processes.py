"""Processes that do not outlive their parent."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_PASSES = 100

PASSED_ON = (signal.SIGUSR1, signal.SIGUSR2)
"""Signals that are only passed on to the ranks, for programs that handle them."""


def follow_parent(last: signal.Signals) -> None:
    """Ask the kernel to send this process a signal when its parent dies (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(last), 0, 0, 0)


def following(last: signal.Signals) -> Callable[[], None]:
    """Return a `preexec_fn` that makes a new process follow its parent (Linux)."""
    libc = ctypes.CDLL(None) if sys.platform == "linux" else None

    def follow() -> None:
        if libc is not None:
            libc.prctl(_PR_SET_PDEATHSIG, int(last), 0, 0, 0)

    return follow


def adopt_orphans() -> None:
    """Ask the kernel to make this process the parent of its orphaned descendants (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def signal_children(pid: int, sent: signal.Signals) -> None:
    """Send a signal to the children of a process (Linux)."""
    for child in _children(pid):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(child, sent)


def end_all_below() -> None:
    """Kill all descendants of this process, in any session (Linux)."""
    for _ in range(_PASSES):  # a process may start another one in the meantime
        found = _below(os.getpid())
        if not found:
            return
        for pid in found:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        time.sleep(0.01)


def _below(pid: int) -> list[int]:
    children = _children(pid)
    return [*children, *(far for child in children for far in _below(child))]


def _children(pid: int) -> list[int]:
    with contextlib.suppress(OSError):
        texts = [path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/children")]
        return [int(word) for text in texts for word in text.split()]
    return []


def signal_group(leader: int, sent: signal.Signals) -> None:
    """Send a signal to a process group, if it still exists."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, sent)


def exit_code(code: int) -> int:
    """Return a shell's exit code for a process: 128 plus the signal's number if one ended it."""
    return 128 - code if code < 0 else code
