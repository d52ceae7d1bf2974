"""Waits of the host for its accelerator, each with a name that a watchdog reports.

An accelerator runs behind its host: a collective that never ends is first noticed when the host
reads a value, or waits for a stream or an event. All such waits in the library go through
`read_on_host`, `start_reading`, `Event.wait_on_host` or `synchronize`.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch

# The watcher of waits, if any; `hadal.comm` sets it, because this folder does not import that one.
_watch: list[Callable[[str], AbstractContextManager[object]]] = [nullcontext]


def watch_waits(watch: Callable[[str], AbstractContextManager[object]]) -> None:
    """Enter `watch(what)` around each later wait of the host for an accelerator."""
    _watch[:] = [watch]


def waiting_for(what: str, device: torch.device | None = None) -> AbstractContextManager[object]:
    """Return a context around a wait of the host for an accelerator; `what` names the values.

    If the device is given, and a CPU, nothing is watched.
    """
    return nullcontext() if device is not None and device.type == "cpu" else _watch[0](what)


def synchronize(device: torch.device, what: str = "all work queued on the device") -> None:
    """Wait for all work queued on `device`; return at once on a CPU."""
    if device.type != "cpu":
        with waiting_for(what):
            torch.accelerator.synchronize(device)
