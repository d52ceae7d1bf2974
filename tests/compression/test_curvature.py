"""Power iteration: DeepSpeed's values, and the exact Hessian's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hadal.errors import UsageError
from hadal.plugins.compression.training import (
    PowerIteration,
    blocks_of,
    dominant_eigenvalue,
    relative,
    slowdown_of,
)

GOLDEN = json.loads((Path(__file__).parents[1] / "data/eigenvalues.json").read_text())


class Net(nn.Module):
    """Blocks of a linear layer and tanh; the loss is the sum of the squares."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.ModuleList(nn.Linear(3, 3) for _ in GOLDEN["weights"])
        with torch.no_grad():
            for layer, weight in zip(self.layer, GOLDEN["weights"], strict=True):
                layer.weight.copy_(torch.tensor(weight))
                layer.bias.zero_()

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layer:
            x = layer(x).tanh()
        return x.square().sum()


def inputs() -> Tensor:
    return torch.tensor(GOLDEN["input"])


def values_of(model: Net, rule: PowerIteration) -> list[float]:
    loss = model(inputs())
    found = []
    for layer in model.layer:
        own = list(layer.parameters())
        gradients = torch.autograd.grad(loss, own, create_graph=True)
        found.append(dominant_eigenvalue(own, gradients, rule))
    return found


def test_values_are_those_of_deepspeed() -> None:
    model = Net()
    torch.manual_seed(0)
    found = relative(values_of(model, PowerIteration()))
    assert found == pytest.approx([value for value, _ in GOLDEN["values"]], abs=1e-4)


def test_values_approach_the_exact_hessian() -> None:
    model = Net()
    before = torch.random.get_rng_state()
    found = values_of(model, PowerIteration(tolerance=1e-6))
    assert [abs(value) for value in found] == pytest.approx(GOLDEN["exact_dominant"], rel=2e-2)
    assert torch.equal(torch.random.get_rng_state(), before)


def test_relative_values() -> None:
    assert relative([1.0, -2.0, 0.0]) == [0.5, 1.0, 1.0]
    assert relative([-1.0]) == [1.0]
    assert relative([]) == []


def test_a_large_value_slows_down() -> None:
    values = [0.0, 0.24, 0.25, 0.7026, 1.0, float("nan"), None]
    assert [slowdown_of(value) for value in values] == [1, 1, 2, 3, 5, 5, 1]


def test_a_linear_loss_has_no_curvature() -> None:
    weight = torch.ones(3, requires_grad=True)
    (gradient,) = torch.autograd.grad((weight * 2 + 0 * weight**2).sum(), weight, create_graph=True)
    assert dominant_eigenvalue([weight], [gradient], PowerIteration()) == 0.0


@pytest.mark.parametrize(
    ("name", "count", "message"),
    [
        (
            "bert.layer",
            1,
            "layer_name: Net has no list of blocks 'bert.layer'; its lists are layer",
        ),
        ("layer", 3, "layer_num: expected 1 to 2, the blocks of layer, got 3"),
    ],
)
def test_blocks_that_are_not_there(name: str, count: int, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        blocks_of(Net(), name, count)


def configured(**keys: Any) -> dict[str, Any]:
    return {"enabled": True, "layer_name": "layer", "layer_num": 2, **keys}
