"""Checks before an engine is created (for users' messages: contracts/test_bad_input.py)."""

from __future__ import annotations

from unittest.mock import patch

import pytest
import torch
from ranks import RankPools
from torch import nn

import hadal
from engine.logs import logged
from engine.toys import engine_of
from hadal import comm
from hadal.config import load_config
from hadal.engine.checks import check_groups, check_model, check_scheduler, warn_untrained
from hadal.errors import ConfigError, MismatchError, OptimizerError, UsageError


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
def test_a_scheduler_that_expects_another_batch_is_refused(told, message):
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


class Tiny(nn.Linear):
    """A model of one layer, with the size that it always has."""

    def __init__(self) -> None:
        super().__init__(2, 2)


@pytest.mark.parametrize(
    ("model", "told"),
    [
        (Tiny, r"got the class Tiny \(did you mean Tiny\(\)\?\)"),
        (dict, "got the class dict$"),
        (None, "got NoneType$"),
        ({}, "got dict$"),
    ],
)
def test_objects_that_are_not_modules_are_refused(model, told):
    with pytest.raises(UsageError, match=f"model must be a torch.nn.Module instance, {told}"):
        check_model(model)


def told_of(model, groups, *, is_chosen=True):
    with logged() as messages:
        warn_untrained(model, groups, is_chosen=is_chosen)
    return messages


def test_parameters_in_no_group_are_reported_in_one_line():
    model = nn.Sequential(Tiny(), Tiny())
    assert told_of(model, [list(model.parameters())]) == []
    (message,) = told_of(model, [[model[0].weight]])
    assert message.startswith("3 of 4 parameters that require gradients are in no param group")
    assert "0.bias, 1.weight, 1.bias" in message
    model[1].requires_grad_(False)
    model[0].bias.requires_grad_(False)
    assert told_of(model, [[model[0].weight]]) == []


def test_a_frozen_model_with_an_optimizer_is_reported():
    model = Tiny().requires_grad_(False)
    (message,) = told_of(model, [[]])
    assert message.startswith("there is nothing to train: an optimizer is named, but all 2")
    assert told_of(model, [], is_chosen=False) == []
    assert told_of(model.eval(), [[]]) == []


def test_a_model_without_an_optimizer_is_reported_unless_it_is_evaluated():
    model = Tiny()
    everything = [list(model.parameters())]
    (message,) = told_of(model, everything, is_chosen=False)
    assert "initialize returns None" in message
    assert told_of(model.eval(), everything, is_chosen=False) == []


def train_with_another_version(package: str) -> None:
    version = "9.9" if comm.get_rank() else "1.0"
    with patch(f"{package}.__version__", version):
        engine_of(0, nn.Linear(2, 1))


@pytest.mark.parametrize("package", ["hadal", "torch"])
def test_ranks_with_different_versions_are_refused(package: str, ranks: RankPools) -> None:
    told = f"different versions: {package} is 1.0 on rank 0 and 9.9 on rank 1. Use the same version"
    for error in ranks(2).raises(train_with_another_version, package):
        assert isinstance(error, MismatchError) and told in str(error), repr(error)
