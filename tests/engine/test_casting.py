"""Casts around a forward: values that are cast, passed on, or keep their type."""

from __future__ import annotations

from collections import OrderedDict, UserDict
from typing import NamedTuple

import pytest
import torch
from torch import nn

from hadal.engine.precision import Casting, cast_floats

CPU = torch.device("cpu")


class Pair(NamedTuple):
    left: torch.Tensor
    right: torch.Tensor


class Output(OrderedDict):
    """A mapping whose entries are attributes too, like Hugging Face's outputs."""

    def __setitem__(self, key, value):
        super().__setitem__(key, value)
        super().__setattr__(key, value)


def test_floats_are_cast_in_every_container_and_nothing_else():
    whole, floats = torch.arange(3), torch.ones(2)
    value = {
        "list": [floats, whole, "text", None],
        "tuple": (floats.double(), [floats]),
        "named": Pair(floats, whole),
        "flag": torch.tensor([True]),
    }
    cast = cast_floats(value, torch.float16)
    assert [getattr(item, "dtype", item) for item in cast["list"]] == [
        *(torch.float16, torch.int64, "text", None)
    ]
    assert cast["list"][1] is whole
    assert cast["tuple"][0].dtype == cast["tuple"][1][0].dtype == torch.float16
    assert type(cast["named"]) is Pair
    assert cast["named"].left.dtype == torch.float16
    assert cast["flag"].dtype == torch.bool
    assert value["list"][0].dtype == torch.float32  # the caller's own stays


@pytest.mark.parametrize("kind", [Output, UserDict, dict])
def test_a_mapping_keeps_its_type(kind):
    value = kind()
    value["logits"] = torch.ones(2)
    cast = cast_floats(value, torch.bfloat16)
    assert type(cast) is kind
    assert cast["logits"].dtype == torch.bfloat16
    assert value["logits"].dtype == torch.float32
    if kind is Output:
        assert cast.logits is cast["logits"]


def test_values_that_need_no_cast_are_passed_unchanged():
    value = {"ids": [torch.arange(3)], "half": (torch.ones(2).half(),)}
    assert cast_floats(value, torch.float16) is value


def test_casts_reach_gradients():
    leaf = torch.ones(2, requires_grad=True)
    (cast,) = cast_floats((leaf,), torch.float16)
    cast.sum().backward()
    assert leaf.grad.dtype == torch.float32


def test_nothing_is_done_where_nothing_is_asked():
    seen = []
    module = nn.Identity()
    module.register_forward_hook(lambda *_: seen.append(torch.is_autocast_enabled("cpu")))
    inputs = torch.ones(2)
    assert Casting().run(module, CPU, (inputs,), {}) is inputs
    assert seen == [False]


def test_autocast_overrides_the_callers_and_keeps_no_stale_weights():
    layer = nn.Linear(2, 2, bias=False)
    nn.init.constant_(layer.weight, 0.5)  # exact in bfloat16, and so is what is added below
    casting = Casting(autocast=torch.bfloat16)
    inputs = torch.ones(1, 2)
    with torch.autocast("cpu", dtype=torch.float16):
        assert layer(inputs).dtype == torch.float16
        first = casting.run(layer, CPU, (inputs,), {})
        with torch.no_grad():
            layer.weight.add_(1)
        second = casting.run(layer, CPU, (inputs,), {})
        assert torch.get_autocast_dtype("cpu") == torch.float16
    assert first.dtype == torch.bfloat16
    assert (second - first).tolist() == [[2.0, 2.0]]
