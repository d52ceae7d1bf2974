"""Points in the work of a device, to measure without waiting for it."""

from __future__ import annotations

import time
from typing import Any

import torch


class Stamp:
    """A point in time on a CPU; on an accelerator, a point in the current stream's work.

    An accelerator reaches it by itself: nothing is waited for, here or when it is read.
    """

    __slots__ = ("_event", "_seconds")

    def __init__(self, device: torch.device) -> None:
        self._seconds = 0.0
        self._event: Any = None
        if device.type == "cpu":
            self._seconds = time.perf_counter()
        else:
            self._event = torch.Event(device, enable_timing=True)
            self._event.record()

    @property
    def is_reached(self) -> bool:
        """Whether the device has come to it."""
        return self._event is None or bool(self._event.query())

    def seconds_since(self, earlier: Stamp) -> float:
        """The time between two points that are reached, of one device."""
        if self._event is None:
            return self._seconds - earlier._seconds
        return float(earlier._event.elapsed_time(self._event)) / 1000.0
