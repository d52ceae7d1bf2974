"""Timestamps in a device's work: a time on a CPU, an event elsewhere."""

from __future__ import annotations

import time
from typing import ClassVar

import pytest
import torch

from hadal.device import Stamp


def test_on_a_cpu_it_is_a_time() -> None:
    first = Stamp(torch.device("cpu"))
    time.sleep(0.01)
    second = Stamp(torch.device("cpu"))
    assert first.is_reached and second.is_reached
    assert 0.01 <= second.seconds_since(first) < 5.0


class Event:
    """A fake of torch's event on a device whose work is late."""

    made: ClassVar[list[Event]] = []
    device = torch.device("cpu")  # one that captures no graphs
    has_come_to = 0

    def __init__(self, device: torch.device, enable_timing: bool) -> None:
        assert device.type == "meta" and enable_timing
        self.recorded = 0
        self.made.append(self)

    def record(self) -> None:
        self.recorded = len(self.made)

    def query(self) -> bool:
        return Event.has_come_to >= self.recorded

    def elapsed_time(self, later: Event) -> float:
        return 5.0 * (later.recorded - self.recorded)


def test_on_an_accelerator_it_is_an_event_without_waits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch, "Event", Event)
    first, second = Stamp(torch.device("meta")), Stamp(torch.device("meta"))
    Event.has_come_to = 1
    assert first.is_reached and not second.is_reached
    Event.has_come_to = 2
    assert second.is_reached
    assert second.seconds_since(first) == 0.005


@pytest.mark.gpu
@pytest.mark.skipif(not torch.accelerator.is_available(), reason="there is no accelerator")
def test_an_accelerator_reaches_it_by_itself() -> None:
    device = torch.device(torch.accelerator.current_accelerator().type)
    first = Stamp(device)
    torch.ones(1 << 20, device=device).sum()
    second = Stamp(device)
    torch.accelerator.synchronize()
    assert second.is_reached and 0.0 < second.seconds_since(first) < 10.0
