"""Parameters stay the objects they are where torch does not assign across devices."""

from __future__ import annotations

import weakref

import torch
from ranks import RankPools
from torch import nn

from hadal.device import look_at, widest_float


def _looked(device: str) -> list[str]:
    parameter = nn.Parameter(torch.arange(4.0), requires_grad=True)
    parameter.mark = "kept"
    known = weakref.ref(parameter)
    module = nn.Module()
    module.weight = parameter
    told: list[str] = []
    parameter.register_hook(lambda gradient: told.append("hook"))
    parameter.register_post_accumulate_grad_hook(lambda one: told.append("later hook"))
    target = torch.full((8,), 5.0, device=device)
    look_at(parameter, target[2:6])
    assert module.weight is parameter is known() and isinstance(parameter, nn.Parameter)
    assert parameter.mark == "kept" and parameter.requires_grad and parameter.is_leaf
    assert parameter.device == target.device
    parameter.sum().backward()
    assert parameter.grad is not None and parameter.grad.tolist() == [1.0] * 4
    target.fill_(6)
    assert (parameter == 6).all()
    look_at(parameter, torch.zeros(3, 2))
    assert parameter.device.type == "cpu" and parameter.shape == (3, 2)
    frozen = nn.Parameter(torch.zeros(2), requires_grad=False)
    look_at(frozen, target)
    assert not frozen.requires_grad and frozen.device == target.device
    return told


def test_a_parameter_looks_at_another_device(npus: RankPools, ranks: RankPools) -> None:
    assert npus(1).run(_looked, "npu") == ranks(1).run(_looked, "cpu") == [["hook", "later hook"]]


def _widest() -> torch.dtype:
    return widest_float(torch.device("npu", 0))


def test_sums_use_the_widest_dtype_of_a_device(npus: RankPools) -> None:
    assert npus(1).run(_widest) == [torch.float32]
    assert widest_float(torch.device("cpu")) == torch.float64
