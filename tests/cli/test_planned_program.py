"""A program that is planned: what its stand-in for an engine answers and takes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
from torch import nn

import hadal
from hadal.engine import assemble
from hadal.engine.planned_program import MICRO, plan_instead

CONFIG = {"train_batch_size": 32, "gradient_accumulation_steps": 2}


class _End(Exception):
    pass


class Scaled(nn.Linear):
    def forward(self, values: torch.Tensor, *, by: float) -> torch.Tensor:  # type: ignore[override]
        return super().forward(values) * by


def forwarded(*given: Any) -> NoReturn:
    raise _End(*given)


@pytest.fixture
def begin(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Any]]:
    monkeypatch.setattr(assemble, "initialize", assemble.initialize)
    monkeypatch.setattr(hadal.zero.Init, "__init__", hadal.zero.Init.__init__)
    plan_instead(forwarded, ranks=4)
    yield lambda **given: assemble.initialize(**{"config": CONFIG, **given})


def test_batches_are_those_of_the_ranks(begin: Callable[..., Any]) -> None:
    engine, _, loader, _ = begin(model=nn.Linear(4, 4), training_data=torch.ones(8, 4))
    assert engine.train_micro_batch_size_per_gpu() == 4
    assert engine.gradient_accumulation_steps() == 2
    assert engine.train_batch_size() == 32
    assert next(iter(loader)).shape == (4, 4)
    assert next(iter(engine.deepspeed_io(torch.ones(8, 4)))).shape == (4, 4)


def test_arguments_by_place_and_by_name(begin: Callable[..., Any]) -> None:
    engine, *_ = begin(model=Scaled(4, 4))
    with pytest.raises(_End) as end:
        engine(torch.ones(4, 4), by=2.0)
    found = hadal.plan(*end.value.args, cluster="h100x4")
    assert found.time is not None and found.rank.config.train_micro_batch_size_per_gpu == 4


def test_a_batch_of_a_pipeline(begin: Callable[..., Any]) -> None:
    engine, *_ = begin(model=nn.Linear(4, 4))
    with pytest.raises(_End) as end:
        engine.train_batch(iter([{"input": 1}]))
    assert end.value.args[2] == {"input": 1}


def test_a_model_of_zero_init_stays_whole(begin: Callable[..., Any]) -> None:
    with hadal.zero.Init(config_dict_or_path={"train_batch_size": 1}):
        model = nn.Linear(4, 4)
    assert type(model.weight) is nn.Parameter and model.weight.shape == (4, 4)
    engine, *_ = begin(model=model)
    with pytest.raises(_End) as end:
        engine(torch.ones(4, 4))
    assert hadal.plan(*end.value.args, cluster="h100x4").time is not None


def test_the_program_s_own_optimizer_is_planned(begin: Callable[..., Any]) -> None:
    model = nn.Linear(4, 4)
    engine, *_ = begin(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(_End) as end:
        engine(torch.ones(4, 4))
    found = hadal.plan(*end.value.args, cluster="h100x4")
    states = {need.kind: need.held.device for need in found.kinds}
    assert states["optimizer"] <= 20 * 4  # masters; no moments


@pytest.mark.parametrize(("momentum", "moments"), [(0.0, 0), (0.9, 1)])
def test_an_own_optimizer_replaces_the_section_with_its_state(
    momentum: float, moments: int, begin: Callable[..., Any]
) -> None:
    model, config = nn.Linear(4, 4), {**CONFIG, "optimizer": {"type": "Adam"}}
    own = torch.optim.SGD(model.parameters(), lr=0.1, momentum=momentum)
    engine, *_ = begin(model=model, optimizer=own, config=config)
    with pytest.raises(_End) as end:
        engine(torch.ones(4, 4))
    assert hadal.plan(*end.value.args, cluster="h100x4").rank.moments == moments


def test_an_engine_has_what_programs_ask_for(begin: Callable[..., Any], tmp_path: Path) -> None:
    """Under DeepSpeed's name too."""
    from hadal.compat.engine import DeepSpeedEngine

    config = {
        **CONFIG,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.5}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 0.5}},
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 3},
    }
    model = nn.Linear(4, 4)
    model.note = "mine"  # type: ignore[assignment]
    engine, optimizer, _, schedule = begin(model=model, config=config, engine_type=DeepSpeedEngine)
    assert isinstance(engine, DeepSpeedEngine) and engine.note == "mine"
    assert engine.optimizer.param_groups is optimizer.param_groups
    assert len(optimizer.param_groups[0]["params"]) == 2
    assert engine.lr_scheduler is schedule and schedule.get_last_lr() == engine.get_lr()
    assert (engine.global_rank, engine.local_rank, engine.device.type) == (0, 0, "cpu")
    assert (engine.dp_world_size, engine.mp_world_size, engine.seq_dp_world_size) == (4, 1, 4)
    assert (engine.global_steps, engine.micro_steps, engine.skipped_steps) == (0, 0, 0)
    assert not engine.is_gradient_accumulation_boundary() and engine.loss_scale == 1.0
    assert engine.zero_optimization_stage() == 3 and engine.bfloat16_enabled()
    assert not engine.was_step_applied() and engine.get_global_grad_norm() is None
    assert engine.load_checkpoint(tmp_path) == (None, {})
    engine.save_checkpoint(tmp_path)
    engine.compile()
    engine.zero_grad()
    assert not engine.monitor.enabled and not [*tmp_path.iterdir()]
    assert {name for name, _ in engine.named_parameters()} == {"module.weight", "module.bias"}
    with engine.no_sync(), pytest.raises(hadal.errors.UsageError, match="before its first forward"):
        engine.backward(torch.ones(()))


