"""Learning-rate schedules, compared with recorded values of DeepSpeed 0.19."""

from __future__ import annotations

import logging
import math
from typing import Any

import pytest
import torch
from torch import nn

from hadal.errors import OptimizerError
from hadal.optim.schedules import (
    LRRangeTest,
    OneCycle,
    WarmupCosineLR,
    WarmupDecayLR,
    WarmupLR,
    build_schedule,
)

NATIVE = [LRRangeTest, OneCycle, WarmupLR, WarmupDecayLR, WarmupCosineLR]
ONE_CYCLE = {
    "cycle_min_lr": 1e-4,
    "cycle_max_lr": 1e-3,
    "cycle_first_step_size": 100,
    "decay_step_size": 50,
    "decay_lr_rate": 0.5,
    "cycle_min_mom": 0.85,
    "cycle_max_mom": 0.99,
    "decay_mom_rate": 0.1,
}
STAIRS = {
    "cycle_min_lr": 1e-4,
    "cycle_max_lr": 1e-3,
    "cycle_first_step_size": 50,
    "cycle_first_stair_count": 2,
}
RANGE = {
    "lr_range_test_min_lr": 1e-4,
    "lr_range_test_step_size": 200,
    "lr_range_test_step_rate": 5.0,
}
WARMUP = {"warmup_min_lr": 0.0, "warmup_max_lr": 1e-3, "warmup_num_steps": 1000}
LINEAR = {**WARMUP, "warmup_min_lr": 1e-4, "warmup_type": "linear"}
DECAY = {
    "total_num_steps": 1000,
    "warmup_min_lr": 0.0,
    "warmup_max_lr": 1e-3,
    "warmup_num_steps": 100,
}
COSINE = {"total_num_steps": 1000, "warmup_num_steps": 100}


def optimizer_of(*rates: float, kind: Any = torch.optim.AdamW) -> torch.optim.Optimizer:
    groups = [{"params": [nn.Parameter(torch.ones(1))], "lr": rate} for rate in rates or (2e-3,)]
    return kind(groups, lr=1.0)


def played(kind: str, params: dict[str, Any], rate: float = 2e-3) -> list[tuple[float, float]]:
    """Return (rate, first beta) after 0, 1, 2, ... steps."""
    optimizer = optimizer_of(rate)
    schedule = build_schedule(kind, params, optimizer)
    (group,) = optimizer.param_groups
    values = [(group["lr"], group["betas"][0])]
    for _ in range(1201):
        schedule.step()
        values.append((group["lr"], group["betas"][0]))
        assert schedule.get_lr() == [group["lr"]] == schedule.get_last_lr()
    return values


