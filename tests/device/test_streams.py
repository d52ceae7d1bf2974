"""Side streams, the waits between them, stamps, and pinned memory of exact length."""

from __future__ import annotations

import gc
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch

from hadal.device import Event, SideStream, Stamp, memory
from hadal.errors import OffloadError


def test_on_a_cpu_it_is_a_time() -> None:
    first = Stamp(torch.device("cpu"))
    time.sleep(0.01)
    second = Stamp(torch.device("cpu"))
    assert first.is_reached and second.is_reached
    assert 0.01 <= second.seconds_since(first) < 5.0


class LateEvent:
    """A fake of torch's event on a device whose work is late."""

    made: ClassVar[list[LateEvent]] = []
    device = torch.device("cpu")  # one that captures no graphs
    has_come_to = 0

    def __init__(self, device: torch.device, enable_timing: bool) -> None:
        assert device.type == "meta" and enable_timing
        self.recorded = 0
        self.made.append(self)

    def record(self) -> None:
        self.recorded = len(self.made)

    def query(self) -> bool:
        return LateEvent.has_come_to >= self.recorded

    def elapsed_time(self, later: LateEvent) -> float:
        return 5.0 * (later.recorded - self.recorded)


def test_on_an_accelerator_it_is_an_event_without_waits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch, "Event", LateEvent)
    first, second = Stamp(torch.device("meta")), Stamp(torch.device("meta"))
    LateEvent.has_come_to = 1
    assert first.is_reached and not second.is_reached
    LateEvent.has_come_to = 2
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


CUDA = torch.device("cuda")


class FakeStream:
    """A fake stream that records its calls."""

    def __init__(self, told: list[str], name: str) -> None:
        self.told = told
        self.name = name

    def wait_stream(self, other: FakeStream) -> None:
        self.told.append(f"{self.name} after {other.name}")

    def wait_event(self, event: FakeEvent) -> None:
        self.told.append(f"{self.name} after {event.name}")

    def record_event(self) -> FakeEvent:
        return FakeEvent(self.told, f"event of {self.name}")

    def __enter__(self) -> None:
        self.told.append(f"{self.name} begins")

    def __exit__(self, *_: object) -> None:
        self.told.append(f"{self.name} ends")


class FakeEvent:
    device = torch.device("cpu")  # one that captures no graphs

    def __init__(self, told: list[str], name: str) -> None:
        self.told = told
        self.name = name

    def synchronize(self) -> None:
        self.told.append(f"host after {self.name}")

    def query(self) -> bool:
        return False


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    told: list[str] = []
    main = FakeStream(told, "device")
    monkeypatch.setattr(torch, "Stream", lambda device: FakeStream(told, "side"))
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda device: main)
    return told


def test_a_side_stream_orders_work(told: list[str]) -> None:
    stream, out = SideStream(CUDA), torch.zeros(3)
    stream.follow_device()
    stream.copy(out, torch.ones(3))
    event = stream.event()
    assert not event.is_over
    event.wait_on_device()
    event.wait_on_host()
    SideStream(CUDA).follow(event)
    inside = ["side begins", "side ends"]
    waits = ["device after event of side", "host after event of side", "side after event of side"]
    assert told == ["side after device", *inside, *waits]
    assert out.tolist() == [1, 1, 1]


def test_on_a_cpu_all_is_done_at_once() -> None:
    stream, out = SideStream(torch.device("cpu")), torch.zeros(3)
    stream.follow_device()
    stream.copy(out, torch.ones(3))
    event = stream.event()
    stream.follow(event)
    event.wait_on_host()
    event.wait_on_device()
    assert event.is_over and Event().is_over and out.tolist() == [1, 1, 1]


class FakeRuntime:
    """A fake of the part of CUDA's runtime that locks memory."""

    def __init__(self, code: int = 0) -> None:
        self.code = code
        self.locked: dict[int, int] = {}
        self.were_mapped: list[bool] = []

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        self.locked[address] = nbytes
        return self.code

    def cudaHostUnregister(self, address: int) -> int:
        del self.locked[address]
        self.were_mapped.append(is_mapped(address))
        return self.code


def is_mapped(address: int) -> bool:
    """Return True if an address belongs to some memory of this process."""
    rows = Path("/proc/self/maps").read_text().splitlines()
    ranges = ([int(end, 16) for end in row.split()[0].split("-")] for row in rows)
    return any(start <= address < stop for start, stop in ranges)


def on_cuda(monkeypatch: pytest.MonkeyPatch, runtime: FakeRuntime) -> list[Any]:
    waits: list[Any] = []
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: CUDA)
    monkeypatch.setattr(torch.accelerator, "synchronize", waits.append)
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 3)
    monkeypatch.setattr(torch, "cuda", SimpleNamespace(cudart=lambda: runtime))
    return waits


def test_pinned_memory_has_exact_length_and_is_released(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = FakeRuntime()
    waits = on_cuda(monkeypatch, runtime)
    values = memory.host_empty(3000, torch.float32, pinned=True)
    assert list(runtime.locked.values()) == [12_000]
    assert values.data_ptr() % 4096 == 0 and values.numel() == 3000
    part = values.fill_(1.0)[7:9]
    del values
    gc.collect()
    assert runtime.locked and part.tolist() == [1, 1]
    del part
    gc.collect()
    assert not runtime.locked and waits == [3]  # nothing is copied there any more
    assert runtime.were_mapped == [True]


def test_memory_that_stays_locked_is_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    runtime = FakeRuntime()
    on_cuda(monkeypatch, runtime)
    monkeypatch.setattr(torch, "zeros", lambda *_, device: None)
    values = memory.host_empty(3000, torch.float32, pinned=True)
    runtime.code = 1
    del values
    gc.collect()
    assert [record.getMessage() for record in caplog.records] == [
        "page-locked host memory could not be unlocked (CUDA error 1)"
    ]


def test_memory_that_cannot_be_locked_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    on_cuda(monkeypatch, FakeRuntime(code=2))
    cleared: list[str] = []
    monkeypatch.setattr(torch, "zeros", lambda *_, device: cleared.append(device))
    with pytest.raises(OffloadError, match=r"cannot be page-locked.*or set pin_memory to false"):
        memory.host_empty(3000, torch.float32, pinned=True)
    assert cleared == ["cuda"]  # the next kernel does not raise it again
