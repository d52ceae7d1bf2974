"""Copies of a model under training, deep or pickled: models of their own, or a refusal."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch
from engine.toys import assert_close, assert_equal, batch_of, engine_of, loss_of, model_of, train
from ranks import on_ranks
from torch import nn

import hadal
from hadal.errors import ShardedAccessError, UsageError
from hadal.zero import GatheredParameters
from hadal.zero.parameters import gather_to_copy

OVERHEAD = 2048  # bytes of names and types around one pickled tensor


def through_torch(value: Any) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def through_pickle(value: Any) -> Any:
    return pickle.loads(pickle.dumps(value))


COPIES = {"deepcopy": copy.deepcopy, "torch.save": through_torch, "pickle": through_pickle}


@pytest.mark.fast_cells("3")
@pytest.mark.parametrize("stage", range(4))
@on_ranks(2)
def test_a_copy_is_a_model_of_its_own(stage: int) -> None:
    gather_to_copy(None)  # as where nobody has imported deepspeed
    model = model_of()
    model[0].weight.mark = "mine"  # type: ignore[assignment]
    engine = engine_of(stage, model)
    train(engine, range(1))
    state = engine.state_dict()
    for name, make in COPIES.items():
        if stage == 3:
            with pytest.raises(ShardedAccessError, match=r"0\.weight was .*GatheredParameters"):
                make(model)
            with pytest.raises(ShardedAccessError, match=r"3\.bias was .*engine\.state_dict\(\)"):
                make(model[3].bias)
        with GatheredParameters(model.parameters()):
            other, alone = make(model), make(model[0].weight)
        assert_equal(dict(other.state_dict()), state)
        assert torch.equal(alone, state["0.weight"])
        assert name == "deepcopy" or other[0].weight.mark == "mine"
        for parameter in (*other.parameters(), alone):
            assert type(parameter) is nn.Parameter
            assert parameter.untyped_storage().nbytes() == parameter.numel() * parameter.itemsize
        # It is a model like any other, without an engine's hooks.
        inputs, targets = batch_of(0)
        loss_of(other(inputs), targets).backward()
        with torch.no_grad():
            for parameter in other.parameters():
                parameter -= parameter.grad
        copy.deepcopy(other)
        pickle.dumps(other)
        assert_equal(engine.state_dict(), state)
        following = engine_of(stage, other)
        train(following, range(1))
        following.destroy()
    train(engine, range(1, 2))  # the original goes on undisturbed
    for refused in (copy.deepcopy, pickle.dumps):
        with pytest.raises(UsageError, match="an engine cannot be copied or pickled"):
            refused(engine)
    expected = engine_of(stage, model_of())
    train(expected, range(2))
    assert_close(engine.state_dict(), expected.state_dict())
    engine.destroy()
    expected.destroy()
    assert_equal(dict(copy.deepcopy(model).state_dict()), dict(model.state_dict()))
    assert "__deepcopy__" not in vars(model[0].weight)


@pytest.mark.parametrize("stage", [0, 2, 3])
@on_ranks(2)
def test_a_pickle_holds_no_more_than_what_was_asked_for(stage: int) -> None:
    """A pickled parameter is as large as itself, not as its bucket."""
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(8)))
    engine = engine_of(stage, model, zero_optimization={"stage": stage})
    one = model[0].weight
    with GatheredParameters(model.parameters()):
        for written in (nbytes_of(one), len(pickle.dumps(one))):
            assert written < one.numel() * one.itemsize + OVERHEAD
        total = sum(p.numel() * p.itemsize + OVERHEAD for p in model.parameters())
        assert nbytes_of(model) < total
        assert len(pickle.dumps(list(model.parameters()))) < total
    engine.destroy()


def nbytes_of(value: Any) -> int:
    file = io.BytesIO()
    torch.save(value, file)
    return file.tell()


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(6, 6, bias=False)
        self.other = nn.Linear(6, 6, bias=False)
        self.other.weight = self.one.weight
        self.frozen = nn.Parameter(torch.ones(6), requires_grad=False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.other(self.one(inputs)) * self.frozen
        return outputs


@on_ranks(2)
def test_a_copy_keeps_ties_and_flags() -> None:
    engine = engine_of(3, Tied())
    for make in COPIES.values():
        with GatheredParameters(engine.module.parameters()):
            other = make(engine.module)
        assert other.one.weight is other.other.weight
        assert not other.frozen.requires_grad
    engine.destroy()


@on_ranks(2)
def test_ranks_that_copy_together_may_gather() -> None:
    with hadal.zero.Init():
        model = model_of()
    gather_to_copy(GatheredParameters)
    try:
        copied = copy.deepcopy(model)
        hashed = [value.cpu().double().numpy() for value in model.state_dict().values()]
        with pytest.raises(ShardedAccessError, match="was pickled"):
            pickle.dumps(model)
    finally:
        gather_to_copy(None)
    assert_equal(dict(copied.state_dict()), dict(model_of().state_dict()))
    for array, value in zip(hashed, model_of().state_dict().values(), strict=True):
        assert torch.equal(torch.from_numpy(array), value.double())


@on_ranks(2)
def test_a_model_born_sharded() -> None:
    with hadal.zero.Init():
        model = model_of()
        copied = copy.deepcopy(model)  # inside, values are found
    gather_to_copy(None)  # as where nobody has imported deepspeed
    with pytest.raises(ShardedAccessError, match="was copied while its values were sharded"):
        copy.deepcopy(model)
    with GatheredParameters(model.parameters()):
        assert_equal(dict(copy.deepcopy(model).state_dict()), dict(model_of().state_dict()))
    with GatheredParameters(copied.parameters()):
        assert_equal(dict(copied.state_dict()), dict(model_of().state_dict()))
