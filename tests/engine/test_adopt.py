"""Modules added to a model after `initialize`, with their param groups, train as in torch."""

from __future__ import annotations

import copy
import logging
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from hypothesis import given, strategies as st
from ranks import RankPools, on_ranks
from torch import Tensor, nn

from engine.test_later_groups import KINDS, groups_for
from engine.test_newcomers import Adapted
from engine.toys import TINY, assert_close, assert_equal, batch_of, engine_of, loss_of, train
from hadal import comm, utils, zero
from hadal.errors import HadalError, MismatchError, ModelError
from hadal.zero.regroup import merged

STAGES = [0, 1, 2, 3]


class Model(nn.Module):
    """An inlet, blocks that repeat, and a head; all of it may be changed while it trains."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.inlet = nn.Linear(6, 5)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(5, 5), nn.Sequential(nn.Tanh(), nn.LayerNorm(5)))
            for _ in range(2)
        )
        self.head = nn.Linear(5, 4)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.inlet(inputs)
        for block in self.blocks:
            hidden = block(hidden)
        outputs: Tensor = self.head(hidden)
        offset = getattr(self, "offset", None)
        return outputs if offset is None else outputs + offset


class TakesOver(nn.Linear):
    """A layer that takes another one's weight and adds one of its own."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__(base.in_features, base.out_features)
        self.weight, self.bias = base.weight, base.bias
        self.gain = nn.Parameter(torch.linspace(0.5, 1.5, base.out_features))

    def forward(self, inputs: Tensor) -> Tensor:
        return super().forward(inputs) * self.gain


