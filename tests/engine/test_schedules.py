"""Schedules in training: once for each applied update, the momentum too, and across a break."""

from __future__ import annotations

import argparse
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from ranks import RankPools, on_ranks
from torch import nn
from torch.optim import Optimizer, lr_scheduler as torchs

import hadal
from engine.toys import (
    ROWS,
    alone,
    assert_close,
    backward_alone,
    batch_of,
    engine_of,
    loss_of,
    model_of,
    train,
)
from hadal import comm
from hadal.cli.explain import _notes
from hadal.config import load_config
from hadal.engine.update import step_schedule
from hadal.errors import OptimizerError, UsageError
from hadal.optim.schedules import OneCycle
from hadal.plugins.pipeline import PipelineModule

CYCLE = {"cycle_min_lr": 1e-3, "cycle_max_lr": 1e-2, "cycle_first_step_size": 4}
DECAYS = {**CYCLE, "decay_step_size": 1, "decay_lr_rate": 0.5, "decay_mom_rate": 0.01}
WARMUP = {"warmup_num_steps": 6, "warmup_max_lr": 0.02}
SECTIONS: dict[str, dict[str, Any]] = {
    "LRRangeTest": {"lr_range_test_min_lr": 1e-3, "lr_range_test_step_size": 3},
    "OneCycle": DECAYS,
    "WarmupLR": WARMUP,
    "WarmupDecayLR": {**WARMUP, "total_num_steps": 9},
    "WarmupCosineLR": {"warmup_num_steps": 4, "total_num_steps": 9},
    "StepLR": {"step_size": 2},
    "MultiStepLR": {"milestones": [2, 5, 6]},
    "ConstantLR": {"total_iters": 6},
    "LinearLR": {"total_iters": 7},
    "ExponentialLR": {"gamma": 0.5},
    "PolynomialLR": {"total_iters": 9},
    "CosineAnnealingLR": {"T_max": 7},
    "CosineAnnealingWarmRestarts": {"T_0": 3, "T_mult": 2},
    "CyclicLR": {"base_lr": 1e-3, "max_lr": 1e-2, "step_size_up": 3},
    "OneCycleLR": {"max_lr": 0.02, "total_steps": 20},
}


def halved_twice(optimizer: Optimizer) -> Any:
    return torchs.SequentialLR(
        optimizer,
        [torchs.MultiStepLR(optimizer, [2, 3, 7], 0.5), torchs.ExponentialLR(optimizer, 0.9)],
        [6],
    )


MAKERS = {
    "LambdaLR": lambda its: torchs.LambdaLR(its, lambda n: 0.9**n),
    "MultiplicativeLR": lambda its: torchs.MultiplicativeLR(its, lambda n: 1 - 0.1 * (n % 3)),
    "SequentialLR": halved_twice,
    "ChainedScheduler": lambda its: torchs.ChainedScheduler(
        [torchs.StepLR(its, 3), torchs.LinearLR(its, total_iters=6)], optimizer=its
    ),
}


def made(name: str) -> Any:
    if name in MAKERS:
        return engine_of(1, wishes={"lr_scheduler": MAKERS[name]})
    return engine_of(1, scheduler={"type": name, "params": SECTIONS[name]})


def seen(engine: Any, steps: range) -> list[Any]:
    """The loss that each step began with, and the rate and betas that it left."""
    found = []
    for step in steps:
        (loss,) = train(engine, range(step, step + 1))
        group = engine.optimizer.param_groups[0]
        found.append((loss.item(), group["lr"], group["betas"]))
    return found


@pytest.mark.slow
@on_ranks(1)
def test_every_schedule_resumes_after_a_break(tmp_path: Path) -> None:
    for name in [*SECTIONS, *MAKERS]:
        whole = made(name)
        seen(whole, range(4))
        whole.save_checkpoint(tmp_path, tag=name)
        expected = seen(whole, range(4, 10))
        again = made(name)
        again.load_checkpoint(tmp_path, tag=name)
        assert seen(again, range(4, 10)) == expected, name
        again.load_checkpoint(tmp_path, tag=name)  # back again, on a schedule that has gone on
        assert seen(again, range(4, 10)) == expected, name
        assert len({rate for _, rate, _ in expected}) > 1, name
        whole.destroy(), again.destroy()


