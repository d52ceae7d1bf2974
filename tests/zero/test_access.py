"""GatheredParameters: reading and writing whole parameters, whoever keeps them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from engine.toys import alone, assert_close, backward, engine_of, model_of, train
from ranks import RankPools
from torch import nn

import hadal
from hadal import comm
from hadal.zero import GatheredParameters


def is_whole(parameter: nn.Parameter) -> bool:
    return parameter.untyped_storage().nbytes() >= parameter.numel() * parameter.itemsize


def reading(stage: int) -> None:
    expected = [parameter.detach().clone() for parameter in model_of().parameters()]
    model = model_of()
    engine = engine_of(stage, model)
    parameters = list(model.parameters())
    with GatheredParameters(model.parameters()):
        for parameter, value in zip(parameters, expected, strict=True):
            assert torch.equal(parameter.detach(), value)
    assert is_whole(parameters[0]) == (stage < 3)
    with GatheredParameters(parameters[0]):
        assert torch.equal(parameters[0].detach(), expected[0])
    with GatheredParameters(parameters, enabled=False):
        assert is_whole(parameters[0]) == (stage < 3)
    engine.destroy()


def writing(stage: int) -> None:
    """One rank's changes are everybody's, and training goes on from them."""
    writer = comm.get_world_size() - 1
    model, plain = model_of(), model_of()
    engine = engine_of(stage, model)
    with GatheredParameters([model[3].weight], modifier_rank=writer), torch.no_grad():
        if comm.get_rank() == writer:
            model[3].weight.mul_(2.0)
        else:
            model[3].weight.zero_()  # is overwritten
    with GatheredParameters(model[0].bias), torch.no_grad():
        model[0].bias.fill_(0.25)  # on every rank
    with torch.no_grad():
        plain[3].weight.mul_(2.0)
        plain[0].bias.fill_(0.25)
    train(engine, range(2))
    assert_close(engine.state_dict(), alone(plain, [[0], [1]]))
    engine.destroy()


def writing_data(stage: int) -> None:
    """A write through `.data` counts as one too, where a modifier is named."""
    model = model_of()
    engine = engine_of(stage, model, bf16={"enabled": True})
    with GatheredParameters(model[3].weight, modifier_rank=0):
        if comm.get_rank() == 0:
            model[3].weight.data.fill_(0.75)
    assert bool((engine.state_dict()["3.weight"] == 0.75).all())
    with GatheredParameters(model[3].weight):
        assert bool((model[3].weight == 0.75).all())
    engine.destroy()


def nesting(stage: int) -> None:
    model = model_of()
    engine = engine_of(stage, model)
    weight, expected = model[0].weight, model_of()[0].weight
    with GatheredParameters(weight):
        with GatheredParameters([weight, model[3].weight]):
            assert torch.equal(weight, expected)
        assert torch.equal(weight, expected)
        engine.eval()
        with torch.no_grad():
            engine(torch.ones(1, 6))
        assert torch.equal(weight, expected)
    assert is_whole(weight) == (stage < 3)
    engine.destroy()


def failing(stage: int) -> None:
    model = model_of()
    engine = engine_of(stage, model)
    with pytest.raises(KeyError), GatheredParameters(model.parameters(), modifier_rank=0):
        raise KeyError("mine")
    assert is_whole(model[0].weight) == (stage < 3)
    train(engine, range(2))
    assert_close(engine.state_dict(), alone(model_of(), [[0], [1]]))
    engine.destroy()


def between_backward_and_step(stage: int) -> None:
    """Reading in the middle of an update disturbs nothing."""
    model = model_of()
    engine = engine_of(stage, model)
    for step in range(2):
        backward(engine, step)
        with GatheredParameters(model.parameters()):
            assert all(bool(parameter.isfinite().all()) for parameter in model.parameters())
        engine.step()
    assert_close(engine.state_dict(), alone(model_of(), [[0], [1]]))
    engine.destroy()


def strangers(stage: int) -> None:
    """A no-op outside of engines: before `initialize`, after `destroy`, for anyone else's."""
    model = model_of()
    with GatheredParameters(model.parameters(), modifier_rank=0), torch.no_grad():
        model[0].weight.fill_(float(comm.get_rank()))
    assert bool((model[0].weight == comm.get_rank()).all())
    engine = engine_of(stage, model)
    engine.destroy()
    with GatheredParameters(model.parameters()):
        assert bool((model[0].weight == 0).all())
    with GatheredParameters([]):
        pass


def before_initialize(stage: int) -> None:
    with hadal.zero.Init():
        model = model_of()
    weight, expected = model[0].weight, model_of()[0].weight
    assert not is_whole(weight)
    with GatheredParameters(weight, modifier_rank=0), torch.no_grad():
        assert torch.equal(weight, expected)
        if comm.get_rank() == 0:
            weight.add_(1.0)
    assert not is_whole(weight)
    engine = engine_of(stage, model)
    assert torch.equal(engine.state_dict()["0.weight"], expected + 1.0)
    engine.destroy()


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize(
    "case",
    [
        reading,
        writing,
        writing_data,
        nesting,
        failing,
        between_backward_and_step,
        strangers,
        before_initialize,
    ],
    ids=lambda case: case.__name__,
)
def test_gathered_parameters(case: Callable[[int], None], stage: int, ranks: RankPools) -> None:
    ranks(2).run(case, stage)
