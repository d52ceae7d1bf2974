"""Copies between a device and the host use bounded memory."""

from __future__ import annotations

import late
import pytest
import torch

from hadal.offload import crossing
from hadal.offload.crossing import Crossing

CPU = torch.device("cpu")


def test_two_gradients_are_copied_at_a_time() -> None:
    """The device runs at most two buckets ahead of the gradients that have left it."""
    with late.device():
        way = Crossing(CPU, pins=False)
        values = [torch.full((8,), float(number)) for number in range(5)]
        outs = [torch.empty(8) for _ in values]
        events = []
        for number, (value, out) in enumerate(zip(values, outs, strict=True)):
            events.append(way.land(value, out))
            assert late.waits["device"] == max(0, number - 1)
            assert late.waits["host"] == 0
        for number, event in enumerate(events):
            assert not event.is_over and outs[number].isnan().all()
            event.wait_on_host()
            assert event.is_over and (outs[number] == number).all()


def test_new_weights_are_staged_in_few_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are cast in staging buffers, which are refilled once the device has read them."""
    made: list[tuple[int, bool]] = []
    plain = crossing.aligned

    def aligned(nbytes: int, *, pinned: bool = False) -> torch.Tensor:
        made.append((nbytes, pinned))
        return plain(nbytes)

    monkeypatch.setattr(crossing, "aligned", aligned)
    monkeypatch.setattr(crossing, "_STAGED_NBYTES", 32)
    with late.device():
        way = Crossing(CPU, pins=True)
        values, out = torch.arange(500.0), torch.empty(500, dtype=torch.bfloat16)
        way.begin_sending()
        way.send(values[:300], out[:300])
        way.send(values[300:], out[300:])
        assert torch.equal(out, values.bfloat16())
        assert made == [(32, True)] * 4
        # 16 elements each: 19 and 13 parts; all but the last four are waited for.
        assert late.waits["host"] == 19 + 13 - 4


def test_an_upload_sees_values_before_the_next_landing() -> None:
    with late.device():
        way = Crossing(CPU, pins=False)
        host, device = torch.zeros(8), torch.empty(8)
        arrival = way.bring(host, device)
        landing = way.land(torch.ones(8), host, after=arrival.event)
        arrival_of_new = way.bring(host, torch.empty(8), after=landing)
        landing.wait_on_host()
        arrival.wait()
        assert (device == 0).all() and (host == 1).all()
        assert (arrival_of_new.wait() == 1).all()