@pytest.mark.parametrize("stage", [0, 3])
@on_ranks(2)
def test_the_momentum_reaches_the_step(stage: int) -> None:
    """The betas that OneCycle writes are those that Adam steps with."""
    engine = engine_of(stage, scheduler={"type": "OneCycle", "params": DECAYS})
    train(engine, range(6))
    plain = model_of()
    optimizer = torch.optim.AdamW(plain.parameters(), 0.01, weight_decay=0.0)
    schedule = OneCycle(optimizer, **DECAYS)
    fixed = alone(model_of(), [[step] for step in range(6)], lr=0.01)
    for step in range(6):
        optimizer.zero_grad()
        backward_alone(plain, [step])
        optimizer.step()
        schedule.step()
    assert_close(engine.state_dict(), dict(plain.state_dict()))
    assert not torch.allclose(engine.state_dict()["0.weight"], fixed["0.weight"], rtol=1e-3)
    assert engine.optimizer.param_groups[0]["betas"] == optimizer.param_groups[0]["betas"]
    engine.destroy()


@on_ranks(2)
def test_a_skipped_update_leaves_the_schedule() -> None:
    """A skipped update does not move the schedule; micro-steps do not either."""
    engine = engine_of(
        2,
        fp16={"enabled": True, "initial_scale_power": 4},
        gradient_accumulation_steps=2,
        scheduler={"type": "LRRangeTest", "params": SECTIONS["LRRangeTest"]},
    )
    rates = []
    for step in range(8):
        inputs, targets = batch_of(step)
        loss = loss_of(engine(inputs.half()), targets)
        engine.backward(loss * float("inf") if step in (2, 5) else loss)
        engine.step()
        rates.append(engine.get_lr()[0])
    assert (engine.global_steps, engine.skipped_steps) == (4, 2)
    assert engine.lr_scheduler.last_batch_iteration == 1
    assert rates == pytest.approx([1e-3 * (1 + n / 3) for n in (0, 1, 1, 1, 1, 1, 1, 2)])


class Silent:
    """Not a schedule at all."""


@on_ranks(1)
def test_a_caller_may_pass_its_own_objects() -> None:
    for maker, told in [
        (lambda its: Silent(), "which has no step"),
        (torchs.StepLR(torch.optim.SGD(model_of().parameters(), 0.1), 1), "without the optimizer"),
    ]:
        with pytest.raises(OptimizerError, match=told):
            engine_of(1, wishes={"lr_scheduler": maker})
    # The caller's takes the place of the section's.
    section = {"type": "WarmupLR", "params": WARMUP}
    engine = engine_of(1, wishes={"lr_scheduler": MAKERS["LambdaLR"]}, scheduler=section)
    assert type(engine.lr_scheduler) is torchs.LambdaLR


PLATEAU = {"mode": "min", "factor": 0.5, "patience": 1}
VALIDATED = (None, 1.0, 2.0, 2.0, None, 2.0, 2.0, 0.5)


def on_a_plateau(folder: str, brought: bool) -> list[float]:
    """The rate after each update; each rank has a metric of its own, whose mean counts."""

    def engine() -> Any:
        if brought:
            wishes = {"lr_scheduler": lambda its: torchs.ReduceLROnPlateau(its, **PLATEAU)}
            return engine_of(1, wishes=wishes, fp16={"enabled": True, "initial_scale_power": 4})
        return engine_of(1, scheduler={"type": "ReduceLROnPlateau", "params": PLATEAU})

    one, rates = engine(), []
    for step, value in enumerate(VALIDATED):
        if step == 3:
            one.save_checkpoint(folder)
            one = engine()
            one.load_checkpoint(folder)
        inputs = batch_of(step)[0]
        loss = one(inputs.half() if brought else inputs).float().square().mean()
        # What is skipped counts as well: the metric is no update's.
        one.backward(loss * (torch.inf if brought and step == 5 else 1.0))
        one.step(metric=None if value is None else torch.tensor(value + comm.get_rank() - 0.5))
        rates.append(one.get_lr()[0])
    one.destroy()
    return rates


@pytest.mark.fast_cells("False")
@pytest.mark.parametrize("brought", [False, True])
def test_a_schedule_that_follows_a_metric(brought: bool, ranks: RankPools, tmp_path: Path) -> None:
    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], 0.01)
    plain, wanted = torchs.ReduceLROnPlateau(optimizer, **PLATEAU), []
    for value in VALIDATED:
        if value is not None:
            plain.step(value)
        wanted.append(optimizer.param_groups[0]["lr"])
    assert len(set(wanted)) == 3
    for rates in ranks(2).run(on_a_plateau, str(tmp_path), brought):
        assert rates == wanted