RATES = [
    ("LRRangeTest", RANGE, {0: 1e-4, 100: 3.5e-4, 200: 6.0e-4, 201: 6.025e-4}),
    (
        "LRRangeTest",
        {**RANGE, "lr_range_test_staircase": True},
        {0: 1e-4, 199: 1e-4, 200: 6.0e-4, 399: 6.0e-4, 400: 1.1e-3},
    ),
    (
        "OneCycle",
        ONE_CYCLE,
        {0: 1e-4, 1: 1.09e-4, 50: 5.5e-4, 100: 1e-3, 150: 5.5e-4, 200: 1e-4},
    ),
    ("OneCycle", STAIRS, {24: 1e-4, 25: 5.5e-4, 50: 1e-3, 51: 5.5e-4, 75: 5.5e-4, 76: 1e-4}),
    ("OneCycle", {**ONE_CYCLE, "decay_step_size": 0}, {201: 1e-4, 301: 1e-4}),
    (
        "WarmupLR",
        WARMUP,
        {0: 0.0, 1: 0.0, 1000: 1e-3, 1001: 1e-3, 1200: 1e-3},
    ),
    (
        "WarmupLR",
        LINEAR,
        {0: 1e-4, 1: 1e-4, 2: 1.009e-4, 500: 5.491e-4, 1000: 9.991e-4, 1001: 1e-3},
    ),
    ("WarmupLR", {**WARMUP, "warmup_num_steps": 1}, {0: 0.0, 1: 0.0, 2: 1e-3, 3: 1e-3}),
    ("WarmupLR", {**WARMUP, "warmup_num_steps": 0}, {0: 0.0, 1: 0.0, 2: 1e-3, 3: 1e-3}),
    ("WarmupLR", {"warmup_num_steps": 10}, {0: 0.0, 10: 2e-3, 50: 2e-3}),
    ("WarmupDecayLR", DECAY, {0: 0.0, 10: 5.0e-4, 101: 1e-3, 1001: 0.0, 1200: 0.0}),
    (
        "WarmupDecayLR",
        {**DECAY, "warmup_min_lr": 1e-4, "warmup_type": "linear"},
        {0: 1e-4, 10: 1.81e-4, 102: 9.99e-4, 550: 5.51e-4, 1001: 1e-4, 1200: 1e-4},
    ),
    (
        "WarmupCosineLR",
        {**COSINE, "warmup_min_ratio": 0.1, "cos_min_ratio": 0.01, "warmup_type": "linear"},
        {0: 0.0, 1: 2e-4, 50: 1.082e-3, 100: 1.982e-3, 550: 1.01e-3, 1000: 2e-5, 1200: 2e-5},
    ),
    ("WarmupCosineLR", COSINE, {0: 0.0, 10: 1e-3, 550: 1.0001e-3, 1000: 2e-7}),
]
# Recorded rounded: (as it was written, the same by hand).
ROUNDED = [
    (
        "OneCycle",
        ONE_CYCLE,
        {201: ("9.900990e-5", 1e-4 / 1.01), 301: ("4.975124e-5", 1e-4 / (1 + 0.5 * 101 / 50))},
    ),
    (
        "OneCycle",
        {
            "cycle_min_lr": 0.0,
            "cycle_max_lr": 1.0,
            "cycle_first_step_size": 30,
            "cycle_second_step_size": 60,
        },
        {10: ("0.33333", 1 / 3), 50: ("0.66667", 2 / 3), 90: ("0", 0.0)},
    ),
    (
        "WarmupLR",
        WARMUP,
        {
            2: ("1.0034333e-4", 1e-3 * math.log(2) / math.log(1000)),
            10: ("3.3333333e-4", 1e-3 / 3),
            100: ("6.6666667e-4", 2e-3 / 3),
            500: ("8.9965667e-4", 1e-3 * math.log(500) / math.log(1000)),
        },
    ),
    (
        "WarmupDecayLR",
        DECAY,
        {550: ("5.0111111e-4", 1e-3 * 451 / 900), 1000: ("1.1111111e-6", 1e-3 / 900)},
    ),
    (
        "WarmupCosineLR",
        COSINE,
        {50: ("1.69897e-3", 2e-3 * math.log(50) / math.log(100))},
    ),
    (
        "WarmupCosineLR",
        {**COSINE, "warmup_min_ratio": 0.1, "cos_min_ratio": 0.01, "warmup_type": "linear"},
        {
            101: (
                "1.99999397e-3",
                2e-3 * (0.01 + 0.99 * (1 + math.cos(math.pi / 900)) / 2),
            )
        },
    ),
]


@pytest.mark.parametrize(("kind", "params", "points"), RATES)
def test_rates(kind, params, points):
    values = played(kind, params)
    found = {n: values[n][0] for n in points}
    assert found == pytest.approx(points, rel=1e-9, abs=1e-15)


@pytest.mark.parametrize(("kind", "params", "points"), ROUNDED)
def test_rates_with_many_digits(kind, params, points):
    values = played(kind, params)
    for n, (written, by_hand) in points.items():
        found = values[n][0]
        assert found == pytest.approx(by_hand, rel=1e-9, abs=1e-15)
        digits = len(written.split("e")[0].replace(".", "").lstrip("0"))
        assert float(f"{found:.{max(1, digits)}g}") == float(written)


def test_one_cycle_moves_the_first_beta_the_other_way():
    betas = {n: beta for n, (_, beta) in enumerate(played("OneCycle", ONE_CYCLE))}
    points = {1: 0.9886, 50: 0.92, 100: 0.85, 150: 0.92, 200: 0.99, 201: 0.99198, 301: 1.18998}
    assert betas[0] == 0.85
    assert {n: betas[n] for n in points} == pytest.approx(points, rel=1e-9)