def of_rank(module: nn.Module, rank: int) -> nn.Module:
    """Rank 0's values count, so the others' may differ."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter += rank
    return module


def _adapter(model: Model, rank: int) -> list[nn.Parameter]:
    model.head = Adapted(model.head)  # freezes it
    model.head.up.weight.data.fill_(0.1)
    new = [model.head.down.weight, model.head.up.weight]
    return new


def _in_blocks(model: Model, rank: int) -> list[nn.Parameter]:
    new = []
    for block in model.blocks:
        block[0] = Adapted(block[0])
        block[0].up.weight.data.fill_(0.1)
        new += [block[0].down.weight, block[0].up.weight]
    return new


def _another_head(model: Model, rank: int) -> list[nn.Parameter]:
    torch.manual_seed(5)
    model.head = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 4))
    return list(of_rank(model.head, rank).parameters())


def _one_block_more(model: Model, rank: int) -> list[nn.Parameter]:
    block = copy.deepcopy(Model().blocks[0])
    model.blocks.insert(1, block)
    return list(of_rank(block, rank).parameters())


def _of_the_root(model: Model, rank: int) -> list[nn.Parameter]:
    model.offset = nn.Parameter(torch.linspace(-1, 1, 4))
    return [model.offset]


def _taken_over(model: Model, rank: int) -> list[nn.Parameter]:
    model.inlet = TakesOver(model.inlet)
    return [model.inlet.gain]


CHANGES: dict[str, Callable[[Model, int], list[nn.Parameter]]] = {
    "adapter": _adapter,
    "in blocks": _in_blocks,
    "another head": _another_head,
    "one block more": _one_block_more,
    "of the root": _of_the_root,
    "taken over": _taken_over,
}


def optimizer_for(model: nn.Module, kind: str) -> torch.optim.Optimizer:
    return KINDS[kind](groups_for(kind, list(model.parameters()), {}))


def add_to(optimizer: Any, kind: str, members: list[nn.Parameter]) -> None:
    for group in groups_for(kind, members, {"lr": 0.03}):
        optimizer.add_param_group(group)


def train_alone(changes: list[str], kind: str) -> dict[str, Tensor]:
    """One process, plain torch; what takes no part counts as having a gradient of zero."""
    model, world = Model(), comm.get_world_size()
    optimizer = optimizer_for(model, kind)
    for update in range(2 * len(changes) + 2):
        if update in range(2, 2 * len(changes) + 2, 2):
            members = CHANGES[changes[update // 2 - 1]](model, 0)  # as rank 0 does it
            add_to(optimizer, kind, members)
        optimizer.zero_grad()
        for rank in range(world):
            inputs, targets = batch_of(update, rank)
            (loss_of(model(inputs), targets) / world).backward()
        optimizer.step()
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def hooked(module: nn.Module, units: set[nn.Module]) -> bool:
    """True if a unit at or above a module gathers its weights."""
    above = (unit for unit in units if any(module is below for below in unit.modules()))
    return any(unit._forward_pre_hooks for unit in above)


def train_changed(stage: int, changes: list[str], threshold: int = 0, kind: str = "AdamW") -> None:
    expected = train_alone(changes, kind)
    section = {"stage": stage, **TINY, "stage3_param_persistence_threshold": threshold}
    model = Model()
    given = {"optimizer": optimizer_for(model, kind)}
    engine = engine_of(stage, model, given, optimizer=None, zero_optimization=section)
    for number in range(len(changes) + 1):
        if number:
            with zero.GatheredParameters(model.parameters()):
                members = CHANGES[changes[number - 1]](model, comm.get_rank())
            add_to(engine.optimizer, kind, members)
            cuts = stage == 3 and not threshold and comm.get_world_size() > 1
            cut = [p for p in members if cuts and p.numel() > 1]
            assert all(p.stride()[0] == 0 for p in cut)  # freed: only shards are left
            owners = [
                m
                for m in model.modules()
                if any(p is q for p in cut for q in m._parameters.values())
            ]
            units = {unit.module for unit in engine._parts.runtime.gathering.uses.units}
            assert all(hooked(owner, units) for owner in owners)
        train(engine, range(2 * number, 2 * number + 2))
    found = engine.state_dict()
    for name, parameter in model.named_parameters():
        if name in found and parameter.requires_grad:
            assert utils.safe_get_full_fp32_param(parameter) is not None
    engine.destroy()
    assert_close(found, expected)


@pytest.mark.fast_cells("another head")
@pytest.mark.parametrize("change", CHANGES)
def test_later_parameters_train_as_in_torch(change: str, ranks: RankPools) -> None:
    for stage in STAGES:
        ranks(2).run(train_changed, stage, [change])


@pytest.mark.slow
def test_one_change_after_the_other(ranks: RankPools) -> None:
    for stage in (0, 2, 3):
        ranks(2).run(train_changed, stage, ["in blocks", "another head", "of the root"])
    # Nothing was cut, until something large came.
    ranks(2).run(train_changed, 3, ["another head"], 31)


@pytest.mark.slow
def test_on_one_rank_and_on_three(ranks: RankPools) -> None:
    for stage in (1, 3):
        ranks(1).run(train_changed, stage, ["in blocks", "taken over"])
    ranks(3).run(train_changed, 3, ["in blocks", "taken over"])


@pytest.mark.fast_cells("Muon")
@pytest.mark.parametrize("kind", ["Lamb", "ByNorm", "Muon"])
def test_optimizers_of_whole_parameters_take_them_up(kind: str, ranks: RankPools) -> None:
    for stage in (1, 3):
        ranks(2).run(train_changed, stage, ["one block more"], 0, kind)


@given(st.lists(st.integers(0, 9), unique=True), st.lists(st.integers(0, 9), unique=True))
def test_new_buckets_stand_at_their_place(olds: list[int], news: list[int]) -> None:
    """Nothing is lost, each list keeps its order, and sorted ones give a sorted one."""

    def merge(olds: list[int], news: list[int]) -> list[tuple[str, int]]:
        both = [
            [SimpleNamespace(kind=kind, parameters=[n]) for n in numbers]
            for kind, numbers in (("old", olds), ("new", news))
        ]
        order: Any = {n: n for n in (*olds, *news)}
        return [(one.kind, one.parameters[0]) for one in cast(Any, merged)(*both, order)]

    result = merge(olds, news)
    assert [n for kind, n in result if kind == "old"] == olds
    assert [n for kind, n in result if kind == "new"] == news
    both = [n for _, n in merge(sorted(olds), sorted(news))]
    assert both == sorted(both)


# ---- what comes along ----------------------------------------------------------------------------


class Companion(nn.Module):
    """An adapter with a frozen parameter, a buffer, and an integer."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.trained = nn.Linear(4, 4)
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.register_buffer("buffer", torch.full((3,), 1.0 + rank))
        self.code = nn.Parameter(torch.full((2,), 5), requires_grad=False)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter += rank

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.frozen(self.trained(inputs)) + self.buffer.sum()
        return outputs


