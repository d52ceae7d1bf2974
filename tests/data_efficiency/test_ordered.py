"""An order of samples that no loader of the engine follows is logged once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from engine.toys import engine_of
from torch import nn

from data_efficiency.test_batching import Sequences, joined, section_of

RATE = {"type": "SGD", "params": {"lr": 0.001}}


def engine_without_data(**keys: Any) -> Any:
    return engine_of(0, nn.Linear(1, 1), {"collate_fn": joined}, optimizer=RATE, **keys)


def told(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [line for line in caplog.messages if "created no training loader" in line]


def test_training_without_the_loader_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    engine = engine_without_data(data_efficiency=section_of())
    for _ in range(2):
        engine.backward(engine(torch.ones(1, 1)).mean())
        engine.step()
    (line,) = told(caplog)
    assert "dynamic_batching is on" in line and "engine.deepspeed_io" in line
    engine.destroy()


def test_training_with_the_loader_is_not(caplog: pytest.LogCaptureFixture) -> None:
    engine = engine_without_data(data_efficiency=section_of())
    loader = engine.deepspeed_io(Sequences())
    engine.backward(engine(next(iter(loader))).mean())
    assert not told(caplog)
    engine.destroy()


def test_a_curriculum_without_the_loader_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    metric = {
        "difficulty_type": "value",
        "clustering_type": "single_cluster",
        "min_difficulty": 1,
        "max_difficulty": 2,
        "schedule_type": "fixed_linear",
        "schedule_config": {"total_curriculum_step": 5, "difficulty_step": 1},
    }
    section = {
        "data_sampling": {
            "curriculum_learning": {"enabled": True, "curriculum_metrics": {"length": metric}}
        }
    }
    engine = engine_without_data(data_efficiency=section)
    engine.backward(engine(torch.ones(1, 1)).mean())
    (line,) = told(caplog)
    assert "data_sampling.curriculum_learning is on" in line
    engine.destroy()
