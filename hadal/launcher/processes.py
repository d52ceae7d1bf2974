"""Processes that do not outlive the one that started them."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
from collections.abc import Callable

_PR_SET_PDEATHSIG = 1


def follow_parent(last: signal.Signals) -> None:
    """Ask the kernel to send this process a signal when its parent is gone (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(last), 0, 0, 0)


def following(last: signal.Signals) -> Callable[[], None]:
    """What a process that is being started calls, so that it follows its parent."""
    libc = ctypes.CDLL(None) if sys.platform == "linux" else None

    def follow() -> None:
        if libc is not None:
            libc.prctl(_PR_SET_PDEATHSIG, int(last), 0, 0, 0)

    return follow


def signal_group(leader: int, sent: signal.Signals) -> None:
    """Send a signal to a process and to what it has started, where they are still there."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, sent)


def exit_code(code: int) -> int:
    """A shell's exit code for a process: 128 and the signal's number, where one ended it."""
    return 128 - code if code < 0 else code
