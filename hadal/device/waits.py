"""The places where the host waits for its accelerator, each by a name that a watchdog reports.

An accelerator runs behind its host: a collective that never ends is first felt where the host
reads a value back, or waits for a stream or an event. Every such wait of the library goes through
`read_on_host`, `start_reading`, `Event.wait_on_host` or `synchronize`.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch

# What watches the waits, if anything does: `hadal.comm`, which this folder does not know.
_watch: list[Callable[[str], AbstractContextManager[object]]] = [nullcontext]


def watch_waits(watch: Callable[[str], AbstractContextManager[object]]) -> None:
    """Enter `watch(what)` around each wait of the host for an accelerator from now on."""
    _watch[:] = [watch]


def waiting_for(what: str) -> AbstractContextManager[object]:
    """A context around one wait of the host for an accelerator; `what` names the values."""
    return _watch[0](what)


def synchronize(device: torch.device, what: str = "all work queued on the device") -> None:
    """Wait for all work queued on `device`; nothing to wait for on a CPU."""
    if device.type != "cpu":
        with waiting_for(what):
            torch.accelerator.synchronize(device)
