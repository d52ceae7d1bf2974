"""The program's own optimizers next to an engine."""

from __future__ import annotations

import pytest
import torch
from ranks import RankPools

from engine.toys import backward, engine_of, model_of, train
from hadal.errors import UsageError


def step_by_another(stage: int) -> None:
    engine = engine_of(stage)
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
    module(torch.ones(2, 6)).sum().backward()
    other.step()  # they are the program's again


@pytest.mark.parametrize("stage", range(4))
def test_another_optimizer_does_not_step_an_engines_parameters(
    stage: int, ranks: RankPools
) -> None:
    ranks(1).run(step_by_another, stage)


def step_what_was_given(stage: int) -> None:
    model = model_of()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    wishes = {"optimizer": optimizer}
    engine = engine_of(stage, model, wishes, optimizer=None)
    before = engine.state_dict()["0.weight"].clone()
    train(engine, range(2))
    assert not torch.equal(engine.state_dict()["0.weight"], before)
    engine.destroy()


@pytest.mark.parametrize("stage", [0, 3])
def test_the_programs_optimizer_is_stepped_by_the_engine(stage: int, ranks: RankPools) -> None:
    ranks(1).run(step_what_was_given, stage)
