"""What is checked before an engine is made (what users see of it: contracts/test_bad_input.py)."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import hadal
from hadal.config import load_config
from hadal.engine.checks import check_groups, check_scheduler
from hadal.errors import ConfigError, OptimizerError


def test_parameters_of_another_model_are_refused():
    mine, other = nn.Linear(2, 3), nn.Linear(2, 5)
    optimizer = torch.optim.SGD(
        [{"params": list(mine.parameters())}, {"params": list(other.parameters())}], lr=0.1
    )
    with pytest.raises(OptimizerError, match=r"rank 2: parameter 0 of param group 1 \(\(5, 2\)"):
        check_groups(optimizer, list(mine.parameters()), 2)
    check_groups(optimizer, [*mine.parameters(), *other.parameters()], 2)


ELASTIC = {"enabled": True, "max_train_batch_size": 20, "micro_batch_sizes": [2], "version": 0.1}


@pytest.mark.parametrize(
    ("told", "message"),
    [
        ('{"max_train_batch_size": 30, "micro_batch_sizes": [2], "version": 0.1}', "20, but .* 30"),
        ('{"max_train_batch_size": 20, "micro_batch_sizes": [4], "version": 0.1}', r"\[2\], but"),
        ('{"max_train_batch_size": 20, "micro_batch_sizes": [2], "version": 0.2}', "0.1, but"),
        ('{"max_train_batch_size": 20}', "DEEPSPEED_ELASTICITY_CONFIG must hold"),
        ("nothing", "DEEPSPEED_ELASTICITY_CONFIG must hold"),
    ],
)
def test_a_scheduler_that_counts_on_another_batch_is_told(told, message):
    with pytest.raises(ConfigError, match=message):
        check_scheduler(load_config({"elasticity": ELASTIC}), told)


def test_a_scheduler_that_counts_on_the_same_batch_is_content():
    told = '{"max_train_batch_size": 20, "micro_batch_sizes": [2], "version": 0.1, "min_gpus": 9}'
    check_scheduler(load_config({"elasticity": ELASTIC}), told)
    check_scheduler(load_config({"elasticity": ELASTIC}), None)
    check_scheduler(load_config({"train_batch_size": 1}), "nothing")


def test_the_scheduler_is_heard_at_the_start(monkeypatch):
    monkeypatch.setenv("DEEPSPEED_ELASTICITY_CONFIG", '{"max_train_batch_size": 30}')
    model = nn.Linear(2, 1)
    with pytest.raises(ConfigError, match="DEEPSPEED_ELASTICITY_CONFIG"):
        hadal.initialize(
            model=model,
            model_parameters=model.parameters(),
            config={"elasticity": ELASTIC, "optimizer": {"type": "Adam", "params": {"lr": 0.1}}},
        )
