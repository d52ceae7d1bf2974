"""Param groups added later: thawed parameters train as in torch, and nothing else moves."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import every
from hypothesis import given, settings, strategies as st
from ranks import RankPools, RanksFailed, on_ranks
from torch import nn
from torch.optim.lr_scheduler import StepLR

from engine.toys import (
    ByNorm,
    assert_close,
    assert_equal,
    backward,
    batch_of,
    engine_of,
    loss_of,
    model_of,
    train,
)
from hadal import comm
from hadal.errors import HadalError, MismatchError, ModelError, OptimizerError, UsageError
from hadal.optim.lamb import Lamb
from hadal.optim.muon import Muon
from hadal.zero import GatheredParameters

STAGES = [0, 1, 2, 3]
ACCUMULATION = 2


# Smooth ones: at eps = 1e-8 the order of a sum alone turns an update around.
KINDS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "AdamW": lambda groups: torch.optim.AdamW(groups, lr=0.02, eps=1e-3, weight_decay=0.1),
    "SGD": lambda groups: torch.optim.SGD(groups, lr=0.1, momentum=0.9),
    "Lamb": lambda groups: Lamb(groups, lr=0.02, eps=1e-3),
    "ByNorm": lambda groups: ByNorm(groups, lr=0.05),
    # Its five steps make up to 500 times of a rounding in a small singular value: a small rate.
    "Muon": lambda groups: Muon(groups, lr=0.002, eps=1e-3),
}


class Deep(nn.Module):
    """Blocks that repeat, so that they are units of their own, between two single layers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first = nn.Linear(6, 5)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(5, 5), nn.Sequential(nn.Tanh(), nn.LayerNorm(5)))
            for _ in range(2)
        )
        self.last = nn.Linear(5, 4)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.first(inputs)
        for block in self.blocks:
            hidden = block(hidden)
        return self.last(hidden)


def chosen(model: nn.Module, *names: str) -> list[nn.Parameter]:
    return [p for name, p in model.named_parameters() if name.startswith(names)]


# Parameters trained from the start, and those of each later group. Some are in no group.
START = ("last", "blocks.1.0.weight")
LATER: list[tuple[tuple[str, ...], dict[str, Any]]] = [
    (("blocks.1.1", "blocks.0.0.weight"), {"lr": 0.001}),
    (("blocks.0", "first.bias"), {}),
]
IN_NO_GROUP = ("blocks.1", "first.bias")


def prepared(model: nn.Module) -> list[nn.Parameter]:
    """Freeze what is neither trained at first nor merely in no group."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.startswith((*START, *IN_NO_GROUP)))
    return chosen(model, *START)


def groups_for(kind: str, members: list[nn.Parameter], options: dict[str, Any]) -> list[Any]:
    """One group; Muon's say who steps them, so theirs are two."""
    if kind != "Muon":
        return [{"params": members, **options}]
    made = [
        {"params": [p for p in members if (p.dim() > 1) == uses], "use_muon": uses, **options}
        for uses in (True, False)
    ]
    return [group for group in made if group["params"]]


def add_later(kind: str, optimizer: Any, model: nn.Module, number: int, trained: set[Any]) -> None:
    names, options = LATER[number]
    members = [p for p in chosen(model, *names) if p not in trained]
    trained.update(members)
    for parameter in members:
        parameter.requires_grad_(True)
    for group in groups_for(kind, members, options):
        optimizer.add_param_group(group)


def schedule_of(kind: str, optimizer: Any) -> Any:
    return StepLR(optimizer, 2, 0.5) if kind == "SGD" else None


