"""Parameters of classes of a program's own: trained right, kept as they are, or refused by name."""

from __future__ import annotations

import contextlib
import copy
import pickle
from typing import Any

import pytest
import torch
from engine.toys import assert_equal, engine_of, model_of, train
from ranks import RankPools
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.testing._internal.two_tensor import TwoTensor

import hadal
from hadal import comm
from hadal.errors import MismatchError, ModelError
from hadal.zero import GatheredParameters
from hadal.zero.kinds import is_foreign


class Named(nn.Parameter):
    """Attributes that programs set on some parameters."""

    def __repr__(self) -> str:
        return "Named"


class Saved(nn.Parameter):
    """A class to which Python adds attributes of its own."""


class Plain(torch.Tensor):
    pass


class Seen(nn.Parameter):
    """A class with arithmetic of its own."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return super().__torch_function__(func, types, args, kwargs or {})


class Elsewhere(nn.Parameter):
    def to(self, *args: Any, **kwargs: Any) -> Any:
        return self


@pytest.mark.parametrize(
    ("tensor", "foreign"),
    [
        (nn.Parameter(torch.ones(2)), False),
        (nn.Parameter(torch.ones(())), False),
        (nn.Parameter(torch.ones(0, dtype=torch.bfloat16)), False),
        (torch.ones(2), False),
        (Named(torch.ones(2)), False),
        (nn.Parameter(Plain(torch.ones(2))), False),
        (nn.Parameter(torch.ones(2, dtype=torch.int8), requires_grad=False), True),
        (nn.Parameter(torch.ones(2, dtype=torch.bool), requires_grad=False), True),
        (nn.Parameter(torch.ones(2, dtype=torch.complex64)), True),
        (nn.Parameter(torch.ones(2).to(torch.float8_e4m3fn)), True),
        (nn.Parameter(torch.eye(2).to_sparse()), True),
        (nn.Parameter(TwoTensor(torch.ones(2), torch.ones(2))), True),
        (Seen(torch.ones(2)), True),
        (Elsewhere(torch.ones(2)), True),
    ],
)
def test_what_cannot_lie_in_a_flat_buffer(tensor: torch.Tensor, foreign: bool) -> None:
    assert is_foreign(tensor) is foreign


def test_attributes_that_python_adds_to_a_class_do_not_count() -> None:
    saved = nn.Parameter(torch.ones(2)), Saved(torch.ones(2)), torch.ones(2)
    for one in saved:
        pickle.loads(pickle.dumps(one))
        assert type(one).__annotations__ is not None
    assert {"__slotnames__", "__annotations__"} <= set(vars(Saved))
    assert not is_foreign(saved[1])


class Shadowing(nn.Parameter):
    grad = None


def test_a_value_in_place_of_a_property_counts() -> None:
    assert is_foreign(Shadowing(torch.ones(2)))


def marked() -> nn.Sequential:
    """A model whose parameters are the plain one's, in classes of the program's own."""
    model = model_of()
    model[0].weight = Named(model[0].weight.data)
    model[0].bias = Named(model[0].bias.data, requires_grad=False)
    model[3].weight = nn.Parameter(Plain(model[3].weight.data))
    return model


def plain() -> nn.Sequential:
    model = model_of()
    model[0].bias.requires_grad_(False)
    return model


def train_both(stage: int, born: bool) -> None:
    states, losses = [], []
    for make in (marked, plain):
        with hadal.zero.Init() if born else contextlib.nullcontext():
            model = make()
        engine = engine_of(stage, model)
        losses.append(torch.stack(train(engine, range(3))))
        states.append(engine.state_dict())
        if make is marked:
            assert isinstance(model[0].weight, Named)
            assert isinstance(model[0].bias, Named)
            assert isinstance(model[3].weight, Plain)
            with GatheredParameters(model.parameters()):
                alone = copy.deepcopy(model[0].weight)
            assert type(alone) is Named
            assert torch.equal(alone, states[0]["0.weight"])
        engine.destroy()
    assert torch.equal(*losses)
    assert_equal(*states)
    assert not torch.equal(states[0]["0.weight"], model_of()[0].weight)
    assert not torch.equal(states[0]["3.weight"], model_of()[3].weight)


@pytest.mark.slow_cells("2-created sharded", "3-given")
@pytest.mark.parametrize("born", [False, True], ids=["given", "created sharded"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_class_of_its_own_trains_as_a_plain_one(stage: int, born: bool, ranks: RankPools) -> None:
    ranks(2).run(train_both, stage, born)


def refuse_on_one_rank(kind: str) -> None:
    """One rank is enough for all to raise, before anything of the model is sent."""
    model, rank = model_of(), comm.get_rank()
    if rank == 1:
        model[3].bias = MAKERS[kind](model[3].bias.data)
    error = ModelError if rank == 1 else MismatchError
    with pytest.raises(error, match=r"rank 1: parameter 3\.bias is a .*Freeze it \(requires"):
        engine_of(0, model)


MAKERS = {
    "own functions": Seen,
    "own methods": Elsewhere,
    "complex": lambda values: nn.Parameter(values.to(torch.complex64)),
    "float8": lambda values: nn.Parameter(values.to(torch.float8_e5m2)),
    "sparse": lambda values: nn.Parameter(values.to_sparse()),
    "wrapped": lambda values: nn.Parameter(TwoTensor(values, values.clone())),
}


@pytest.mark.parametrize("kind", MAKERS)
def test_other_trainables_are_refused_by_name(kind: str, ranks: RankPools) -> None:
    ranks(2).run(refuse_on_one_rank, kind)


def refuse_tensor_parallel(stage: int) -> None:
    model = model_of()
    parallelize_module(model[0], init_device_mesh("cpu", (2,)), ColwiseParallel())
    for trains in (True, False):
        model.requires_grad_(trains)
        model[3].requires_grad_(True)
        with pytest.raises(ModelError, match=r"parameter 0\.weight is a DTensor .* over .*mpu="):
            engine_of(stage, model)


@pytest.mark.parametrize("stage", [0, 3])
def test_tensors_over_a_mesh_are_refused_by_name(stage: int, ranks: RankPools) -> None:
    ranks(2).run(refuse_tensor_parallel, stage)


def keep_frozen(stage: int) -> None:
    model, rank = model_of(), comm.get_rank()
    values = torch.full((4,), float(rank))
    model[3].bias = nn.Parameter(TwoTensor(values, values + 2), requires_grad=False)
    model.eighths = nn.Parameter(values.to(torch.float8_e4m3fn), requires_grad=False)
    engine = engine_of(stage, model)
    wrapped = model[3].bias
    assert isinstance(wrapped.data, TwoTensor)
    assert (wrapped.a.sum().item(), wrapped.b.sum().item()) == (0.0, 8.0)
    assert model.eighths.dtype == torch.float8_e4m3fn
    assert model.eighths.float().tolist() == [0.0] * 4
    engine.destroy()


@pytest.mark.parametrize("stage", [0, 3])
def test_frozen_ones_stay_whole_with_rank_0s_values(stage: int, ranks: RankPools) -> None:
    ranks(3).run(keep_frozen, stage)