def test_one_cycle_sets_the_second_beta():
    optimizer = optimizer_of()
    build_schedule("OneCycle", ONE_CYCLE, optimizer)
    assert optimizer.param_groups[0]["betas"] == (0.85, 0.99)


def test_one_cycle_moves_the_betas_of_every_group():
    optimizer = optimizer_of(1e-3, 2e-3)
    optimizer.param_groups[1]["betas"] = (0.5, 0.6, 0.7)  # some optimizers have three
    momenta = {"cycle_min_mom": [0.8, 0.5], "cycle_max_mom": [0.9, 0.7]}
    schedule = build_schedule("OneCycle", {**ONE_CYCLE, **momenta}, optimizer)
    for _ in range(50):
        schedule.step()
    betas = [group["betas"] for group in optimizer.param_groups]
    assert betas[0] == pytest.approx((0.85, 0.99))
    assert betas[1] == pytest.approx((0.6, 0.99, 0.7))


def test_schedules_have_the_attributes_that_programs_read():
    optimizer = optimizer_of(1e-3, 2e-3)
    warm = build_schedule("WarmupLR", {"warmup_num_steps": 8, "warmup_type": "?"}, optimizer)
    assert (warm.min_lrs, warm.max_lrs) == ([0, 0], [1e-3, 2e-3])
    assert (warm.warmup_num_steps, warm.warmup_type) == (8, "log")
    cosine = WarmupCosineLR(optimizer_of(2e-3), 20, 0.25, 10, 0.5, "linear")
    assert (cosine.total_num_steps, cosine.org_lrs, cosine.get_lr_ratio()) == (20, [2e-3], 0.0)
    for number, ratio in ((0, 0.25), (5, 0.625), (19, 0.5), (30, 0.5)):
        cosine.step(number)
        assert cosine.get_lr_ratio() == pytest.approx(ratio)
    cycle = build_schedule("OneCycle", ONE_CYCLE, optimizer)
    assert cycle.get_mom() == [(0.99, 0.99)] * 2 and optimizer.param_groups[0]["betas"][0] == 0.85
    cycle.step(99)
    assert cycle.get_mom() == [pytest.approx((0.85, 0.99))] * 2
    assert (cycle.total_size, cycle.step_ratio) == (200, 0.5)
    steady = build_schedule("OneCycle", {**ONE_CYCLE, "cycle_momentum": False}, optimizer)
    assert steady.get_mom() is None


def test_a_rate_in_a_tensor_stays_in_it():
    optimizer = optimizer_of()
    held = optimizer.param_groups[0]["lr"] = torch.tensor(2e-3, dtype=torch.float64)
    schedule = build_schedule("WarmupLR", LINEAR, optimizer)
    for _ in range(500):
        schedule.step()
    assert optimizer.param_groups[0]["lr"] is held
    assert held.item() == schedule.get_last_lr()[0] == pytest.approx(5.491e-4, rel=1e-9)


def test_one_cycle_leaves_an_optimizer_without_betas_alone(caplog):
    optimizer = optimizer_of(kind=torch.optim.SGD)
    with caplog.at_level(logging.WARNING, "hadal"):
        schedule = build_schedule("OneCycle", ONE_CYCLE, optimizer)
    before = optimizer.param_groups[0]["momentum"]
    schedule.step()
    assert "betas" not in optimizer.param_groups[0]
    assert optimizer.param_groups[0]["momentum"] == before
    assert "cycle_momentum has no effect: SGD has no betas" in caplog.text
    caplog.clear()
    build_schedule("OneCycle", {**ONE_CYCLE, "cycle_momentum": False}, optimizer)
    assert caplog.text == ""


