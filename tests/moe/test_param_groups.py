"""Param groups in which experts are apart."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hadal.plugins.moe import MoE, is_moe_param_group
from hadal.plugins.moe.experts import (
    configure_moe_param_groups,
    split_params_grads_into_shared_and_expert_params,
    split_params_into_different_moe_groups_for_optimizer,
    split_params_into_shared_and_expert_params,
)

GIVEN = json.loads((Path(__file__).parents[1] / "data/experts.json").read_text())["split"]


def parameters() -> list[nn.Parameter]:
    layer = MoE(4, nn.Linear(4, 4, bias=False), num_experts=4, use_residual=True)
    return list(layer.parameters())


def told(groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The groups as the data has them."""
    return [
        {
            **{key: value for key, value in group.items() if key != "params"},
            "numel": [p.numel() for p in group["params"]],
        }
        for group in groups
    ]


def test_groups_are_deepspeed_s() -> None:
    split = split_params_into_different_moe_groups_for_optimizer
    given = {"params": parameters(), "lr": 0.1, "name": "p"}
    assert [dict(sorted(one.items())) for one in told(split(given))] == [
        dict(sorted(one.items())) for one in by_size(GIVEN["whole"], given["params"])
    ]
    assert len(given["params"]) == 8  # as it was
    cut = split({"params": parameters(), "name": "p"}, max_group_size=40)
    assert [len(one["params"]) for one in cut] == [len(one["numel"]) for one in GIVEN["at most 40"]]
    assert [is_moe_param_group(one) for one in cut] == [False, True, True]
    assert told(configure_moe_param_groups(parameters())) == by_size(GIVEN["list"], parameters())


def by_size(groups: list[dict[str, Any]], params: Any) -> list[dict[str, Any]]:
    assert sorted(n for one in groups for n in one["numel"]) == sorted(p.numel() for p in params)
    return groups


def test_several_groups_and_groups_without_a_name() -> None:
    layer = MoE(4, nn.Linear(4, 4), num_experts=2)
    experts = list(layer.deepspeed_moe.experts.parameters())
    gate = list(layer.deepspeed_moe.gate.parameters())
    found = split_params_into_different_moe_groups_for_optimizer(
        [{"params": gate, "lr": 1.0}, {"params": experts, "lr": 2.0}]
    )
    assert [(len(one["params"]), one["lr"], one.get("name")) for one in found] == [
        (1, 1.0, None),
        (4, 2.0, "ep_size_1"),
    ]
    assert configure_moe_param_groups([{"params": [*gate, *experts]}])[1]["moe"] is True


def test_parameters_and_gradients_are_distinguished() -> None:
    layer = MoE(4, nn.Linear(4, 4), num_experts=2)
    shared, experts = split_params_into_shared_and_expert_params(layer.parameters())
    assert (len(shared), len(experts)) == (1, 4)
    for parameter in layer.parameters():
        parameter.grad = torch.ones_like(parameter)
    grads = split_params_grads_into_shared_and_expert_params(list(layer.parameters()))
    assert [len(some) for some in grads] == [1, 4]
