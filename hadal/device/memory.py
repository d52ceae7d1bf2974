"""How much memory this process uses, on the host and on its device."""

from __future__ import annotations

import resource
import sys
from pathlib import Path
from typing import NamedTuple

import torch

_STATM = Path("/proc/self/statm")


class MemoryUse(NamedTuple):
    """Bytes in use: all that this process holds on the host, torch's tensors on the device."""

    host: int
    device: int
    device_peak: int
    """The most since the peak was last reset; 0 on a CPU, like `device`."""


def memory_use(device: torch.device) -> MemoryUse:
    """What is in use now."""
    if device.type == "cpu":
        return MemoryUse(_resident_nbytes(), 0, 0)
    return MemoryUse(
        _resident_nbytes(),
        torch.accelerator.memory_allocated(device),
        torch.accelerator.max_memory_allocated(device),
    )


def reset_peak_memory(device: torch.device) -> None:
    """Count the device's peak from here; a CPU has none."""
    if device.type != "cpu":
        torch.accelerator.reset_peak_memory_stats(device)


def _resident_nbytes() -> int:
    """Resident memory; where the system does not tell, the most there has been."""
    try:
        return int(_STATM.read_text(encoding="ascii").split()[1]) * resource.getpagesize()
    except OSError:
        most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return most if sys.platform == "darwin" else most * 1024
