"""The arguments that scripts share, and the one configuration among several."""

from __future__ import annotations

import argparse
from types import SimpleNamespace

import pytest

from hadal.engine.arguments import add_config_arguments, choose_config
from hadal.errors import UsageError


def test_scripts_get_deepspeeds_arguments():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int)
    assert add_config_arguments(parser) is parser
    line = ["--deepspeed", "--deepspeed_config", "ds.json", "--epochs", "3"]
    args = parser.parse_args(line)
    assert (args.deepspeed, args.deepspeed_config, args.epochs) == (True, "ds.json", 3)
    args = parser.parse_args([])
    assert (args.deepspeed, args.deepspeed_config) == (False, None)
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
        ((None, {}, "x"), "2 times: config=, config_params="),
        ((SimpleNamespace(deepspeed_config="a"), "x", None), r"2 times.*args\.deepspeed_config"),
    ],
)
def test_one_configuration_is_wanted(arguments, told):
    with pytest.raises(UsageError, match=told):
        choose_config(*arguments)
