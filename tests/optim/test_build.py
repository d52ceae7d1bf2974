"""Construction of the optimizer that a section names."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from hadal.errors import OptimizerError
from hadal.optim.build import build_optimizer, kind_of, refuse_unusable


def parameters() -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(2, 3))]


@pytest.mark.parametrize(
    ("kind", "params", "made"),
    [
        ("Adam", {}, torch.optim.AdamW),
        ("Adam", {"adam_w_mode": True}, torch.optim.AdamW),
        ("Adam", {"adam_w_mode": False}, torch.optim.Adam),
        ("AdamW", {}, torch.optim.AdamW),
        ("AdamW", {"adam_w_mode": False}, torch.optim.AdamW),
        ("SGD", {"momentum": 0.9}, torch.optim.SGD),
        ("Adafactor", {}, torch.optim.Adafactor),
        ("RAdam", {}, torch.optim.RAdam),
    ],
)
def test_names(kind, params, made):
    assert type(build_optimizer(kind, {"lr": 0.5, **params}, parameters())) is made


def test_adam_has_no_decay_by_default():
    (group,) = build_optimizer("AdamW", {"betas": [0.8, 0.95]}, parameters()).param_groups
    assert group["weight_decay"] == 0.0
    assert group["betas"] == (0.8, 0.95)
    (group,) = build_optimizer("Adam", {"weight_decay": 0.25}, parameters()).param_groups
    assert group["weight_decay"] == 0.25
    (group,) = build_optimizer("AdamW", {"torch_adam": True}, parameters()).param_groups
    assert group["weight_decay"] == torch.optim.AdamW(parameters()).defaults["weight_decay"]


def test_switches_of_other_implementations_are_not_arguments():
    params = {"torch_adam": True, "bias_correction": True, "set_grad_none": True}
    assert type(build_optimizer("AdamW", params, parameters())) is torch.optim.AdamW


def test_the_callers_groups_are_kept():
    groups = [
        {"params": parameters(), "lr": 0.1, "weight_decay": 0.5, "name": "a"},
        {"params": parameters()},
    ]
    optimizer = build_optimizer("AdamW", {"lr": 0.2}, groups)
    assert [group["lr"] for group in optimizer.param_groups] == [0.1, 0.2]
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.5, 0.0]
    assert optimizer.param_groups[0]["name"] == "a"


@pytest.mark.parametrize(
    ("kind", "params", "told"),
    [
        ("AdamWW", {}, "'AdamWW'.*did you mean 'AdamW'"),
        ("RMSPropp", {}, "did you mean 'RMSprop'"),
        ("Zzz", {}, "'Zzz'"),
        ("Optimizer", {}, "'Optimizer'"),
        ("lr_scheduler", {}, "'lr_scheduler'"),
        ("LBFGS", {}, "LBFGS.*several times"),
        ("SparseAdam", {}, "SparseAdam.*sparse"),
        ("AdamW", {"bettas": [0.9, 0.99]}, "bettas"),
        ("SGD", {"lr": 0.1, "eps": 1e-8}, "SGD.*eps"),
    ],
)
def test_invalid_types_and_params_are_refused(kind, params, told):
    with pytest.raises(OptimizerError, match=told):
        build_optimizer(kind, params, parameters())


class OwnLBFGS(torch.optim.LBFGS):
    pass


class OwnAdamW(torch.optim.AdamW):
    pass


def test_subclasses_inherit_the_refusal_but_not_the_trust():
    with pytest.raises(OptimizerError, match="OwnLBFGS"):
        refuse_unusable(OwnLBFGS)
    refuse_unusable(OwnAdamW)
    assert kind_of(torch.optim.AdamW(parameters())).is_elementwise
    assert not kind_of(OwnAdamW(parameters())).is_elementwise
    assert not kind_of(torch.optim.Adafactor(parameters())).is_elementwise
    assert not kind_of(torch.optim.Muon(parameters())).is_elementwise
