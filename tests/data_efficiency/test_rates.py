"""Learning rates that follow the batch: around torch's schedules, ours, and none."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from hadal.optim.schedules import WarmupLR
from hadal.plugins.data_efficiency.batching import ScaledRates


def made(kind: str, rate: Any = 0.1) -> tuple[torch.optim.Optimizer, ScaledRates]:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=rate)
    schedule = {
        "none": lambda: None,
        "torch": lambda: torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5),
        "ours": lambda: WarmupLR(optimizer, 0.0, 0.1, 4, "linear"),
    }[kind]()
    return optimizer, ScaledRates(optimizer, schedule)


PLAIN = {"none": [0.1] * 4, "torch": [0.1, 0.05, 0.025, 0.0125], "ours": [0, 0, 0.025, 0.05]}


@pytest.mark.parametrize("kind", PLAIN)
def test_the_schedule_sees_its_own_rates(kind: str) -> None:
    optimizer, rates = made(kind)
    found = []
    for factor in (2.0, 0.5, 3.0, 1.0):
        rates.scale(factor)
        found.append(optimizer.param_groups[0]["lr"] / factor)
        optimizer.step()
        rates.step()
    assert found == pytest.approx(PLAIN[kind])
    state = rates.state_dict()
    optimizer, other = made(kind)
    other.load_state_dict(state)
    assert other.get_last_lr() == rates.get_last_lr()
    optimizer.step()
    rates.step()
    other.step()
    assert other.plain == rates.plain


def test_a_rate_in_a_tensor_stays_in_it_and_new_groups_count() -> None:
    rate = torch.tensor(0.5)
    optimizer, rates = made("none", rate)
    optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(1))], "lr": 1.0})
    rates.scale(0.5)
    assert optimizer.param_groups[0]["lr"] is rate
    assert rates.get_last_lr() == [0.25, 0.5]


def test_a_state_without_the_factor_is_loaded_too() -> None:
    optimizer, rates = made("torch")
    for _ in range(2):
        optimizer.step()
        rates.step()
    inner = rates.schedule.state_dict()
    optimizer, other = made("torch")
    optimizer.param_groups[0]["lr"] = 0.025
    other.load_state_dict(inner)
    assert other.plain == [0.025]
    assert other.last_epoch == 2  # looked up in the schedule
