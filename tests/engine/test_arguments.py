"""The arguments that scripts share, and the one configuration among several."""

from __future__ import annotations

import argparse
from types import SimpleNamespace

import pytest
import torch

import hadal
from hadal.config import load_config
from hadal.config.scheduler import PARAMS
from hadal.engine.arguments import add_config_arguments, choose_config, with_schedule
from hadal.errors import UsageError
from hadal.optim.schedules import build_schedule


def test_scripts_get_deepspeeds_arguments():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int)
    assert add_config_arguments(parser) is parser
    line = ["--deepspeed", "--deepspeed_config", "ds.json", "--epochs", "3"]
    args = parser.parse_args(line)
    assert (args.deepspeed, args.deepspeed_config, args.epochs) == (True, "ds.json", 3)
    args = parser.parse_args([])
    assert (args.deepspeed, args.deepspeed_config) == (False, None)
    assert (args.deepscale, args.deepscale_config) == (False, None)
    assert parser.parse_args(["--deepscale"]).deepscale
    assert choose_config(parser.parse_args(line), None, None) == "ds.json"


def test_each_place_of_a_configuration_is_looked_at():
    here = {"train_batch_size": 1}
    assert choose_config(None, here, None) is here
    assert choose_config(None, None, here) is here
    assert choose_config(SimpleNamespace(deepspeed_config="a"), None, None) == "a"
    assert choose_config(SimpleNamespace(deepscale_config="b"), None, None) == "b"
    assert choose_config(SimpleNamespace(other=1), here, None) is here


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ((None, None, None), "no configuration"),
        ((SimpleNamespace(deepspeed_config=None), None, None), "no configuration"),
        ((torch.nn.Linear(1, 1), None, None), r"got a Linear as args.*by name: initialize\(model="),
        ((None, {}, "x"), "2 times: config=, config_params="),
        ((SimpleNamespace(deepspeed_config="a"), "x", None), r"2 times.*args\.deepspeed_config"),
    ],
)
def test_one_configuration_is_wanted(arguments, told):
    with pytest.raises(UsageError, match=told):
        choose_config(*arguments)


# ---- tuning arguments -------------------------------------------------------------------------


def parsed(line: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    assert hadal.add_tuning_arguments(parser) is parser
    return parser.parse_args(line.split())


# DeepSpeed's names and defaults.
DEFAULTS = {
    "lr_schedule": None,
    "lr_range_test_min_lr": 0.001,
    "lr_range_test_step_rate": 1.0,
    "lr_range_test_step_size": 1000,
    "lr_range_test_staircase": False,
    "cycle_first_step_size": 1000,
    "cycle_first_stair_count": -1,
    "cycle_second_step_size": -1,
    "cycle_second_stair_count": -1,
    "decay_step_size": 1000,
    "cycle_min_lr": 0.01,
    "cycle_max_lr": 0.1,
    "decay_lr_rate": 0.0,
    "cycle_momentum": False,
    "cycle_min_mom": 0.8,
    "cycle_max_mom": 0.9,
    "decay_mom_rate": 0.0,
    "warmup_min_lr": 0,
    "warmup_max_lr": 0.001,
    "warmup_num_steps": 1000,
    "warmup_type": "log",
    "warmup_min_ratio": 0.01,
    "cos_min_ratio": 0.01,
    "total_num_steps": None,
}


def test_the_tuning_arguments_are_deepspeeds():
    assert vars(parsed("")) == DEFAULTS


@pytest.mark.parametrize(
    ("line", "params"),
    [
        (
            "--lr_schedule LRRangeTest --lr_range_test_min_lr 1e-4",
            {
                "lr_range_test_min_lr": 1e-4,
                "lr_range_test_step_size": 1000,
                "lr_range_test_step_rate": 1.0,
                "lr_range_test_staircase": False,
            },
        ),
        (
            "--lr_schedule OneCycle --cycle_max_lr 1 --cycle_second_step_size 7 --cycle_momentum",
            {
                "cycle_min_lr": 0.01,
                "cycle_max_lr": 1.0,
                "decay_lr_rate": 0.0,
                "cycle_first_step_size": 1000,
                "cycle_second_step_size": 7,
                "decay_step_size": 1000,
                "cycle_momentum": True,
                "cycle_min_mom": 0.8,
                "cycle_max_mom": 0.9,
                "decay_mom_rate": 0.0,
            },
        ),
        (
            "--lr_schedule WarmupCosineLR --total_num_steps 9",
            {
                "total_num_steps": 9,
                "warmup_min_ratio": 0.01,
                "warmup_num_steps": 1000,
                "cos_min_ratio": 0.01,
                "warmup_type": "log",
            },
        ),
    ],
)
def test_tuning_arguments_make_a_section(line, params):
    section = hadal.schedule_from_args(parsed(line))
    assert section == {"type": line.split()[1], "params": params}
    config = load_config({"train_batch_size": 1, "scheduler": section})
    assert config.scheduler.params == params


@pytest.mark.parametrize("name", PARAMS)
def test_every_native_schedule_can_be_named(name):
    section = hadal.schedule_from_args(parsed(f"--lr_schedule {name} --total_num_steps 5000"))
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.ones(1))])
    assert type(build_schedule(section["type"], section["params"], optimizer)).__name__ == name


@pytest.mark.parametrize(("text", "value"), [("", True), ("true", True), ("False", False)])
def test_a_switch_is_applied(text, value):
    """`type=bool` would take the word False as true."""
    assert parsed(f"--lr_range_test_staircase {text}").lr_range_test_staircase is value


def test_an_empty_switch_is_refused(capsys):
    with pytest.raises(SystemExit):
        parsed("--cycle_momentum maybe")
    assert "expected true or false" in capsys.readouterr().err


def test_no_schedule_leaves_the_configuration_alone():
    source = {"train_batch_size": 1}
    assert hadal.schedule_from_args(None) is None
    for args in (None, parsed(""), SimpleNamespace(lr_schedule="cosine")):  # a script's own word
        assert with_schedule(args, source, False) is source
    with pytest.raises(UsageError, match="--lr_schedule is 'cosine'; expected one of 'LRRangeTest"):
        hadal.schedule_from_args(SimpleNamespace(lr_schedule="cosine"))


def test_a_schedule_is_named_once():
    args = parsed("--lr_schedule WarmupLR")
    section = hadal.schedule_from_args(args)
    source = {"train_batch_size": 1}
    assert with_schedule(args, source, False) == {**source, "scheduler": section}
    assert source == {"train_batch_size": 1}
    with pytest.raises(UsageError, match="twice, by --lr_schedule WarmupLR and by the config"):
        with_schedule(args, {**source, "scheduler": {"type": "StepLR"}}, False)
    with pytest.raises(UsageError, match=r"and by initialize\(lr_scheduler"):
        with_schedule(args, source, True)
