"""A program that is planned: what its stand-in for an engine answers and takes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
import torch.distributed as dist
from engine.parts import Megatron
from torch import nn

import hadal
from hadal.comm import Ranks
from hadal.comm.imagined import ImaginedWorld
from hadal.engine import assemble
from hadal.engine.clusters import cluster_of
from hadal.engine.foresight import Foresight, Planner
from hadal.engine.pipeline import PipelineEngine
from hadal.engine.planned_program import plan_instead
from hadal.errors import UsageError
from hadal.pipeline import LayerSpec, PipelineModule
from hadal.zero.estimate import counted

CONFIG = {"train_batch_size": 32, "gradient_accumulation_steps": 2}


class _End(Exception):
    pass


class Scaled(nn.Linear):
    def forward(self, values: torch.Tensor, *, by: float) -> torch.Tensor:  # type: ignore[override]
        return super().forward(values) * by


def forwarded(*given: Any, requested: Any) -> NoReturn:
    raise _End(*given, requested)


@pytest.fixture
def begin(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Any]]:
    monkeypatch.setattr(assemble, "initialize", assemble.initialize)
    monkeypatch.setattr(hadal.zero.Init, "__init__", hadal.zero.Init.__init__)
    plan_instead(forwarded)
    with ImaginedWorld(0, 4):
        yield lambda config=CONFIG, **given: assemble.initialize(config=config, **given)


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
    found = hadal.plan(*end.value.args[:3], cluster="h100x4")
    assert found.time is not None and found.rank.config.train_micro_batch_size_per_gpu == 4


def planned(given: tuple[Any, ...]) -> Foresight:
    model, raw, batch, requested = given
    return Planner(model, cluster_of("h100x4"), 1, requested=requested).plan(raw, batch)


def test_a_module_in_stages_is_planned_whole(begin: Callable[..., Any]) -> None:
    module = PipelineModule(
        [LayerSpec(nn.Linear, 4, 4), torch.tanh, LayerSpec(nn.Linear, 4, 8), nn.Linear(8, 2)],
        num_stages=2,
        loss_fn=nn.functional.cross_entropy,
    )
    rows = [{"x": torch.ones(4), "y": 1}] * 16
    keys = {"optimizer": {"type": "AdamW"}, "pipeline": {"schedule": "zero_bubble"}}
    engine, *_ = begin(
        model=module,
        training_data=rows,
        config=CONFIG | keys,
        pipeline_engine_type=PipelineEngine,
    )
    assert isinstance(engine, PipelineEngine) and engine.micro_batches == 2
    assert engine.is_first_stage() and engine.grid.get_data_parallel_world_size() == 2
    engine.set_batch_fn(lambda row: (row["x"], row["y"]))
    with pytest.raises(_End) as end:
        engine.train_batch()
    found = planned(end.value.args)
    assert found.time is not None and found.time.samples == 32
    assert len(found.stages) == len(found.whole) == 2 and found.time.parts["bubble"].seconds > 0
    assert counted(*found.whole).numel == 20 + 40 + 18
    (engine, *_) = begin(model=module)
    with pytest.raises(_End) as end:
        engine.train_batch(iter([{"input": 1}]))
    with pytest.raises(UsageError, match="a micro-batch is a dict; expected a pair"):
        planned(end.value.args)


class Sliced(nn.Linear):
    """A slice of a layer, as a program cuts it."""

    def __init__(self, mpu: Any) -> None:
        self.ranks = mpu.get_model_parallel_group()
        super().__init__(64, 64 // mpu.get_model_parallel_world_size())

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        parts = super().forward(values)
        dist.all_reduce(parts.detach().clone(), group=self.ranks)
        return parts


def test_the_program_s_own_groups_are_planned(begin: Callable[..., Any]) -> None:
    slices, data = Ranks.world().in_blocks(2)
    mpu = Megatron(data, slices)
    keys = {"zero_optimization": {"stage": 1}, "optimizer": {"type": "AdamW"}}
    engine, *_ = begin(model=Sliced(mpu), mpu=mpu, config=CONFIG | keys)
    assert engine.train_micro_batch_size_per_gpu() == 8
    with pytest.raises(_End) as end:
        engine(torch.ones(8, 64))
    found = planned(end.value.args)
    assert found.time is not None and found.time.samples == 32
    assert found.time.parts["slices"].wire_nbytes == 2 * 8 * 32 * 4
    assert "the same parameters" in next(n.how for n in found.kinds if n.kind == "communicators")
    states = {need.kind: need.held.device for need in found.kinds}
    assert states["optimizer"] == pytest.approx(states["weights"], rel=0.01)  # 2 moments, 2 ranks


def test_a_model_of_zero_init_stays_whole(begin: Callable[..., Any]) -> None:
    with hadal.zero.Init(config_dict_or_path={"train_batch_size": 1}):
        model = nn.Linear(4, 4)
    assert type(model.weight) is nn.Parameter and model.weight.shape == (4, 4)
    engine, *_ = begin(model=model)
    with pytest.raises(_End) as end:
        engine(torch.ones(4, 4))
    assert hadal.plan(*end.value.args[:3], cluster="h100x4").time is not None


def test_the_program_s_own_optimizer_is_planned(begin: Callable[..., Any]) -> None:
    model = nn.Linear(4, 4)
    engine, *_ = begin(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(_End) as end:
        engine(torch.ones(4, 4))
    found = hadal.plan(*end.value.args[:3], cluster="h100x4")
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
    assert hadal.plan(*end.value.args[:3], cluster="h100x4").rank.moments == moments


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