@pytest.mark.parametrize("stage", [0, 2, 3])
@on_ranks(2)
def test_later_modules_have_the_values_of_rank_0(stage: int) -> None:
    model = nn.Sequential(nn.Linear(6, 4))
    engine = engine_of(stage, model, bf16={"enabled": True})
    train(engine, range(1))
    model.append(Companion(comm.get_rank()))
    start = dict(Companion(0).named_parameters())
    engine.optimizer.add_param_group({"params": model[1].trained.weight})
    engine.optimizer.add_param_group({"params": model[1].trained.bias, "lr": 0.5})
    state = engine.state_dict()
    for name, value in start.items():
        assert torch.equal(state[f"1.{name}"], value.to(state[f"1.{name}"].dtype)), name
    assert torch.equal(state["1.buffer"], torch.ones(3, dtype=torch.bfloat16))
    weight = model[1].trained.weight
    assert weight.dtype == model[1].frozen.weight.dtype == torch.bfloat16
    # The master has the value as it was given, before any cast.
    master = utils.safe_get_full_fp32_param(weight)
    assert torch.equal(master, start["trained.weight"])
    frozen = state["1.frozen.weight"]
    train(engine, range(1, 3))
    assert torch.equal(engine.state_dict()["1.frozen.weight"], frozen)
    assert not torch.equal(utils.safe_get_full_fp32_param(weight), master)
    engine.destroy()


@on_ranks(2)
def test_later_modules_may_be_born_sharded() -> None:
    model = nn.Sequential(nn.Linear(6, 4))
    engine = engine_of(3, model)
    train(engine, range(1))
    torch.manual_seed(7)
    with zero.Init():
        model.append(nn.Linear(4, 4))
    engine.optimizer.add_param_group({"params": model[1].parameters()})
    torch.manual_seed(7)
    expected = nn.Linear(4, 4)
    assert torch.equal(engine.state_dict()["1.weight"], expected.weight)
    train(engine, range(1, 3))
    engine.destroy()


