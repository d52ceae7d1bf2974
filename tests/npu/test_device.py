"""The test device acts like an accelerator: it refuses the same calls and reveals missing waits."""

from __future__ import annotations

import gc
import threading
import unittest.mock
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from ranks import RankPools, on_ranks
from torch import Tensor

import npu
from hadal.device import Event, Stamp, accelerator, device_thread


def _refusals() -> list[str]:
    here, there = torch.ones(3, device="npu"), torch.ones(3)
    number = torch.tensor(2.0)
    assert (here + number).tolist() == [3.0] * 3  # a number of the host may stand beside
    there.copy_(here)
    attempts: dict[str, Callable[[], object]] = {
        "sum": lambda: here + there,
        "sum on the host": lambda: there.add_(here),
        "sum on the host of a number": lambda: number.add_(here.sum()),
        "other device": lambda: here + torch.ones(3, device="npu:1"),
        "numpy": lambda: here.numpy(),
        "fp64": lambda: here.double(),
        "generator": lambda: here.normal_(generator=torch.Generator()),
        "data": lambda: setattr(there, "data", here),
    }
    refused = []
    for name, attempt in attempts.items():
        try:
            attempt()
        except (RuntimeError, TypeError):
            refused.append(name)
    return [name for name in attempts if name not in refused]


def test_accelerators_refuse_some_dtypes(npus: RankPools) -> None:
    assert npus(1).run(_refusals) == [[]]


@on_ranks(1, "npus")
def test_values_without_a_wait_are_stale() -> None:
    side = torch.Stream("npu")
    host = torch.zeros(64, pin_memory=True)
    pageable = torch.zeros(64)
    with npu.asynchronous(longest_delay=100.0):
        values = torch.full((64,), 3.0, device="npu")
        with side:  # without waiting for what makes the values
            early = torch.empty_like(values)
            early.copy_(values, non_blocking=True)
        assert early.isnan().all() and (values == 3).all()
        host.copy_(values, non_blocking=True)
        event = torch.accelerator.current_stream().record_event()
        assert not event.query() and (host == 0).all()
        event.synchronize()
        assert event.query() and (host == 3).all()
        # The host does not wait for a work that the device waits for.
        work = torch.distributed.all_reduce(values, async_op=True)
        assert not work.is_completed()
        work.wait()
        assert not work.is_completed() and (values == 3).all() and work.is_completed()
        pageable.copy_(values, non_blocking=True)
        assert (pageable == 3).all()


def _given_back(keeps: bool) -> tuple[Tensor, str]:
    side = torch.Stream("npu")
    host = torch.zeros(8, pin_memory=True)
    fault = ""
    try:
        with npu.asynchronous(longest_delay=100.0):
            values = torch.full((8,), 3.0, device="npu")
            torch.accelerator.synchronize()
            with side:
                host.copy_(values, non_blocking=True)
                event = side.record_event()
            if keeps:
                values.record_stream(side)
            del values
            gc.collect()
            event.synchronize()
    except AssertionError as error:
        fault = str(error)
    return host, fault


def test_memory_that_was_given_back_holds_nothing(npus: RankPools) -> None:
    ((kept, fault),) = npus(1).run(_given_back, True)
    assert (kept == 3).all() and not fault
    ((lost, fault),) = npus(1).run(_given_back, False)
    assert lost.isnan().all() and "given back" in fault


@on_ranks(1, "npus")
def test_memory_is_counted() -> None:
    gc.collect()
    before = torch.accelerator.memory_allocated()
    torch.accelerator.reset_peak_memory_stats()
    values = torch.empty(1000, device="npu")
    assert values.isnan().all()
    assert torch.accelerator.memory_allocated() - before == 4000
    values.untyped_storage().resize_(0)
    assert torch.accelerator.memory_allocated() == before
    assert torch.accelerator.max_memory_allocated() - before >= 4000
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(1 << 31, device="npu")


def _captured() -> list[int]:
    """How often events are asked for while a graph is captured, and at other times."""
    device, counts = torch.device("npu", 0), []
    module, name = torch.get_device_module(device), "is_current_stream_capturing"
    for is_capturing in (True, False):
        asked = unittest.mock.Mock(device=device)
        stamp, event = Stamp(device), Event(asked, device)
        stamp._event = asked
        with unittest.mock.patch.object(module, name, lambda here=is_capturing: here, create=True):
            assert event.is_over and stamp.is_reached
            event.wait_on_host()
        assert not asked.synchronize.called
        counts.append(asked.query.call_count)
    return counts


def test_no_event_is_asked_for_during_a_capture(npus: RankPools) -> None:
    assert npus(1).run(_captured) == [[0, 3]]


def _polled_during_a_capture() -> list[list[str]]:
    """What becomes of queries in threads of both kinds while another thread captures a graph.

    CUDA's rule: a query fails in each thread whose mode is global (0), as it is at first.
    """
    modes = threading.local()

    def exchange(mode: Any) -> int:
        before, modes.now = getattr(modes, "now", 0), mode._obj.value
        mode._obj.value = before
        return 0

    def query() -> bool:
        if getattr(modes, "now", 0) == 0:
            raise RuntimeError("operation not permitted when stream is capturing")
        return True

    found: list[list[str]] = []
    asked = unittest.mock.Mock(device=torch.device("npu", 0), query=query)

    def poll(told: list[str]) -> None:
        try:
            told.append(str(Event(asked, asked.device).is_over))
        except RuntimeError as error:
            told.append(str(error))

    driver = unittest.mock.Mock(cuThreadExchangeStreamCaptureMode=exchange)
    loads = unittest.mock.patch("ctypes.CDLL", lambda name: {"libcuda.so.1": driver}[name])
    seen = unittest.mock.patch.object(accelerator, "accelerator_kind", lambda: "cuda")
    with loads, seen:
        for make in (threading.Thread, partial(device_thread, name="a thread", daemon=True)):
            found.append([])
            told = found[-1]
            thread = make(target=partial(poll, told))
            thread.start()
            thread.join()
    return found


def test_threads_of_the_library_may_ask_for_events_during_a_capture(npus: RankPools) -> None:
    refused = "operation not permitted when stream is capturing"
    assert npus(1).run(_polled_during_a_capture) == [[[refused], ["True"]]]