def from_the_command_line() -> list[list[float]]:
    parser = hadal.add_tuning_arguments(hadal.add_config_arguments(argparse.ArgumentParser()))
    line = "--lr_schedule WarmupDecayLR --warmup_max_lr 0.5 --warmup_num_steps 2"
    args = parser.parse_args([*line.split(), "--total_num_steps", "4", "--warmup_type", "linear"])
    engine = engine_of(1, wishes={"args": args})
    rates = [engine.get_lr()]
    for step in range(5):
        train(engine, range(step, step + 1))
        rates.append(engine.get_lr())
    return rates


def test_a_schedule_from_the_command_line_trains(ranks: RankPools) -> None:
    for rates in ranks(2).run(from_the_command_line):
        assert rates == [[0.0], [0.0], [0.25], [0.5], [0.25], [0.0]]


class BySamples:
    """A schedule like Megatron's: each step takes the samples that have passed since the last."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self.seen: list[int] = []

    def step(self, increment: int) -> None:
        self.seen.append(increment)
        for group in self.optimizer.param_groups:
            group["lr"] = 0.01 / (1 + sum(self.seen))

    def state_dict(self) -> dict[str, Any]:
        return {"seen": [*self.seen]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seen = self.seen + state["seen"]  # it adds to what is there


class OfItsOwn:
    """A schedule that must not take a number of samples for its loss."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.seen: list[float] = []

    def step(self, loss: float) -> None:
        self.seen.append(loss)

    def state_dict(self) -> dict[str, Any]:
        return {}


@pytest.mark.parametrize("given", [None, {"increment": 5}], ids=["counted", "given"])
@pytest.mark.parametrize("accumulation", [1, 3])
@on_ranks(2)
def test_a_schedule_may_count_samples(accumulation: int, given: dict[str, Any] | None) -> None:
    engine = engine_of(
        2, wishes={"lr_scheduler": BySamples}, gradient_accumulation_steps=accumulation
    )
    for step in range(2 * accumulation):
        engine.backward(loss_of(engine(batch_of(step)[0]), batch_of(step)[1]))
        with pytest.raises(UsageError, match=r"BySamples\.step: got an unexpected .*'epoch'"):
            engine.step(schedule_arguments={"increment": 1, "epoch": 1})
        engine.step(schedule_arguments=given)
    wanted = given["increment"] if given else engine.train_batch_size()
    assert engine.lr_scheduler.seen == [wanted] * 2
    assert engine.get_lr() == [0.01 / (1 + 2 * wanted)]
    engine.destroy()
    engine = engine_of(2)
    engine.backward(loss_of(engine(batch_of(0)[0]), batch_of(0)[1]))
    with pytest.raises(UsageError, match="there is no schedule"):
        engine.step(schedule_arguments={"increment": 1})
    engine.step()
    engine.destroy()
    engine = engine_of(2, wishes={"lr_scheduler": OfItsOwn})
    engine.backward(loss_of(engine(batch_of(0)[0]), batch_of(0)[1]))
    before = engine.state_dict()
    with pytest.raises(UsageError, match=r"OfItsOwn\.step: missing .*'loss'\. Pass"):
        engine.step()
    assert_close(engine.state_dict(), before)
    engine.step(schedule_arguments={"loss": 0.5})
    assert engine.lr_scheduler.seen == [0.5]
    engine.destroy()


@on_ranks(2)
def test_a_schedule_that_adds_what_it_loads_resumes(tmp_path: Path) -> None:
    engine = engine_of(2, wishes={"lr_scheduler": BySamples}, gradient_accumulation_steps=1)
    for step in range(2):
        engine.backward(loss_of(engine(batch_of(step)[0]), batch_of(step)[1]))
        engine.step()
    engine.save_checkpoint(tmp_path)
    other = engine_of(2, wishes={"lr_scheduler": BySamples}, gradient_accumulation_steps=1)
    other.load_checkpoint(tmp_path)
    assert other.lr_scheduler.seen == engine.lr_scheduler.seen == [engine.train_batch_size()] * 2
    assert other.get_lr() == engine.get_lr()
    training = SimpleNamespace(schedule=other.lr_scheduler, optimizer=other.optimizer)
    undo = step_schedule(training, 7, {})  # type: ignore[arg-type]
    assert other.lr_scheduler.seen == [*engine.lr_scheduler.seen, 7]
    undo()
    assert other.lr_scheduler.seen == engine.lr_scheduler.seen
    assert other.get_lr() == engine.get_lr()
    engine.destroy(), other.destroy()


