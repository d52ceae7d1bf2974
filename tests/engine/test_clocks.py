"""Times of the phases, memory around them, and samples per second."""

from __future__ import annotations

import time
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from pace import holds_at_some_pace
from ranks import RankPools
from torch import Tensor, nn

import hadal.engine.clocks
from engine.toys import backward, engine_of, train
from hadal import comm
from hadal.device.memory import give_back_freed_memory
from hadal.engine.clocks import Clocks, MemoryGauge, Throughput
from hadal.listener import Forward, Options, Update

CPU = torch.device("cpu")
NAMES = ["forward", "backward", "backward_inner", "backward_allreduce", "step"]


class Bench:
    """A clock that advances only on request, and a count of waits for the device."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.waits = 100.0, 0
        monkeypatch.setattr(hadal.engine.clocks.time, "perf_counter", lambda: self.now)
        monkeypatch.setattr(hadal.engine.clocks, "synchronize", self._wait)

    def _wait(self, device: torch.device) -> None:
        assert device == CPU
        self.waits += 1


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Bench:
    return Bench(monkeypatch)


FORWARD = Forward((), {}, 0, 0, True)
NONE = Options((), ())
UPDATE = Update(1, 12, 12, 2, (), 1.0, None, False, NONE, NONE, 0, None)


def spend(bench: Bench, clocks: Clocks, scale: float) -> None:
    """An update of two micro-steps."""
    reducing = clocks.reducing or nullcontext()
    for _ in range(2):
        clocks.before_forward(FORWARD)
        bench.now += 1 * scale
        clocks.after_forward(None)
        bench.now += 50  # nobody's
        clocks.before_backward()
        bench.now += 2 * scale
        with reducing:
            bench.now += 3 * scale
        clocks.after_backward(None)
    with reducing:
        bench.now += 1 * scale
        with reducing:  # one that is due begins inside another
            bench.now += 3 * scale
    clocks.before_update({})
    bench.now += 5 * scale
    clocks.after_update(UPDATE)


@pytest.mark.claims("wall_clock_breakdown")
def test_times_add_up_over_an_update_and_are_averaged_over_several(bench: Bench) -> None:
    clocks = Clocks(CPU, times=True, memory=False)
    assert clocks.last == {}
    spend(bench, clocks, 0.001)
    once = {
        "forward": 2.0,
        "backward": 14.0,
        "backward_inner": 4.0,
        "backward_allreduce": 10.0,
        "step": 5.0,
    }
    assert clocks.last == pytest.approx(once)
    assert list(clocks.last) == NAMES
    spend(bench, clocks, 0.003)
    assert clocks.last == pytest.approx({name: 3 * value for name, value in once.items()})
    assert clocks.take_means() == pytest.approx({name: 2 * value for name, value in once.items()})
    assert clocks.take_means() == {}
    assert bench.waits == 0


def test_an_interrupted_phase_is_timed_until_the_error(bench: Bench) -> None:
    clocks = Clocks(CPU, times=True, memory=True)
    clocks.before_forward(FORWARD)
    bench.now += 1
    clocks.on_error(ArithmeticError())
    bench.now += 50
    clocks.before_forward(FORWARD)
    bench.now += 2
    clocks.after_forward(None)
    clocks.on_error(ArithmeticError())
    clocks.before_update({})
    clocks.after_update(UPDATE)
    assert clocks.last["forward"] == pytest.approx(3000.0)


def test_clocks_that_are_off_do_nothing(bench: Bench) -> None:
    clocks = Clocks(CPU, times=False, memory=False)
    spend(bench, clocks, 1.0)
    assert (clocks.last, clocks.take_means(), bench.waits) == ({}, {}, 0)


@pytest.mark.claims("timers", "timers.throughput", "timers.throughput.synchronized")
@pytest.mark.parametrize("synchronized", [True, False])
def test_the_throughput_leaves_the_warm_up_out(bench: Bench, synchronized: bool) -> None:
    throughput = Throughput(CPU, synchronized=synchronized)
    for seconds in (70, 30):
        bench.now += seconds
        throughput.end_update(12)
    assert throughput.take_rate() is None
    for _ in range(4):
        bench.now += 2
        throughput.end_update(12)
    assert throughput.take_rate() == pytest.approx(6.0)
    bench.now += 4
    throughput.end_update(12)
    assert throughput.take_rate() == pytest.approx(3.0)
    assert throughput.take_rate() is None
    assert bench.waits == (3 if synchronized else 0)


def test_memory_that_is_taken_is_seen() -> None:
    gauge = MemoryGauge(CPU)
    give_back_freed_memory()  # else it would be taken again, and nothing grow
    gauge.start()
    taken = torch.ones(1 << 24)
    gauge.stop()
    grown = gauge.after.host - gauge.before.host
    assert 0.9 * taken.nbytes < grown < 1.5 * taken.nbytes
    assert gauge.before.host > 10 << 20
    assert gauge.after.device == gauge.after.device_peak == 0


# ---- inside an engine ---------------------------------------------------------------------------

FORWARD_S, BACKWARD_S = 0.02, 0.03


class Slow(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, late_s: float) -> Tensor:
        ctx.late_s = late_s
        time.sleep(FORWARD_S)
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        time.sleep(BACKWARD_S + ctx.late_s * comm.get_rank())
        return gradient, None


class SlowModel(nn.Module):
    def __init__(self, late_s: float) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 9), nn.Linear(9, 4)
        self.late_s = late_s

    def forward(self, values: Tensor) -> Tensor:
        return self.last(Slow.apply(self.first(values), self.late_s))


def time_an_update(
    stage: int, keys: dict[str, Any], late_s: float
) -> tuple[dict[str, float], float]:
    engine = engine_of(
        stage, SlowModel(late_s), gradient_accumulation_steps=2, wall_clock_breakdown=True, **keys
    )
    assert engine.wall_clock_times() == {}
    for _ in range(2):
        began = time.perf_counter()
        backward(engine, 0)
        if not keys:
            engine.step()
        backward(engine, 1)
        engine.step()
    assert engine.global_steps == 2
    spent = 1000 * (time.perf_counter() - began)
    times = engine.wall_clock_times()
    engine.destroy()
    return times, spent


@pytest.mark.fast_cells("3-keys2")
@pytest.mark.claims("wall_clock_breakdown")
@pytest.mark.parametrize(
    ("stage", "keys"), [(0, {}), (2, {}), (3, {}), (1, {"managed_gradient_accumulation": False})]
)
def test_waiting_for_a_late_rank_counts_as_reduction(
    stage: int, keys: dict[str, Any], ranks: RankPools
) -> None:
    def counts(late_s: float) -> bool:
        (times, spent), (late_times, _) = ranks(2).run(time_an_update, stage, keys, late_s)
        assert list(times) == NAMES
        for told in (times, late_times):
            assert told["backward"] == pytest.approx(
                told["backward_inner"] + told["backward_allreduce"]
            )
            assert told["step"] > 0
        assert times["forward"] >= 2 * 1000 * FORWARD_S
        assert times["backward_inner"] >= 2 * 1000 * BACKWARD_S
        assert late_times["backward_inner"] > 2 * 1000 * late_s
        assert times["forward"] + times["backward"] + times["step"] <= spent
        # Rank 1 comes later by this much, at least once, if rank 0 is not late by itself. At stage
        # 3 the ranks meet before, to gather.
        waited = times["backward_inner" if stage == 3 else "backward_allreduce"]
        return waited > 0.5 * 1000 * late_s

    assert holds_at_some_pace(counts, 0.1)


def count_waits(keys: dict[str, Any]) -> int:
    waits = 0

    def wait(device: torch.device) -> None:
        nonlocal waits
        waits += 1

    before = hadal.engine.clocks.synchronize
    hadal.engine.clocks.synchronize = wait  # type: ignore[attr-defined]
    try:
        engine = engine_of(1, **keys)
        train(engine, range(6))
        engine.destroy()
    finally:
        hadal.engine.clocks.synchronize = before  # type: ignore[attr-defined]
    return waits


THROUGHPUT_OFF = {"timers": {"throughput": {"enabled": False}}}
THROUGHPUT_UNSYNCHRONIZED = {"timers": {"throughput": {"synchronized": False}}}


@pytest.mark.claims(
    "timers.throughput.enabled", "timers.throughput.synchronized", "wall_clock_breakdown"
)
@pytest.mark.parametrize(
    ("keys", "waits"),
    [
        ({}, [0, 0]),
        # Once behind the warm-up, and on the rank that tells once for each line with a rate.
        ({"steps_per_print": 2}, [3, 1]),
        ({"steps_per_print": 2, **THROUGHPUT_OFF}, [0, 0]),
        ({"steps_per_print": 2, **THROUGHPUT_UNSYNCHRONIZED}, [0, 0]),
    ],
)
def test_the_device_is_waited_for_only_where_something_is_measured(
    keys: dict[str, Any], waits: list[int], ranks: RankPools
) -> None:
    assert ranks(2).run(count_waits, keys) == waits