def train_alone(kind: str) -> dict[str, torch.Tensor]:
    """One process, plain torch."""
    model, world = Deep(), comm.get_world_size()
    first = prepared(model)
    optimizer, trained = KINDS[kind](groups_for(kind, first, {})), set(first)
    schedule = schedule_of(kind, optimizer)
    for update in range(6):
        if update in (2, 4):
            add_later(kind, optimizer, model, update // 2 - 1, trained)
        model.zero_grad()
        for micro in range(ACCUMULATION):
            for rank in range(world):
                inputs, targets = batch_of(ACCUMULATION * update + micro, rank)
                (loss_of(model(inputs), targets) / (world * ACCUMULATION)).backward()
        optimizer.step()
        if schedule is not None:
            schedule.step()
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def train_later(kind: str, stage: int) -> None:
    expected = train_alone(kind)
    model = Deep()
    first = prepared(model)
    optimizer, trained = KINDS[kind](groups_for(kind, first, {})), set(first)
    wishes = {"optimizer": optimizer, "lr_scheduler": schedule_of(kind, optimizer)}
    engine = engine_of(
        stage, model, wishes, optimizer=None, gradient_accumulation_steps=ACCUMULATION
    )
    start = engine.state_dict()
    for update in range(6):
        if update in (2, 4):
            before = engine.state_dict()
            for name in LATER[update // 2 - 1][0]:
                for key in (key for key in before if key.startswith(name)):
                    was_trained = key.startswith((*START, *(LATER[0][0] if update == 4 else ())))
                    assert torch.equal(before[key], start[key]) != was_trained, key
            add_later(kind, engine.optimizer, model, update // 2 - 1, trained)
            assert_equal(engine.state_dict(), before)
        train(engine, range(ACCUMULATION * update, ACCUMULATION * (update + 1)))
    found = engine.state_dict()
    engine.destroy()
    assert torch.equal(found["first.weight"], start["first.weight"])
    assert_close(found, expected)


@pytest.mark.fast_cells("2-ByNorm")
@every(world=[1, 2], kind=list(KINDS))
def test_later_groups_train_as_in_torch(kind: str, world: int, ranks: RankPools) -> None:
    for stage in STAGES:
        ranks(world).run(train_later, kind, stage)


@pytest.mark.slow
def test_three_ranks_do_too(ranks: RankPools) -> None:
    for stage in (1, 3):
        ranks(3).run(train_later, "AdamW", stage)


# ---- any split of any bucket --------------------------------------------------------------------


def train_in_turn(stage: int, order: list[int]) -> None:
    """Parameters thawed in any order, one group for each number."""

    def play(model: nn.Module, optimizer: Any, run: Callable[[int], None]) -> None:
        parameters = list(model.parameters())
        for update in range(max(order) + 1):
            if update:
                members = [p for p, n in zip(parameters, order, strict=True) if n == update]
                for parameter in members:
                    parameter.requires_grad_(True)
                optimizer.add_param_group({"params": members, "lr": 0.05 / (update + 1)})
            run(update)

    def ready() -> tuple[nn.Module, Any]:
        model = model_of()
        for parameter, number in zip(model.parameters(), order, strict=True):
            parameter.requires_grad_(number == 0)
        members = [p for p in model.parameters() if p.requires_grad]
        return model, torch.optim.SGD(members, lr=0.05, momentum=0.9)

    plain, expected = ready()
    model, optimizer = ready()
    engine = engine_of(stage, model, {"optimizer": optimizer}, optimizer=None)
    world = comm.get_world_size()

    def step_plain(update: int) -> None:
        plain.zero_grad()
        for rank in range(world):
            inputs, targets = batch_of(update, rank)
            (loss_of(plain(inputs), targets) / world).backward()
        expected.step()

    play(plain, expected, step_plain)
    play(model, engine.optimizer, lambda update: train(engine, range(update, update + 1)) and None)
    found = engine.state_dict()
    engine.destroy()
    assert_close(found, plain.state_dict())


@pytest.mark.slow
@settings(max_examples=12)
@given(st.sampled_from(STAGES), st.lists(st.integers(0, 3), min_size=5, max_size=5))
def test_any_order_of_thawing(ranks: RankPools, stage: int, order: list[int]) -> None:
    ranks(2).run(train_in_turn, stage, [*order, 0])


# ---- bf16, schedules, checkpoints ---------------------------------------------------------------

BF16 = {
    "bf16": {"enabled": True},
    "data_types": {"grad_accum_dtype": "fp32"},
    "communication_data_type": "fp32",
}


def add_in_bf16(stage: int) -> list[float]:
    """Sixteen steps too small for bf16: only a master adds them up."""
    model = nn.Linear(4, 1)
    with torch.no_grad():
        model.weight.fill_(1.0)
        model.bias.fill_(0.0)
    model.weight.requires_grad_(False)
    optimizer = torch.optim.SGD([model.bias], lr=2.0**-11)
    engine = engine_of(stage, model, {"optimizer": optimizer}, optimizer=None, **BF16)
    model.weight.requires_grad_(True)
    engine.optimizer.add_param_group({"params": [model.weight]})
    for _ in range(16):
        engine.backward(engine(torch.ones(3, 4, dtype=torch.bfloat16)).float().mean())
        engine.step()
    engine.destroy()
    return model.weight.detach().flatten().tolist()


@pytest.mark.fast_cells("0", "3")
@pytest.mark.parametrize("stage", STAGES)
def test_later_parameters_have_masters(stage: int, ranks: RankPools) -> None:
    assert ranks(2).run(add_in_bf16, stage) == [[1 - 2.0**-7] * 4] * 2


def add_up(stage: int) -> list[float]:
    """The keys of the wire hold for later groups too: gradients are added, and none may lack."""
    model = nn.Linear(4, 1)
    with torch.no_grad():
        model.weight.fill_(1.0)
    model.weight.requires_grad_(False)
    zero = {"stage": stage, "ignore_unused_parameters": False}
    engine = engine_of(
        stage,
        model,
        {"optimizer": torch.optim.SGD([model.bias], lr=0.25)},
        optimizer=None,
        zero_optimization={**zero, "stage3_param_persistence_threshold": 0},
        gradient_allreduce_op="sum",
    )
    model.weight.requires_grad_(True)
    engine.optimizer.add_param_group({"params": [model.weight]})
    engine.backward(engine(torch.ones(3, 4)).mean())
    engine.step()
    with pytest.raises(ModelError, match=r"no gradient arrived in this update for weight"):
        engine.backward(engine.module.bias.sum())
    engine.destroy()
    return model.weight.detach().flatten().tolist()


@pytest.mark.parametrize("stage", [0, 1])
def test_later_groups_travel_as_the_others_do(stage: int, ranks: RankPools) -> None:
    assert ranks(2).run(add_up, stage) == [[0.5] * 4] * 2


@pytest.mark.parametrize("stage", [0, 3])
@on_ranks(2)
def test_parameters_in_no_group_have_the_models_dtype(stage: int) -> None:
    model = model_of()
    engine = engine_of(stage, model, {"model_parameters": model[3].parameters()}, **BF16)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    train(engine, range(2))
    engine.destroy()


def keep_rates() -> list[list[float]]:
    model = model_of()
    model[0].requires_grad_(False)
    warmup = {"type": "WarmupLR", "params": {"warmup_max_lr": 0.1, "warmup_num_steps": 2}}
    engine = engine_of(2, model, scheduler=warmup)
    rates = []
    for step in range(4):
        if step == 1:
            model[0].requires_grad_(True)
            engine.optimizer.add_param_group({"params": model[0].parameters(), "lr": 0.25})
        train(engine, range(step, step + 1))
        rates.append(engine.get_lr())
        assert len(engine.lr_scheduler.get_last_lr()) == len(rates[-1])
    engine.destroy()
    return rates


def test_a_schedule_leaves_later_groups_their_rates(ranks: RankPools) -> None:
    rates = ranks(2).run(keep_rates)[0]
    assert [len(one) for one in rates] == [1, 2, 2, 2]
    assert {one[1] for one in rates[1:]} == {0.25}
    assert rates[-1][0] == pytest.approx(0.1)


def go_on_from_a_checkpoint(stage: int, folder: str) -> None:
    def fresh() -> Any:
        model = model_of()
        model[0].requires_grad_(False)
        engine = engine_of(stage, model)
        train(engine, range(1))
        model[0].requires_grad_(True)
        engine.optimizer.add_param_group({"params": model[0].parameters(), "lr": 0.25})
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


def test_a_checkpoint_holds_later_groups(ranks: RankPools, tmp_path: Path) -> None:
    for stage in (0, 2, 3):
        ranks(2).run(go_on_from_a_checkpoint, stage, str(tmp_path / str(stage)))


# ---- misuse -------------------------------------------------------------------------------------


def refused(fault: str) -> HadalError:
    """Add an impossible group, on only one rank if possible; then continue training."""
    model = model_of()
    model[0].requires_grad_(False)
    engine = engine_of(3, model, gradient_accumulation_steps=2)
    optimizer, rank = engine.optimizer, comm.get_rank()
    model[0].weight.requires_grad_(True)
    good = {"params": [model[0].weight]}
    bad: dict[str, Any] = {
        "unknown": {"params": [nn.Parameter(torch.ones(2, 2))]},
        "in a group": {"params": [model[0].weight, model[3].bias]},
        "frozen": {"params": [model[0].bias]},
        "torch": {"params": {model[0].weight}},
        "other": {"params": [model[0].weight], "lr": 0.1 * (1 + rank)},
    }.get(fault, good)
    if fault == "accumulating":
        train(engine, range(1))
    try:
        if fault == "reading":
            with GatheredParameters([model[0].weight]):
                optimizer.add_param_group(bad)
        else:
            optimizer.add_param_group(bad if rank == 1 or fault != "torch" else good)
    except HadalError as error:
        caught = error
    except TypeError as error:  # torch's own
        assert rank == 1
        caught = HadalError(str(error))
    assert len(optimizer.param_groups) == 1
    if fault == "accumulating":
        train(engine, range(1, 2))
    optimizer.add_param_group({"params": [model[0].weight]})
    train(engine, range(2, 4))
    engine.destroy()
    return caught


@pytest.mark.parametrize(
    ("fault", "kind", "told"),
    [
        ("unknown", OptimizerError, r"parameter 0 of the group \(\(2, 2\).*add the model's own"),
        ("in a group", OptimizerError, r"3\.bias is in param group 0 already; leave it out"),
        ("frozen", OptimizerError, r"0\.bias is frozen; call its requires_grad_\(True\) first"),
        ("torch", HadalError, "Please use a list"),
        ("other", MismatchError, "different param groups: lr is 0.1 on rank 0 and 0.2 on rank 1"),
        ("accumulating", UsageError, r"call it after an engine\.step\(\)"),
        ("reading", UsageError, r"call it after an engine\.step\(\)"),
    ],
)
def test_misuse_is_reported_on_every_rank(
    fault: str, kind: type[HadalError], told: str, ranks: RankPools
) -> None:
    for error in ranks(2).run(refused, fault):
        assert isinstance(error, kind)
        assert re.search(told, str(error)), str(error)


def add_on_one_rank(stage: int) -> None:
    model = model_of()
    model[0].requires_grad_(False)
    engine = engine_of(stage, model)
    if comm.get_rank() == 0:
        model[0].requires_grad_(True)
        engine.optimizer.add_param_group({"params": model[0].parameters()})
    backward(engine, 0)


@pytest.mark.parametrize("stage", [0, 3])
def test_one_rank_that_adds_alone_gets_an_error(stage: int, ranks: RankPools) -> None:
    with pytest.raises(RanksFailed) as failed:
        ranks(2).run(add_on_one_rank, stage)
    for error in failed.value.errors.values():
        assert isinstance(error, MismatchError)
        assert "rank 0: optimizer.add_param_group" in str(error)
    assert set(failed.value.errors) == {0, 1}


def add_to_a_destroyed_engine() -> None:
    model = model_of()
    model[0].requires_grad_(False)
    engine = engine_of(0, model)
    optimizer = engine.optimizer
    engine.destroy()
    model[0].requires_grad_(True)
    with pytest.raises(OptimizerError, match="the engine was destroyed; initialize again"):
        optimizer.add_param_group({"params": [model[0].weight]})


def add_an_integer() -> None:
    model = model_of()
    model.register_parameter("steps", nn.Parameter(torch.ones(2, dtype=torch.int64), False))
    engine = engine_of(0, model)
    with pytest.raises(
        ModelError, match=r"steps is a Parameter of torch\.int64.*cannot be trained.*Freeze it"
    ):
        engine.optimizer.add_param_group({"params": [model.steps]})
    engine.destroy()


def test_parameters_in_no_bucket_cannot_be_added(ranks: RankPools) -> None:
    ranks(1).run(add_to_a_destroyed_engine)
    ranks(1).run(add_an_integer)
