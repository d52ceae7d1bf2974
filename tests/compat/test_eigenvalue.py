"""The class Eigenvalue of DeepSpeed's programs."""

from __future__ import annotations

import logging

import pytest
import torch
from compression.test_curvature import GOLDEN, Net, inputs

from hadal.compat.efficiency import Eigenvalue
from hadal.errors import UsageError


@pytest.mark.filterwarnings("ignore:Using backward")
def test_values_are_those_of_deepspeed(caplog: pytest.LogCaptureFixture) -> None:
    model = Net()
    model(inputs()).backward(create_graph=True)
    torch.manual_seed(0)
    made = Eigenvalue(verbose=True, layer_name="layer", layer_num=2)
    with caplog.at_level(logging.INFO, "hadal.compat.efficiency"):
        found = made.compute_eigenvalue(model)
    assert "block 1: eigenvalue" in caplog.text
    assert isinstance(found, dict)
    assert list(found) == [id(parameter) for parameter in model.parameters()]
    for value, block in found.values():
        assert value == pytest.approx(GOLDEN["values"][block][0], abs=1e-4)
    assert [block for _, block in found.values()] == [0, 0, 1, 1]
    for parameter in model.parameters():
        parameter.grad = None  # the graph leads back to them


def test_gradients_without_a_graph_give_nothing() -> None:
    model = Net()
    model(inputs()).backward()
    assert Eigenvalue(layer_name="layer", layer_num=2).compute_eigenvalue(model) == []


def test_methods() -> None:
    made = Eigenvalue(layer_name="layer", layer_num=1)
    assert made.post_process([0.5, -1.0, 0.0]) == [0.5, 1.0, 1.0]
    assert made.get_layers(Net()) != []
    parts = [torch.tensor([3.0]), torch.tensor([4.0])]
    assert made.inner_product(parts, parts) == 25
    assert [float(part) for part in made.normalize(parts)] == pytest.approx([0.6, 0.8])
    assert made.nan_to_num(torch.tensor([torch.nan, torch.inf, 1.0])).tolist() == [0, 0, 1]


@pytest.mark.parametrize("keys", [{"layer_num": 1}, {"layer_name": "layer"}])
def test_the_blocks_must_be_named(keys: dict[str, object]) -> None:
    with pytest.raises(UsageError, match="expected layer_name and layer_num > 0"):
        Eigenvalue(**keys)