def test_evaluation_comes_before_training(begin: Callable[..., Any]) -> None:
    model = nn.Linear(4, 4)
    engine, *_ = begin(model=model, config={**CONFIG, "bf16": {"enabled": True}})
    batch = torch.ones(4, 4, dtype=torch.bfloat16)
    with torch.no_grad():
        assert engine(batch).shape == (4, 4)
    assert engine.eval()(batch).shape == (4, 4)
    engine.train()
    with pytest.raises(_End):
        engine.module(batch)
    with torch.no_grad():
        assert hadal.plan(model, CONFIG, batch.float(), cluster="h100x4").time is not None


@pytest.mark.parametrize(
    ("batch", "sizes"),
    [
        ({"train_batch_size": 32}, (4, 2)),  # for the planned ranks
        ({"train_batch_size": 12}, (4, 3)),  # for the program's one rank
        ({"train_batch_size": 8, "gradient_accumulation_steps": 2}, (4, 2)),
        ({"gradient_accumulation_steps": 5}, (4, 5)),
    ],
)
def test_a_batch_that_the_program_counted_for_one_rank(
    batch: dict[str, int], sizes: tuple[int, int], begin: Callable[..., Any]
) -> None:
    engine, *_ = begin(model=nn.Linear(4, 4), config={MICRO: 4, **batch})
    assert engine.train_micro_batch_size_per_gpu() == sizes[0]
    assert engine.gradient_accumulation_steps() == sizes[1]


def test_several_engines_are_told(
    begin: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    begin(model=nn.Linear(4, 4))
    assert "is planned" not in caplog.text
    begin(model=nn.Linear(4, 4))
    assert "the engine that trains first is planned" in caplog.text


def test_parameters_that_are_left_out_are_told(
    begin: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    model = nn.Linear(4, 4)
    begin(model=model, model_parameters=[{"params": [model.bias]}])
    assert "1 parameters that require gradients are in no param group" in caplog.text
    assert "weight" in caplog.text
    caplog.clear()
    begin(model=model, model_parameters=model.parameters())
    begin(model=model)
    assert "no param group" not in caplog.text
