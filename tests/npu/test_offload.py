"""Copies between host and device overlap with work, use bounded memory, and every use waits."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from offload.test_tiers import config_of, model_of, small_blocks, state_of, train
from offload.test_whole_optimizers import assert_alike, trained as trained_whole
from ranks import RankPools, on_ranks
from torch import Tensor

import hadal
import npu
from hadal import utils
from hadal.device import Event
from hadal.offload import crossing
from hadal.offload.crossing import Crossing


@contextmanager
def late() -> Iterator[list[npu.Wait]]:
    """Nothing begins before it is waited for; the waits of the host."""
    with npu.asynchronous(math.inf), npu.waits() as waits:
        yield waits


def pinned(values: Tensor) -> Tensor:
    return values.pin_memory()


# ---- copies --------------------------------------------------------------------------------------


@on_ranks(1, "npus")
def test_two_gradients_are_copied_at_a_time() -> None:
    """The device runs at most two buckets ahead of the gradients that have left it."""
    device, plain = torch.device("npu", 0), Event.wait_on_device
    with late() as waits, patch.object(Event, "wait_on_device", autospec=True) as waiting:
        waiting.side_effect = plain
        way = Crossing(device, pins=True)
        values = [torch.full((8,), float(number), device=device) for number in range(1, 6)]
        outs = [pinned(torch.zeros(8)) for _ in values]
        events = []
        for number, (value, out) in enumerate(zip(values, outs, strict=True)):
            events.append(way.land(value, out))
            assert waiting.call_count == max(0, number - 1) and not waits
        for number, (event, out) in enumerate(zip(events, outs, strict=True), 1):
            assert not event.is_over and (out == 0).all()
            event.wait_on_host()
            assert event.is_over and (out == number).all()


def _send() -> tuple[list[tuple[int, bool]], list[str]]:
    made: list[tuple[int, bool]] = []
    plain = crossing.aligned

    def aligned(nbytes: int, *, pinned: bool = False) -> Tensor:
        made.append((nbytes, pinned))
        return plain(nbytes, pinned=pinned)

    with patch.multiple(crossing, aligned=aligned, _STAGED_NBYTES=32), late() as waits:
        device = torch.device("npu", 0)
        way = Crossing(device, pins=True)
        values, out = torch.arange(500.0), torch.empty(500, dtype=torch.bfloat16, device=device)
        way.begin_sending()
        way.send(values[:300], out[:300])
        way.send(values[300:], out[300:])
        waited = [wait.what for wait in waits]
        assert torch.equal(out.cpu(), values.bfloat16())
    return made, waited


def test_new_weights_are_staged_in_few_buffers(npus: RankPools) -> None:
    """They are cast in staging buffers, which are refilled once the device has read them."""
    ((made, waited),) = npus(1).run(_send)
    assert made == [(32, True)] * 4
    # 16 elements each: 19 and 13 parts; all but the last four are waited for.
    assert waited == ["event"] * (19 + 13 - 4)


@on_ranks(1, "npus")
def test_an_upload_sees_values_before_the_next_landing() -> None:
    device = torch.device("npu", 0)
    with late():
        way, host = Crossing(device, pins=True), pinned(torch.zeros(8))
        old, new = torch.empty(8, device=device), torch.empty(8, device=device)
        arrival = way.bring(host, old)
        landing = way.land(torch.ones(8, device=device), host, after=arrival.event)
        arrival_of_new = way.bring(host, new, after=landing)
        landing.wait_on_host()
        arrival.wait()
        assert (old == 0).all() and (host == 1).all()
        assert (arrival_of_new.wait() == 1).all()


# ---- training ------------------------------------------------------------------------------------

# Stage, and where optimizer and weights rest.
CASES = [
    (0, "cpu", None),
    (2, "cpu", None),
    (2, "nvme", None),
    (3, "cpu", "cpu"),
    (3, None, "cpu"),
    (3, "nvme", "nvme"),
]


def found_in(config: dict[str, Any]) -> list[Tensor]:
    torch.manual_seed(1)
    engine, *_ = hadal.initialize(model=model_of(), config=config)
    losses = train(engine, 2)
    weight = engine.module[1][0].weight
    gradients = []
    for step in range(2):  # a gradient that is looked at, and changed, between two micro-steps
        inputs = torch.randn(2, 96).to(weight.device, weight.dtype)
        engine.backward(engine(inputs).float().square().mean())
        if step == 0:
            gradients.append(utils.safe_get_full_grad(weight))
            utils.safe_set_full_grad(weight, 2 * gradients[0])
        engine.step()
    other = engine.module[0][0].weight
    with hadal.zero.GatheredParameters([weight, other], modifier_rank=0):
        weight.data[0] = 3.0
        other.data.neg_()
    utils.safe_set_full_fp32_param(engine.module[1][0].bias, torch.full((192,), 0.25))
    losses += train(engine, 2, 2)
    state = state_of(engine)
    engine.destroy()
    return [torch.tensor(losses), *gradients, *state]


# Another rank's wait for a collective starts nothing here, so delays are finite.
def compare_late(
    stage: int, optimizer: str | None, weights: str | None, path: str, **zero: Any
) -> None:
    """The same bits, whether copies run at once or as late as allowed."""
    config = config_of(stage, "bf16", optimizer, weights, path, reduce_bucket_size=10_000, **zero)
    with small_blocks():
        wanted = found_in(config)
        with npu.asynchronous():
            found = found_in(config)
    assert all(bool(one.isfinite().all()) for one in wanted)
    for mine, theirs in zip(found, wanted, strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.fast_cells("3-cpu-cpu")
@pytest.mark.parametrize(("stage", "optimizer", "weights"), CASES)
def test_late_copies_change_no_bit(
    stage: int, optimizer: str | None, weights: str | None, npus: RankPools, tmp_path: Path
) -> None:
    npus(2).run(compare_late, stage, optimizer, weights, str(tmp_path))


def compare_late_sums(stage: int, path: str) -> None:
    compare_late(stage, "cpu", None, path, offload_optimizer={"accumulate_on": "host"})


@pytest.mark.slow
def test_late_sums_change_no_bit(npus: RankPools, tmp_path: Path) -> None:
    for stage in (2, 3):
        npus(2).run(compare_late_sums, stage, str(tmp_path))


def test_one_rank_alone_waits_as_well(npus: RankPools, tmp_path: Path) -> None:
    for case in CASES[1:4:2]:
        npus(1).run(compare_late, *case, str(tmp_path))


@pytest.mark.fast_cells("Lamb-3")
@pytest.mark.parametrize(("kind", "stage"), [("Lamb", 3), ("Muon", 2), ("Adafactor", 3)])
@on_ranks(2, "npus")
def test_optimizers_on_host_and_disk_are_equal(kind: str, stage: int, tmp_path: Path) -> None:
    with small_blocks(), npu.asynchronous():
        _, wanted = trained_whole(kind, 2, stage, "bf16", "cpu", None, tmp_path)
        for weights in (None, "nvme")[: stage - 1]:  # weights leave the device at stage 3
            _, found = trained_whole(kind, 2, stage, "bf16", "nvme", weights, tmp_path)
            assert_alike(found, wanted)
