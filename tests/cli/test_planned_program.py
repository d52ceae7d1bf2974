"""A program that is planned: what its stand-in for an engine answers and takes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import pytest
import torch
from torch import nn

import hadal
from hadal.engine import assemble
from hadal.engine.planned_program import plan_instead

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
    yield lambda **given: assemble.initialize(config=CONFIG, **given)


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
    assert caplog.text == ""
