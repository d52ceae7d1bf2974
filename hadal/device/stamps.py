"""Timestamps in a device's work, which measure time without waiting for the device."""

from __future__ import annotations

import time
from typing import Any

import torch

from hadal.device.streams import has_passed


class Stamp:
    """A point in time on a CPU; on an accelerator, a point in the work of the current stream.

    Neither recording nor reading it waits for the accelerator.
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
        """True if the device has reached it."""
        return has_passed(self._event)

    def seconds_since(self, earlier: Stamp) -> float:
        """Return the seconds between two points of one device that have been reached."""
        if self._event is None:
            return self._seconds - earlier._seconds
        return float(earlier._event.elapsed_time(self._event)) / 1000.0