class Words(nn.Module):
    """Embeddings, of which there may be more later."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.embedding = nn.Embedding(7, 4)
        self.outlet = nn.Linear(4, 4)

    def forward(self, tokens: Tensor) -> Tensor:
        outputs: Tensor = self.outlet(self.embedding(tokens))
        return outputs


def resized(old: nn.Embedding, count: int) -> nn.Embedding:
    torch.manual_seed(4)
    new = nn.Embedding(count, 4)
    with zero.GatheredParameters([old.weight]), torch.no_grad():
        new.weight[: len(old.weight)] = old.weight
    return new


def step_words(model: Any, update: int, rank: int) -> Tensor:
    tokens = torch.arange(3) + 3 * update + rank
    outputs: Tensor = model(tokens)
    return outputs.square().mean()


def resize(stage: int) -> list[str]:
    plain = Words()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    model = Words()
    section = {"optimizer": {"type": "SGD", "params": {"lr": 0.1}}, "sparse_gradients": True}
    engine = engine_of(stage, model, **section)
    told: list[str] = []
    listener = logging.Handler()
    listener.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("hadal.engine.apply").addHandler(listener)
    for update in range(4):
        if update == 1:
            for each, steps in ((plain, optimizer), (model, engine.optimizer)):
                each.embedding = resized(each.embedding, 16)
                steps.add_param_group({"params": each.embedding.weight})
        optimizer.zero_grad()
        for rank in range(2):
            (step_words(plain, update, rank) / 2).backward()
        optimizer.step()
        engine.backward(step_words(engine, update, comm.get_rank()))
        engine.step()
    logging.getLogger("hadal.engine.apply").removeHandler(listener)
    assert_close(engine.state_dict(), plain.state_dict())
    engine.destroy()
    return told


@pytest.mark.parametrize("stage", STAGES)
def test_embeddings_may_be_resized(stage: int, ranks: RankPools) -> None:
    """A removed parameter is logged once."""
    told = ranks(2).run(resize, stage)
    assert [len(lines) for lines in told] == [1, 0]
    assert re.match(
        r"parameters were removed from the model after initialize: embedding\.weight\.", told[0][0]
    )


def go_on_from_a_checkpoint(stage: int, folder: str) -> None:
    def fresh() -> Any:
        engine = engine_of(stage, Model())
        train(engine, range(1))
        members = _one_block_more(engine.module, comm.get_rank())
        engine.optimizer.add_param_group({"params": members, "lr": 0.25})
        return engine

    through = fresh()
    train(through, range(1, 3))
    through.save_checkpoint(folder)
    train(through, range(3, 5))
    expected = through.state_dict()
    through.destroy()
    again = fresh()
    again.load_checkpoint(folder)
    train(again, range(3, 5))
    assert_equal(again.state_dict(), expected)
    again.destroy()


def test_a_checkpoint_contains_later_groups(ranks: RankPools, tmp_path: Path) -> None:
    for stage in (0, 3):
        ranks(2).run(go_on_from_a_checkpoint, stage, str(tmp_path / str(stage)))


def add_to_compiled(stage: int) -> None:
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the compiler's own, about itself
        plain = engine_of(stage, Model())
        compiled = engine_of(stage, Model())
        compiled.compile(backend="aot_eager")
        for engine in (plain, compiled):
            train(engine, range(2))
            with zero.GatheredParameters(engine.module.parameters()):
                members = [*_in_blocks(engine.module, 0), *_of_the_root(engine.module, 0)]
            engine.optimizer.add_param_group({"params": members})
            train(engine, range(2, 4))
        assert_close(compiled.state_dict(), plain.state_dict())
        plain.destroy()
        compiled.destroy()
        torch.compiler.reset()


@pytest.mark.slow
def test_a_compiled_model_takes_them_up(ranks: RankPools) -> None:
    ranks(2).run(add_to_compiled, 3)


# ---- misuse --------------------------------------------------------------------------------------


def add_wrongly(fault: str) -> HadalError:
    model = nn.Sequential(nn.Linear(6, 4))
    engine = engine_of(3, model)
    rank = comm.get_rank()
    wide = 4 + (fault == "other shape" and rank == 1)
    new = nn.Linear(4, wide, device="meta" if fault == "meta" and rank == 1 else None)
    model.append(new)
    if fault == "other dtype" and rank == 1:
        model[1].double()
    if fault == "more" and rank == 1:
        model.register_parameter("more", nn.Parameter(torch.ones(3)))
    with pytest.raises(HadalError) as caught:
        engine.optimizer.add_param_group({"params": new.parameters()})
    assert len(engine.optimizer.param_groups) == 1
    model.pop(1)
    if hasattr(model, "more"):
        del model.more
    train(engine, range(2))
    engine.destroy()
    return caught.value


@pytest.mark.parametrize(
    ("fault", "kind", "told"),
    [
        ("other shape", MismatchError, r"the new 1\.weight is \(4, 4\).*\(5, 4\).*on rank 1"),
        ("other dtype", MismatchError, r"the new 1\.weight is .*float32.*float64.*on rank 1"),
        ("more", MismatchError, r"the new more is nothing on rank 0"),
        ("meta", ModelError, r"rank 1: parameter 1\.weight is on meta"),
    ],
)
def test_faults_are_reported_before_anything_changes(
    fault: str, kind: type[HadalError], told: str, ranks: RankPools
) -> None:
    for error in ranks(2).run(add_wrongly, fault):
        assert isinstance(error, (kind, MismatchError))
        assert re.search(told, str(error)), str(error)
