"""Rules of presets, of transformers' plans and of the configuration: as DeepSpeed has them."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from hadal.config import load_config
from hadal.errors import ConfigError, ModelError
from hadal.plugins.tensor_parallel.rules import (
    COLUMN,
    PRESETS,
    ROW,
    LayerRule,
    find_rules,
    plan_of,
    preset,
    row_layers,
    rules_of_plan,
)
from tensor_parallel.models import model_of

# What DeepSpeed 0.19.8 has: presets, and what it finds in models of transformers.
GOLDEN: dict[str, Any] = json.loads(
    (Path(__file__).parents[1] / "data/tensor_parallel.json").read_text()
)


@pytest.mark.parametrize("name", GOLDEN["presets"])
def test_a_preset_has_these_rules(name: str) -> None:
    assert set(PRESETS) == set(GOLDEN["presets"])
    told = [
        {
            "pattern": list(rule.patterns),
            "type": rule.partition_type.value,
            "shape": None if rule.shape is None else list(rule.shape),
            "dim": rule.partition_dim,
        }
        for rule in preset(name)
    ]
    assert told == GOLDEN["presets"][name]


@pytest.mark.parametrize("plan", GOLDEN["tp_plan"])
def test_a_plan_becomes_these_rules(plan: str) -> None:
    expected = GOLDEN["tp_plan"][plan]
    if isinstance(expected, str):
        with pytest.raises(ModelError) as caught:
            rules_of_plan(json.loads(plan))
        assert expected.partition(": ")[2] in str(caught.value)
        return
    rules = rules_of_plan(json.loads(plan))
    told = rules and [
        [*rule.patterns, rule.partition_type.value, rule.gather_output, rule.grad_allreduce]
        for rule in rules
    ]
    assert told == expected


@pytest.mark.skipif(find_spec("transformers") is None, reason="transformers is not installed")
@pytest.mark.parametrize("kind", GOLDEN["heuristic_row_parallel"])
def test_models_have_these_plans_and_rows(kind: str) -> None:
    rows, found = GOLDEN["heuristic_row_parallel"][kind]
    model = model_of(kind)
    plan = found["hf_plan"] or {}
    # Releases of transformers also list layers under their full names, after these.
    assert list(plan_of(model).items())[: len(plan)] == list(plan.items())
    if isinstance(rows, str):
        with pytest.raises(ModelError, match="'gpt2' cannot be cut without rules"):
            row_layers(model)
    else:
        assert row_layers(model) == dict(rows)


def test_patterns_match_from_the_start_of_a_name() -> None:
    rule = LayerRule((r"layers\.0",))
    assert rule.matches("layers.0.q_proj.weight")
    assert not rule.matches("model.layers.0.q_proj.weight")
    typed = LayerRule((".*",), model_types=("Llama",))
    assert typed.matches("x", "llama")
    assert not typed.matches("x", "qwen2")
    assert not typed.matches("x", None)


def test_the_first_match_applies_and_contradictions_are_logged() -> None:
    first, same, other = LayerRule(("a",), ROW), LayerRule(("a.*",), ROW), LayerRule((".*",))
    assert find_rules([first, same, other], "ab", None) == (first, [other])
    assert find_rules([first], "b", None) == (None, [])


def test_a_rule_of_the_configuration_is_checked_with_its_path() -> None:
    spec: dict[str, Any] = {"patterns": ["a"], "shape": [[16, 4, 4], -1], "partition_dim": 0}
    keys = {"autotp_size": 2, "partition_config": {"layer_specs": [spec]}}
    config = {"train_batch_size": 2, "tensor_parallel": keys}
    section = load_config(config, world_size=2, allow_unbuilt=True).tensor_parallel
    assert section.partition_config is not None
    rule = LayerRule.of(section.partition_config.layer_specs[0], "here")
    assert (rule.shape, rule.partition_type, rule.dim) == (((16, 4, 4), -1), COLUMN, 0)
    for shape in ([3, [4, 4]], [0, -1]):
        spec["shape"] = shape
        with pytest.raises(ConfigError, match=r"partition_config\.layer_specs\[0\]\.shape"):
            load_config(config, world_size=2, allow_unbuilt=True)
