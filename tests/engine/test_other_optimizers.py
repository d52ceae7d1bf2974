"""The program's own optimizers next to an engine."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from ranks import RankPools, on_ranks
from torch import nn

from engine.toys import backward, batch_of, engine_of, model_of, train
from hadal.errors import OptimizerError, UsageError

REFUSED: dict[str, tuple[int, int, dict[str, Any]]] = {
    "sharded": (2, 3, {}),
    "two ranks": (2, 0, {}),
    "masters": (1, 1, {"bf16": {"enabled": True}}),
    "accumulation": (1, 2, {"gradient_accumulation_steps": 2}),
}


def step_by_another(stage: int, changes: dict[str, Any]) -> None:
    engine = engine_of(stage, **changes)
    other = torch.optim.AdamW(engine.module.parameters(), lr=0.1)
    other.step()  # no gradient waits
    backward(engine, 0)
    with pytest.raises(UsageError, match=r"AdamW.step\(\) was called for 0\.\w+, whose gradient"):
        other.step()
    engine.step()
    own = torch.nn.Parameter(torch.ones(4))
    own.grad = torch.ones(4)
    torch.optim.SGD([own], lr=0.5).step()
    assert own.tolist() == [0.5] * 4
    train(engine, range(1, 2))
    module = engine.module
    engine.destroy()
    weight = next(module.parameters())
    module(torch.ones(2, 6, dtype=weight.dtype)).sum().backward()
    other.step()  # they are the program's again


@pytest.mark.parametrize("case", list(REFUSED))
def test_another_optimizer_does_not_step_an_engines_parameters(case: str, ranks: RankPools) -> None:
    world, stage, changes = REFUSED[case]
    ranks(world).run(step_by_another, stage, changes)


@pytest.mark.parametrize("stage", [0, 3])
@on_ranks(1)
def test_the_programs_optimizer_is_stepped_by_the_engine(stage: int) -> None:
    model = model_of()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    wishes = {"optimizer": optimizer}
    engine = engine_of(stage, model, wishes, optimizer=None)
    before = engine.state_dict()["0.weight"].clone()
    train(engine, range(2))
    assert not torch.equal(engine.state_dict()["0.weight"], before)
    engine.destroy()


@pytest.mark.parametrize("stage", range(4))
@on_ranks(1)
def test_one_process_lends_its_gradients(stage: int) -> None:
    """As programs that distil layer by layer do, after `initialize` and past its engine."""
    torch.manual_seed(1)
    plain = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 4))
    engine = engine_of(stage, copy.deepcopy(plain))
    for which in (0, 2, 0):
        pairs = [
            (one, torch.optim.AdamW(one[which].parameters(), lr=0.1))
            for one in (plain, engine.module)
        ]
        for number in range(3):
            for one, optimizer in pairs:
                inputs, _ = batch_of(number, 0)
                optimizer.zero_grad()
                one[which](inputs[:, : one[which].in_features]).square().mean().backward()
                optimizer.step()
        found = engine.state_dict()
        assert all(torch.equal(found[name], value) for name, value in plain.state_dict().items())
    with pytest.raises(UsageError, match="has no gradients"):
        engine.step()
    train(engine, range(2))  # from the weights that the others left
    assert not torch.equal(engine.state_dict()["0.weight"], plain[0].weight)
    engine.destroy()


class TwoInOne(torch.optim.Optimizer):
    """An optimizer without a learning rate, which steps two others."""

    def __init__(self, model: nn.Module, shares: bool) -> None:
        first, second = model.children()
        self.first = torch.optim.SGD(first.parameters(), lr=0.1)
        self.second = torch.optim.Adagrad(second.parameters(), lr=0.2)
        super().__init__(model.parameters(), {})
        if shares:
            self.param_groups = [*self.first.param_groups, *self.second.param_groups]
            self.state = self.first.state = self.second.state

    def step(self, closure: Any = None) -> None:
        for inner in (self.first, self.second):
            inner.step()


class Signs(torch.optim.Optimizer):
    """An optimizer without options."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            if parameter.grad is not None:
                parameter.sub_(parameter.grad.sign(), alpha=0.01)


@pytest.mark.parametrize("stage", [0, 3])
@on_ranks(1)
def test_an_optimizer_without_a_rate(stage: int) -> None:
    model = model_of()
    wishes = {"optimizer": Signs(model.parameters(), {})}
    engine = engine_of(stage, model, wishes, optimizer=None, steps_per_print=1)
    before = engine.state_dict()["0.weight"].clone()
    train(engine, range(2))
    assert engine.get_lr() == [0.0]
    assert not torch.equal(engine.state_dict()["0.weight"], before)


@on_ranks(1)
def test_an_optimizer_shares_the_param_groups_of_those_that_it_steps() -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 4))
    with pytest.raises(OptimizerError, match=r"TwoInOne.first is an SGD with param groups of its"):
        engine_of(2, model, {"optimizer": TwoInOne(model, False)}, optimizer=None)
    engine = engine_of(2, model, {"optimizer": TwoInOne(model, True)}, optimizer=None)
    before = {name: values.clone() for name, values in engine.state_dict().items()}
    train(engine, range(1))
    assert engine.get_lr() == [0.1, 0.2]
    assert all(not torch.equal(engine.state_dict()[name], before[name]) for name in before)