@on_ranks(2)
def test_a_schedule_of_a_model_in_stages_may_count_samples() -> None:
    model = PipelineModule([nn.Linear(4, 4) for _ in range(2)], 2, loss_fn=loss_of)
    engine: Any = engine_of(0, model, {"lr_scheduler": BySamples}, gradient_accumulation_steps=3)
    batches = [(torch.randn(ROWS, 4), torch.randn(ROWS, 4)) for _ in range(6)]
    for _ in range(2):
        engine.train_batch(data_iter=iter(batches))
    assert engine.lr_scheduler.seen == [3 * ROWS] * 2
    engine.destroy()


# ---- rates that a schedule replaces --------------------------------------------------------------


DECAY = {"type": "WarmupDecayLR", "params": {"total_num_steps": 9}}
ONE_RATE = "the default 0.001 replaces the optimizer's learning rate 0.1; set it to 0.1 to keep it"
TWO_RATES = (
    "0.001 replaces the optimizer's learning rates 0.02, 0.0003; set it to [0.02, 0.0003] to keep"
    " them"
)


@pytest.mark.parametrize(
    ("schedule", "params", "rates", "told"),
    [
        ("WarmupDecayLR", {"total_num_steps": 9}, [0.1], f"warmup_max_lr: {ONE_RATE}"),
        ("LRRangeTest", {}, [0.1], f"lr_range_test_min_lr: {ONE_RATE}"),
        ("WarmupLR", {"warmup_max_lr": 0.001}, [0.02, 0.0003], f"warmup_max_lr: {TWO_RATES}"),
        ("OneCycle", {**CYCLE, "cycle_max_lr": 0.001}, [0.02, 0.0003], TWO_RATES),
        ("OneCycleLR", {"max_lr": 0.001, "total_steps": 9}, [0.02, 0.0003], TWO_RATES),
        ("CyclicLR", {"base_lr": 1e-4, "max_lr": 0.001}, [0.02, 0.0003], TWO_RATES),
        ("WarmupLR", {}, [0.02, 0.0003], ""),
        ("WarmupCosineLR", {"total_num_steps": 9}, [0.02, 0.0003], ""),
        ("WarmupLR", {"warmup_max_lr": [0.3, 0.4]}, [0.02, 0.0003], ""),
        ("WarmupLR", {"warmup_max_lr": 0.3}, [0.3, 0.3], ""),
        ("StepLR", {"step_size": 2}, [0.02, 0.0003], ""),
    ],
)
def test_rates_of_the_program_that_a_schedule_replaces_are_told(
    schedule: str,
    params: dict[str, Any],
    rates: list[float],
    told: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = nn.Sequential(*[nn.Linear(2, 2) for _ in rates])
    groups = [
        {"params": part.parameters(), "lr": lr} for part, lr in zip(model, rates, strict=True)
    ]
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "scheduler": {"type": schedule, "params": params},
    }
    engine, *_ = hadal.initialize(model=model, config=config, optimizer=torch.optim.AdamW(groups))
    engine.destroy()
    assert ("replaces" in caplog.text) == bool(told)
    assert told in caplog.text


@pytest.mark.parametrize(
    ("optimizer", "told"),
    [
        ({"type": "AdamW", "params": {"lr": 0.1}}, ONE_RATE),
        ({"type": "AdamW"}, ""),
        ({"type": "Muon", "params": {"lr": 0.1}}, ONE_RATE),
        (
            {"type": "Muon"},
            "the default 0.001 replaces the optimizer's learning rates 0.02, 0.0003; set it to"
            " [0.02, 0.0003] to keep them",
        ),
        ({"type": "Muon", "params": {"muon_lr": 0.001, "lr": 0.001}}, ""),
    ],
)
def test_explain_says_the_same_as_initialize(
    optimizer: dict[str, Any], told: str, caplog: pytest.LogCaptureFixture
) -> None:
    config = {"train_micro_batch_size_per_gpu": 1, "optimizer": optimizer, "scheduler": DECAY}
    engine, *_ = hadal.initialize(model=nn.Linear(2, 2), config=config)
    engine.destroy()
    assert ("replaces" in caplog.text) == bool(told)
    assert told in caplog.text
    notes = [note for note in _notes(load_config(config)) if "replaces" in note]
    assert notes == [f"scheduler.params.warmup_max_lr: {told}"] * bool(told)
