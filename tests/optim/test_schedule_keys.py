"""The effect of each key of the `scheduler` section, from JSON to the rates."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from hadal.config import load_config
from hadal.errors import ConfigError, OptimizerError
from hadal.optim.schedules import build_schedule

RANGE = {"lr_range_test_min_lr": 1.0, "lr_range_test_step_size": 10}
CYCLE = {"cycle_min_lr": 1.0, "cycle_max_lr": 3.0, "cycle_first_step_size": 10}
WARMUP = {"warmup_max_lr": 1.0, "warmup_num_steps": 10, "warmup_type": "linear"}
DECAY = {**WARMUP, "total_num_steps": 20}
COSINE = {"total_num_steps": 20, "warmup_num_steps": 10, "warmup_type": "linear"}
RATE = 2.0


def played(
    kind: str, params: dict[str, Any] | None, optimizer: Any = torch.optim.AdamW, groups: int = 1
) -> list[list[tuple[float, Any]]]:
    """Return (rate, betas) of each group after 0, 1, ... 40 steps, for a section from JSON."""
    section = {"type": kind} if params is None else {"type": kind, "params": params}
    config = load_config({"train_batch_size": 1, "scheduler": section})
    assert config.scheduler is not None
    made = optimizer([{"params": [nn.Parameter(torch.ones(1))]} for _ in range(groups)], lr=RATE)
    schedule = build_schedule(config.scheduler.type, config.scheduler.params, made)
    seen = []
    for _ in range(41):
        seen.append([(group["lr"], group.get("betas")) for group in made.param_groups])
        made.step()
        schedule.step()
    return seen


def row(name: str, kind: str, params: dict[str, Any], points: dict[int, float]) -> Any:
    return pytest.param(kind, params, points, id=f"{kind}.{name}")


RATES = [
    row("lr_range_test_min_lr", "LRRangeTest", RANGE, {0: 1.0, 10: 2.0}),
    row(
        "lr_range_test_step_size",
        "LRRangeTest",
        {**RANGE, "lr_range_test_step_size": 20},
        {10: 1.5, 20: 2.0},
    ),
    row(
        "lr_range_test_step_rate",
        "LRRangeTest",
        {**RANGE, "lr_range_test_step_rate": 3},
        {10: 4.0, 20: 7.0},
    ),
    row(
        "lr_range_test_staircase",
        "LRRangeTest",
        {**RANGE, "lr_range_test_staircase": True},
        {9: 1.0, 10: 2.0, 19: 2.0, 20: 3.0},
    ),
    row("cycle_min_lr", "OneCycle", CYCLE, {0: 1.0, 20: 1.0}),
    row("cycle_max_lr", "OneCycle", CYCLE, {5: 2.0, 10: 3.0, 15: 2.0}),
    row(
        "cycle_first_step_size",
        "OneCycle",
        {**CYCLE, "cycle_first_step_size": 4},
        {2: 2.0, 4: 3.0, 8: 1.0},
    ),
    row(
        "cycle_second_step_size",
        "OneCycle",
        {**CYCLE, "cycle_second_step_size": 20},
        {10: 3.0, 20: 2.0, 30: 1.0},
    ),
    row(
        "cycle_first_stair_count",
        "OneCycle",
        {**CYCLE, "cycle_first_stair_count": 2},
        {4: 1.0, 5: 2.0, 9: 2.0, 10: 3.0, 11: 2.0, 16: 1.0},
    ),
    row(
        "cycle_second_stair_count",
        "OneCycle",
        {**CYCLE, "cycle_second_stair_count": 2},
        {4: 1.8, 11: 2.0, 15: 2.0, 16: 1.0},
    ),
    row(
        "decay_lr_rate",
        "OneCycle",
        {**CYCLE, "decay_lr_rate": 0.5, "decay_step_size": 10},
        {20: 1.0, 30: 1 / 1.5, 40: 0.5},
    ),
    row(
        "decay_step_size",
        "OneCycle",
        {**CYCLE, "decay_lr_rate": 0.5, "decay_step_size": 5},
        {25: 1 / 1.5, 30: 0.5},
    ),
    row("warmup_min_lr", "WarmupLR", {**WARMUP, "warmup_min_lr": 0.5}, {0: 0.5, 6: 0.75}),
    row("warmup_min_lr", "WarmupDecayLR", {**DECAY, "warmup_min_lr": 0.5}, {0: 0.5, 40: 0.5}),
    row("warmup_max_lr", "WarmupLR", {**WARMUP, "warmup_max_lr": None}, {11: RATE, 40: RATE}),
    row("warmup_max_lr", "WarmupDecayLR", {"total_num_steps": 2000}, {10: 1e-3 / 3}),
    row("warmup_num_steps", "WarmupLR", {**WARMUP, "warmup_num_steps": 20}, {11: 0.5}),
    row("warmup_num_steps", "WarmupLR", {**WARMUP, "warmup_num_steps": 1}, {1: 0.0, 2: 0.5}),
    row("warmup_num_steps", "WarmupLR", {**WARMUP, "warmup_num_steps": 0}, {1: 0.0, 2: 0.5}),
    row("warmup_type", "WarmupLR", {**WARMUP, "warmup_type": "linear"}, {6: 0.5}),
    row("warmup_type", "WarmupLR", {**WARMUP, "warmup_type": "log"}, {10: 1.0}),
    row("total_num_steps", "WarmupDecayLR", DECAY, {11: 1.0, 16: 0.5, 21: 0.0}),
    row(
        "total_num_steps",
        "WarmupCosineLR",
        COSINE,
        {15: RATE * (1e-4 + (1 - 1e-4) / 2)},
    ),
    row(
        "warmup_min_ratio",
        "WarmupCosineLR",
        {**COSINE, "warmup_min_ratio": 0.5},
        {1: RATE * 0.5, 6: RATE * 0.75},
    ),
    row("warmup_num_steps", "WarmupCosineLR", COSINE, {6: RATE / 2}),
    row(
        "cos_min_ratio",
        "WarmupCosineLR",
        {**COSINE, "cos_min_ratio": 0.25},
        {20: RATE * 0.25, 40: RATE * 0.25},
    ),
    row(
        "warmup_type",
        "WarmupCosineLR",
        {**COSINE, "warmup_type": "log"},
        {10: RATE},
    ),
]


@pytest.mark.claims(
    "scheduler.params{type=LRRangeTest}.lr_range_test_min_lr",
    "scheduler.params{type=LRRangeTest}.lr_range_test_staircase",
    "scheduler.params{type=LRRangeTest}.lr_range_test_step_rate",
    "scheduler.params{type=LRRangeTest}.lr_range_test_step_size",
    "scheduler.params{type=OneCycle}.cycle_first_stair_count",
    "scheduler.params{type=OneCycle}.cycle_first_step_size",
    "scheduler.params{type=OneCycle}.cycle_max_lr",
    "scheduler.params{type=OneCycle}.cycle_min_lr",
    "scheduler.params{type=OneCycle}.cycle_second_stair_count",
    "scheduler.params{type=OneCycle}.cycle_second_step_size",
    "scheduler.params{type=OneCycle}.decay_lr_rate",
    "scheduler.params{type=OneCycle}.decay_step_size",
    "scheduler.params{type=WarmupCosineLR}.cos_min_ratio",
    "scheduler.params{type=WarmupCosineLR}.total_num_steps",
    "scheduler.params{type=WarmupCosineLR}.warmup_min_ratio",
    "scheduler.params{type=WarmupCosineLR}.warmup_num_steps",
    "scheduler.params{type=WarmupCosineLR}.warmup_type",
    "scheduler.params{type=WarmupDecayLR}.total_num_steps",
    "scheduler.params{type=WarmupLR|WarmupDecayLR}.warmup_max_lr",
    "scheduler.params{type=WarmupLR|WarmupDecayLR}.warmup_min_lr",
    "scheduler.params{type=WarmupLR|WarmupDecayLR}.warmup_num_steps",
    "scheduler.params{type=WarmupLR|WarmupDecayLR}.warmup_type",
)
@pytest.mark.parametrize(("kind", "params", "points"), RATES)
def test_a_key_shapes_the_rates(kind, params, points):
    seen = played(kind, params)
    assert {n: seen[n][0][0] for n in points} == pytest.approx(points, rel=1e-9, abs=1e-12)


MOMENTA = [
    ("cycle_momentum", {}, {0: 0.8, 1: 0.89, 10: 0.8, 20: 0.9, 40: 0.9}),
    ("cycle_momentum", {"cycle_momentum": False}, {0: 0.9, 5: 0.9, 10: 0.9}),
    ("cycle_min_mom", {"cycle_min_mom": 0.5}, {0: 0.5, 5: 0.7, 10: 0.5}),
    ("cycle_max_mom", {"cycle_max_mom": 0.95}, {5: 0.875, 20: 0.95}),
    ("decay_mom_rate", {"decay_mom_rate": 0.1, "decay_step_size": 10}, {20: 0.9, 30: 0.99}),
]


@pytest.mark.claims(
    "scheduler.params{type=OneCycle}.cycle_momentum",
    "scheduler.params{type=OneCycle}.cycle_min_mom",
    "scheduler.params{type=OneCycle}.cycle_max_mom",
    "scheduler.params{type=OneCycle}.decay_mom_rate",
)
@pytest.mark.parametrize(
    ("changes", "points"),
    [pytest.param(changes, points, id=name) for name, changes, points in MOMENTA],
)
def test_a_key_shapes_the_momentum(changes, points):
    seen = played("OneCycle", {**CYCLE, **changes})
    assert {n: seen[n][0][1][0] for n in points} == pytest.approx(points, rel=1e-9)
    second = 0.999 if changes.get("cycle_momentum") is False else 0.99
    assert {betas[1] for step in seen for _, betas in step} == {second}


@pytest.mark.claims("scheduler.params{type=*}.last_batch_iteration")
@pytest.mark.parametrize(
    ("kind", "params"),
    [
        ("LRRangeTest", RANGE),
        ("OneCycle", CYCLE),
        ("WarmupLR", WARMUP),
        ("WarmupDecayLR", DECAY),
        ("WarmupCosineLR", COSINE),
    ],
)
def test_a_schedule_may_start_later(kind, params):
    whole = played(kind, params)
    late = played(kind, {**params, "last_batch_iteration": 6})
    assert late[: 41 - 7] == whole[7:]


@pytest.mark.claims("scheduler", "scheduler.type", "scheduler.params")
def test_the_type_chooses_and_the_params_shape():
    assert played("WarmupLR", WARMUP) != played("LRRangeTest", RANGE)
    assert played("WarmupLR", {})[40] == played("WarmupLR", None)[40]
    for wrong in ("warmuplr", "NoSuchLR"):
        with pytest.raises((ConfigError, OptimizerError)):
            played(wrong, {})


TORCH = [
    ("StepLR", {"step_size": 2, "gamma": 0.5}, {1: RATE, 2: RATE / 2, 5: RATE / 4}),
    ("MultiStepLR", {"milestones": [3, 5], "gamma": 0.5}, {2: RATE, 3: RATE / 2, 5: RATE / 4}),
    ("ConstantLR", {"factor": 0.5, "total_iters": 3}, {0: RATE / 2, 3: RATE}),
    ("LinearLR", {"start_factor": 0.5, "total_iters": 4}, {0: RATE / 2, 2: RATE * 0.75, 4: RATE}),
    ("ExponentialLR", {"gamma": 0.5}, {3: RATE / 8}),
    ("PolynomialLR", {"total_iters": 4, "power": 1.0}, {1: RATE * 0.75, 4: 0.0}),
    ("CosineAnnealingLR", {"T_max": 10}, {5: RATE / 2, 10: 0.0}),
    ("CosineAnnealingWarmRestarts", {"T_0": 10}, {5: RATE / 2, 10: RATE}),
    ("CyclicLR", {"base_lr": 1.0, "max_lr": 3.0, "step_size_up": 10}, {5: 2.0, 10: 3.0}),
    ("OneCycleLR", {"max_lr": 5.0, "total_steps": 50}, {0: 0.2, 14: 5.0}),
]


@pytest.mark.claims("scheduler.params{type=<torch.optim.lr_scheduler class>}.<keyword>")
@pytest.mark.parametrize(("kind", "params", "points"), TORCH, ids=[kind for kind, *_ in TORCH])
def test_any_scheduler_of_torch_takes_its_keywords(kind, params, points):
    seen = played(kind, params)
    assert {n: seen[n][0][0] for n in points} == pytest.approx(points, rel=1e-6, abs=1e-9)


LISTS = [
    ("LRRangeTest", {**RANGE, "lr_range_test_min_lr": [1.0, 2.0]}, {10: [2.0, 4.0]}),
    ("OneCycle", {**CYCLE, "cycle_max_lr": [3.0, 5.0]}, {10: [3.0, 5.0]}),
    ("WarmupLR", {**WARMUP, "warmup_max_lr": [1.0, 4.0]}, {11: [1.0, 4.0]}),
    ("WarmupDecayLR", {**DECAY, "warmup_min_lr": [0.0, 0.5]}, {21: [0.0, 0.5]}),
]


@pytest.mark.parametrize(("kind", "params", "points"), LISTS, ids=[kind for kind, *_ in LISTS])
def test_a_list_sets_a_value_per_group(kind, params, points):
    seen = played(kind, params, groups=2)
    assert {n: [rate for rate, _ in seen[n]] for n in points} == points
    with pytest.raises(OptimizerError, match="lists 2 values for 3 param groups"):
        played(kind, params, groups=3)


@pytest.mark.parametrize(
    ("kind", "params", "name"),
    [
        ("WarmupLR", {"warmup_num_steps": 10.0}, "warmup_num_steps"),
        ("WarmupLR", {"warmup_num_steps": -1}, "warmup_num_steps"),
        ("WarmupCosineLR", {**COSINE, "warmup_num_steps": 1e3}, "warmup_num_steps"),
        ("LRRangeTest", {"lr_range_test_step_size": 10.0}, "lr_range_test_step_size"),
        ("LRRangeTest", {"lr_range_test_step_size": True}, "lr_range_test_step_size"),
        ("OneCycle", {**CYCLE, "cycle_first_step_size": 0}, "cycle_first_step_size"),
        ("OneCycle", {**CYCLE, "cycle_second_step_size": -1}, "cycle_second_step_size"),
    ],
)
def test_invalid_counts_are_refused_with_their_path(kind, params, name):
    with pytest.raises(ConfigError) as caught:
        played(kind, params)
    (fault,) = caught.value.faults
    assert fault.path == f"scheduler.params.{name}"
    assert "expected an integer" in fault.message


def test_an_unknown_warm_up_warns_and_is_the_logarithm(caplog):
    params = {**WARMUP, "warmup_type": "exponential"}
    assert played("WarmupLR", params) == played("WarmupLR", {**WARMUP, "warmup_type": "log"})
    assert "warmup_type 'exponential' is unknown" in caplog.text