@pytest.mark.parametrize(
    ("kind", "params", "told"),
    [
        ("WarmupLR", {"warmup_num_steps": 10.0}, "warmup_num_steps"),
        ("WarmupLR", {"warmup_num_steps": -1}, "warmup_num_steps"),
        ("WarmupLR", {"warmup_num_steps": True}, "warmup_num_steps"),
        ("WarmupDecayLR", {"total_num_steps": 10, "warmup_num_steps": -1}, "warmup_num_steps"),
        ("WarmupCosineLR", {"total_num_steps": 10, "warmup_num_steps": 2.5}, "warmup_num_steps"),
        ("LRRangeTest", {"lr_range_test_step_size": 10.0}, "lr_range_test_step_size"),
        ("LRRangeTest", {"lr_range_test_step_size": 0}, "lr_range_test_step_size"),
        ("OneCycle", {**ONE_CYCLE, "cycle_first_step_size": 0}, "cycle_first_step_size"),
        ("OneCycle", {**ONE_CYCLE, "cycle_second_step_size": -1}, "cycle_second_step_size"),
        ("WarmupLR", {"warmup_max_lr": [1e-3]}, "warmup_max_lr lists 1 values for 2"),
        ("WarmupLR", {"warmup_min_lr": [0.0] * 3}, "warmup_min_lr lists 3 values for 2"),
        ("LRRangeTest", {"lr_range_test_min_lr": [1.0]}, "lr_range_test_min_lr"),
        ("OneCycle", {**ONE_CYCLE, "cycle_min_mom": [0.8]}, "cycle_min_mom"),
        ("WarmupDecayLR", {}, "total_num_steps"),
        ("WarmupDecayLR", {"total_num_steps": 0}, "total_num_steps must be > 0, found 0"),
        ("WarmupCosineLR", {"total_num_steps": 0}, "total_num_steps must be > 0, found 0"),
        ("WarmupLR", {"warmup_steps": 3}, "warmup_steps"),
        ("StepLR", {"step": 3}, "StepLR"),
        ("CosineLR", {}, "CosineLR"),
        ("Counter", {}, "Counter"),
        ("math", {}, "math"),
    ],
)
def test_invalid_types_and_params_are_refused(kind, params, told):
    with pytest.raises(OptimizerError, match=told):
        build_schedule(kind, params, optimizer_of(1e-3, 2e-3))


def test_each_group_has_its_own_rate():
    optimizer = optimizer_of(1e-3, 2e-3)
    schedule = build_schedule(
        "WarmupLR",
        {"warmup_min_lr": [0.0, 1.0], "warmup_max_lr": [1.0, 3.0], "warmup_num_steps": 4},
        optimizer,
    )
    assert schedule.get_lr() == [0.0, 1.0]
    for _ in range(5):
        schedule.step()
    assert [group["lr"] for group in optimizer.param_groups] == [1.0, 3.0]
    own = build_schedule("WarmupLR", {"warmup_num_steps": 2}, optimizer_of(1e-3, 2e-3))
    own.step(5)
    assert own.get_lr() == [1e-3, 2e-3]


def test_an_unknown_warm_up_falls_back_to_the_logarithm(caplog):
    with caplog.at_level(logging.WARNING, "hadal"):
        found = played("WarmupLR", {**WARMUP, "warmup_type": "exponential"})
    assert "warmup_type" in caplog.text
    assert found == played("WarmupLR", WARMUP)


PARAMS = dict(zip(NATIVE, (RANGE, ONE_CYCLE, LINEAR, DECAY, COSINE), strict=True))


@pytest.mark.parametrize("kind", NATIVE, ids=lambda kind: kind.__name__)
def test_a_saved_state_resumes(kind):
    one, other = optimizer_of(), optimizer_of()
    first, second = kind(one, **PARAMS[kind]), kind(other, **PARAMS[kind])
    for _ in range(137):
        first.step()
    second.load_state_dict(first.state_dict())
    for _ in range(3):
        keys = ("lr", "betas")
        for group, twin in zip(one.param_groups, other.param_groups, strict=True):
            assert {key: group[key] for key in keys} == {key: twin[key] for key in keys}
        first.step()
        second.step()


@pytest.mark.parametrize("kind", NATIVE, ids=lambda kind: kind.__name__)
def test_the_native_ones_are_found_by_name(kind):
    assert type(build_schedule(kind.__name__, PARAMS[kind], optimizer_of())) is kind


def test_torchs_schedulers_are_found_by_name():
    optimizer = optimizer_of()
    schedule = build_schedule("StepLR", {"step_size": 2, "gamma": 0.5}, optimizer)
    assert type(schedule) is torch.optim.lr_scheduler.StepLR
    assert isinstance(
        build_schedule("CosineAnnealingLR", {"T_max": 10}, optimizer_of()),
        torch.optim.lr_scheduler.LRScheduler,
    )
