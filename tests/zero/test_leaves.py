"""Leaf modules are gathered as a whole when they are called, and nothing inside them again."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from engine.toys import engine_of
from ranks import RankPools
from torch import Tensor, nn

import hadal
from hadal import comm
from hadal.errors import ModelError, UsageError
from hadal.zero.grouping import LeafModules, find_units

from .test_gathering import CUT, watched

WIDTH = 6


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, inputs: Tensor) -> Tensor:
        return torch.tanh(self.inner(inputs))


class Experts(nn.Module):
    """Each rank uses an expert of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, WIDTH)
        self.experts = nn.ModuleList(Expert() for _ in range(3))

    def forward(self, inputs: Tensor) -> Tensor:
        return self.experts[comm.get_rank()](self.gate(inputs))


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.widen = nn.Linear(WIDTH, 40 * WIDTH)
        self.narrow = nn.Linear(40 * WIDTH, WIDTH)
        self.mixture = Experts()

    def forward(self, inputs: Tensor) -> Tensor:
        return self.mixture(self.narrow(self.widen(inputs)))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(2))

    def forward(self, inputs: Tensor) -> Tensor:
        for layer in self.layers:
            inputs = layer(inputs)
        return inputs


def gathers_of_a_step(settings: dict[str, Any], mark: bool) -> tuple[list[str], int]:
    """Which buckets are gathered in the forward of a fourth step, and how many are lent."""
    torch.manual_seed(0)
    model = Model()
    if mark:
        hadal.set_z3_leaf_modules(model, ["Experts"])
    engine = engine_of(3, model, zero_optimization={**CUT, "reduce_bucket_size": 10**6, **settings})
    names = [bucket.name for bucket in engine._parts.runtime.gathering._buckets]
    inputs = torch.ones(2, WIDTH)
    words = []
    for _ in range(4):
        with watched(engine) as events:
            loss = engine(inputs).square().mean()
        with watched(engine) as behind:
            engine.backward(loss)
        engine.step()
        words.append([name for name, _ in behind].count("word"))
    if settings or mark:
        # One path, so no gather of backward is announced, whichever gradients came: ranks meet at
        # both ends of it.
        assert words[1:] == [2, 2, 2]
    engine.destroy()
    gathered = [names[number] for name, number in events if name == "start_unshard"]
    return gathered, sum(name == "serve" for name, _ in events)


UNITS = ["layers.0", "layers.0.mixture", "layers.1", "layers.1.mixture"]
AS_ONE = (UNITS, 0)
WAYS: dict[str, dict[str, Any]] = {
    "classes": {"leaf_module": {"classes": ["Experts"]}},
    "dotted class": {"leaf_module": {"classes": f"{Experts.__module__}.Experts"}},
    "names": {"leaf_module": {"names": ["layers.0.mixture", "layers.1.mixture"]}},
    "name_suffixes": {"leaf_module": {"name_suffixes": ["xture"]}},
    # 168 elements in 9 modules: fewer than 20 for each; what is around it has far more.
    "granularity": {"stage3_module_granularity_threshold": 20},
    "granularity, by its other name": {"module_granularity_threshold": 20},
}


@pytest.mark.slow_cells("classes", "name_suffixes")
@pytest.mark.claims(
    "zero_optimization.leaf_module",
    "zero_optimization.leaf_module.classes",
    "zero_optimization.leaf_module.names",
    "zero_optimization.leaf_module.name_suffixes",
    "zero_optimization.stage3_module_granularity_threshold",
    "zero_optimization.module_granularity_threshold",
)
@pytest.mark.parametrize("settings", WAYS.values(), ids=WAYS.keys())
def test_a_leaf_is_gathered_as_one_on_every_rank(settings: Any, ranks: RankPools) -> None:
    assert ranks(2).run(gathers_of_a_step, settings, False) == [AS_ONE] * 2


def test_without_a_leaf_each_rank_gathers_its_own_expert(ranks: RankPools) -> None:
    for rank, (gathered, lent) in enumerate(ranks(2).run(gathers_of_a_step, {}, False)):
        experts = [f"layers.{layer}.mixture.experts.{rank}" for layer in range(2)]
        assert gathered == ["layers.0", experts[0], "layers.1", experts[1]]
        assert lent == 2


def test_a_program_may_mark_leaves_itself(ranks: RankPools) -> None:
    assert ranks(2).run(gathers_of_a_step, {}, True) == [AS_ONE] * 2


def names_of_units(model: nn.Module, **leaves: Any) -> list[str]:
    group_of = dict.fromkeys(model.parameters(), 0)
    return [unit.name for unit in find_units(model, group_of, LeafModules(**leaves))]


def test_marks_are_set_and_taken_off() -> None:
    model = Model()
    before = names_of_units(model)
    both = [layer.mixture for layer in model.layers]
    for asked in ([Experts], ["Experts"], [f"{Experts.__module__}.Experts"], Experts, "Experts"):
        assert hadal.set_z3_leaf_modules(model, asked) == both
        assert names_of_units(model) == UNITS
        assert hadal.unset_z3_leaf_modules(model, asked) == both
        assert names_of_units(model) == before
    assert hadal.set_z3_leaf_modules(model, ["layers.1.mixture"]) == both[1:]
    assert len(hadal.set_z3_leaf_modules(model, [Expert, "Experts"])) == 8
    # A mark is not a name: what was marked before is neither found nor taken off by another one.
    assert hadal.unset_z3_leaf_modules(model, ["nowhere"], raise_if_not_found=False) == []
    assert hadal.unset_z3_leaf_modules(model, ["layers.0.mixture"]) == both[:1]
    assert names_of_units(model) != before
    hadal.unset_z3_leaf_modules(model, [nn.Module])
    assert names_of_units(model) == before


def test_a_leaf_that_is_nowhere_is_told(caplog: pytest.LogCaptureFixture) -> None:
    model = Model()
    with pytest.raises(ModelError, match="'Expert_s'; did you mean 'Experts'"):
        hadal.set_z3_leaf_modules(model, ["Expert_s"])
    assert hadal.set_z3_leaf_modules(model, ["nowhere"], raise_if_not_found=False) == []
    with caplog.at_level(logging.WARNING):
        found = hadal.set_z3_leaf_modules(model, [nn.Bilinear, "layers.0.mixture"])
    assert found == [model.layers[0].mixture]
    assert "'Bilinear'" in caplog.text


def mark_too_late() -> str:
    model = Model()
    engine = engine_of(3, model)
    with pytest.raises(UsageError) as raised:
        hadal.set_z3_leaf_modules(model, [Experts])
    engine.destroy()
    return str(raised.value)


def test_leaves_are_marked_before_initialize(ranks: RankPools) -> None:
    for message in ranks(2).run(mark_too_late):
        assert "before hadal.initialize" in message


def test_a_stack_of_blocks_is_never_one_unit_by_its_grain() -> None:
    assert names_of_units(Model(), granularity_numel=10**9) == ["layers.0", "layers.1"]
    assert names_of_units(Model(), granularity_numel=20) == UNITS
    assert names_of_units(Layer(), granularity_numel=20) == names_of_units(Layer())


def test_what_is_never_called_cannot_be_a_leaf() -> None:
    model = Model()
    never = "layers.0.mixture.experts"
    assert names_of_units(model, names=(never,)) == names_of_units(model)
    stack = nn.Sequential(nn.Sequential(nn.Linear(2, 2), nn.Tanh()))
    assert names_of_units(stack, names=("0",)) == ["0"]
