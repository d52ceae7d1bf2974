"""GatheredParameters: reading and writing whole parameters, whoever keeps them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
from engine.toys import (
    alone,
    assert_close,
    assert_equal,
    backward,
    batch_of,
    engine_of,
    loss_of,
    model_of,
    train,
)
from ranks import RankPools, on_ranks
from torch import nn

import hadal
from hadal import comm, utils
from hadal.errors import ShardedAccessError
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


@pytest.mark.parametrize("stage", [0, 1, 2])
@on_ranks(2)
def test_data_may_be_written_before_a_step(stage: int) -> None:
    """The update finds in each block what a look at all of the bucket finds before it."""
    found = []
    for looks_before in (True, False):
        model = model_of()
        engine = engine_of(stage, model, bf16={"enabled": True})
        inputs, targets = batch_of(0)
        engine.backward(loss_of(engine(inputs.bfloat16()).float(), targets))
        for weight in (model[0].bias, model[3].weight):
            weight.data[:1] = 0.75
        if looks_before:
            engine._parts.runtime.reshard_all()
        engine.step()
        found.append(
            torch.cat([utils.safe_get_full_fp32_param(p).flatten() for p in model.parameters()])
        )
        assert bool((utils.safe_get_full_fp32_param(model[3].weight)[:1] - 0.75).abs().max() < 0.1)
        engine.destroy()
    assert torch.equal(*found)


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


def anything(stage: int) -> None:
    """Parameters that no engine holds are skipped; one given twice counts once."""
    model = model_of()
    engine = engine_of(stage, model)
    weight, bias = model[0].weight, model[0].bias
    mixed = [None, weight, torch.ones(2), weight, nn.Parameter(torch.ones(3)), bias]
    with GatheredParameters(mixed, modifier_rank=0), torch.no_grad():
        assert torch.equal(weight, model_of()[0].weight)
        weight.fill_(float(comm.get_rank()))
    with GatheredParameters(p for p in (weight, None)):
        assert bool((weight == 0).all())
    engine.destroy()


def one_rank_fails(stage: int) -> None:
    """Values written before an exception are kept on every rank, whichever rank raised."""
    model, plain = model_of(), model_of()
    engine = engine_of(stage, model, bf16={"enabled": True})
    for culprit in range(comm.get_world_size()):
        outcome = pytest.raises(KeyError) if comm.get_rank() == culprit else nullcontext()
        with outcome, GatheredParameters(model.parameters(), modifier_rank=0), torch.no_grad():
            model[0].weight.fill_(0.5 + culprit + 4 * comm.get_rank())
            if comm.get_rank() == culprit:
                raise KeyError("mine")
        state = engine.state_dict()
        assert bool((state["0.weight"] == 0.5 + culprit).all())
        master = utils.safe_get_full_fp32_param(model[0].weight)
        assert bool((master == 0.5 + culprit).all())
        assert torch.equal(state["3.weight"], plain[3].weight.detach().bfloat16())
    assert is_whole(model[0].weight) == (stage < 3)
    engine.destroy()


class Gathers(nn.Module):
    """Reads and writes a whole weight of another module inside its own forward."""

    def __init__(self) -> None:
        super().__init__()
        self.body = model_of()

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        other = self.body[3].weight
        with GatheredParameters(other, modifier_rank=0):
            if not self.training and comm.get_rank() == 0:
                other.data.fill_(0.5)
            norm = other.detach().norm()
        outputs: torch.Tensor = self.body(inputs) * norm
        return outputs


def inside_forward(stage: int) -> None:
    model, plain = Gathers(), Gathers()
    engine = engine_of(stage, model)
    train(engine, range(2))
    assert_close(engine.state_dict(), alone(plain, [[0], [1]]))
    engine.eval()
    with torch.no_grad():
        engine(torch.ones(1, 6))
    assert bool((engine.state_dict()["body.3.weight"] == 0.5).all())
    assert bool((utils.safe_get_full_fp32_param(model.body[3].weight) == 0.5).all())
    engine.destroy()


def evaluating_unevenly(stage: int) -> None:
    """While all weights are whole, ranks may run the model as often as they like."""
    model = model_of()
    engine = engine_of(stage, model)
    expected = [model_of()(torch.ones(1, 6))]
    for step in range(3):
        backward(engine, step)
        with GatheredParameters(model.parameters()), torch.no_grad():
            for call in [model, engine] * (1 + 2 * comm.get_rank()):
                assert_close({"": call(torch.ones(1, 6))}, {"": expected[-1]})
        engine.step()
        plain = model_of()
        plain.load_state_dict(alone(model_of(), [[one] for one in range(step + 1)]))
        expected.append(plain(torch.ones(1, 6)))
    assert_close(engine.state_dict(), alone(model_of(), [[0], [1], [2]]))
    engine.destroy()


def in_the_loss(stage: int) -> None:
    """A penalty on weights, computed outside of forward: backward finds the values again."""
    model, plain = model_of(), model_of()
    engine = engine_of(stage, model)

    def penalty(trained: nn.Sequential) -> torch.Tensor:
        return 0.1 * (
            trained[0].weight.square().sum() + (trained[3].weight @ trained[0].weight).sum()
        )

    for step in range(2):
        inputs, targets = batch_of(step)
        with GatheredParameters([model[0].weight, model[3].weight]):
            loss = loss_of(engine(inputs), targets) + penalty(model)
        engine.backward(loss)
        engine.step()
    optimizer = torch.optim.AdamW(plain.parameters(), lr=0.01, weight_decay=0.0)
    for step in range(2):
        optimizer.zero_grad()
        for rank in range(2):
            inputs, targets = batch_of(step, rank)
            ((loss_of(plain(inputs), targets) + penalty(plain)) / 2).backward()
        optimizer.step()
    expected = {name: p.detach() for name, p in plain.named_parameters()}
    assert_close(engine.state_dict(), expected)
    engine.destroy()


def loading(stage: int) -> None:
    """`load_state_dict` of the module inside, and of the engine outside, reach the masters."""
    model = model_of()
    engine = engine_of(stage, model, bf16={"enabled": True})
    source = model_of(seed=8).state_dict()
    if stage == 3:
        with pytest.raises(ShardedAccessError, match=r"engine\.state_dict\(\).*GatheredParameters"):
            model.state_dict()
        with pytest.raises(ShardedAccessError, match="GatheredParameters"):
            model.load_state_dict(source)
    with GatheredParameters(model.parameters(), modifier_rank=0):
        model.load_state_dict(source)
        found = model.state_dict()
        assert torch.equal(found["0.weight"], source["0.weight"].bfloat16())
    rounded = source["0.weight"].bfloat16().float()
    assert torch.equal(utils.safe_get_full_fp32_param(model[0].weight), rounded)
    part = {"0.weight": torch.full((9, 6), 0.5), "unknown": torch.ones(1)}
    told = engine.load_state_dict(part, strict=False)
    assert (told.unexpected_keys, "3.bias" in told.missing_keys) == (["unknown"], True)
    assert bool((utils.safe_get_full_fp32_param(model[0].weight) == 0.5).all())
    with pytest.raises(RuntimeError, match="unknown"):
        engine.load_state_dict(part)
    engine.load_state_dict(source)
    assert_equal(engine.state_dict(), {k: v.bfloat16() for k, v in source.items()})
    train(engine, range(1))
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
        anything,
        one_rank_fails,
        inside_forward,
        evaluating_unevenly,
        in_the_loss,
        loading,
    ],
    ids=lambda case: case.__name__,
)
def test_gathered_parameters(case: Callable[[int], None], stage: int, ranks: RankPools) -> None:
    ranks(2).run(case, stage)
