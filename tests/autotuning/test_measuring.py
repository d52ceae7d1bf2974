"""Experiments in the ranks' processes: plans of candidates, and the end of what cannot win."""

from __future__ import annotations

import json
from itertools import repeat
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import on_ranks
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

import hadal
from hadal.engine.clusters import cluster_here

FEW, MANY, HUGE = 2, 6, 10**9
SLICED = {"tensor_parallel": {"autotp_size": 2}}
EXPERTS = {"expert_parallel": {"enabled": True, "autoep_size": 2}}


class Block(nn.Module):
    """A model whose loss is its output, called with positional and keyword arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.widen = nn.Linear(64, 256)
        self.narrow = nn.Linear(256, 64)

    def forward(self, values: Tensor, wanted: Tensor) -> Tensor:
        return (self.narrow(torch.relu(self.widen(values))) - wanted).square().mean()


class ByValue(Block):
    """A model whose shapes depend on values."""

    def forward(self, values: Tensor, wanted: Tensor) -> Tensor:
        kept = values.sum(dim=1) > -1e9
        return super().forward(values[kept], wanted)


def trained(model: nn.Module, stage: int, own: Any = None, **section: Any) -> int:
    """Train until the experiment ends; return the updates."""
    config = {
        "train_micro_batch_size_per_gpu": FEW,
        **({} if own else {"optimizer": {"type": "AdamW"}}),
        "zero_optimization": {"stage": stage},
        "autotuning": {"enabled": True, "start_step": 2, "end_step": 4, **section},
    }
    engine, *_ = hadal.initialize(model=model, config=config, optimizer=own)
    with pytest.raises(SystemExit) as left:
        for _ in range(9):
            values = torch.ones(FEW, 64)
            engine.backward(engine(values, wanted=values))
            engine.step()
    assert left.value.code == 0
    updates = int(engine.global_steps)
    engine.destroy()
    return updates


def trained_in_stages(**section: Any) -> None:
    """Train two stages until the experiment ends."""
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=50, num_attention_heads=2, **sizes))
    config = {
        "train_micro_batch_size_per_gpu": FEW,
        "gradient_accumulation_steps": 2,
        "optimizer": {"type": "AdamW"},
        "pipeline": {"auto": True, "stages": 2},
        "autotuning": {"enabled": True, "start_step": 1, "end_step": 2, **section},
    }
    engine, *_ = hadal.initialize(model=model, config=config)
    words = torch.zeros(FEW, 8, dtype=torch.long)
    with pytest.raises(SystemExit) as left:
        for _ in range(9):
            engine.train_batch(repeat({"input_ids": words, "labels": words}))
    assert left.value.code == 0
    engine.destroy()


def patch(stage: int, micro: int) -> dict[str, Any]:
    sizes = {"train_batch_size": 2 * micro, "train_micro_batch_size_per_gpu": micro}
    return {**sizes, "gradient_accumulation_steps": 1, "zero_optimization": {"stage": stage}}


@pytest.mark.claims("autotuning.model_info.candidates")
@on_ranks(2)
def test_a_profile_plans_candidates_as_hadal_plan_does(tmp_path: Path) -> None:
    asked = [patch(1, FEW), patch(3, MANY), patch(9, MANY), patch(1, FEW)]
    asked[3]["zero_optimization"]["offload_optimizer"] = {"device": "cpu"}
    asked += [patch(1, HUGE), patch(1, 2 * HUGE), patch(2, 2 * HUGE)]
    (tmp_path / "asked.json").write_text(json.dumps(asked))
    info = {"profile": True, "candidates": str(tmp_path / "asked.json")}
    told = tmp_path / "told.json"
    model: nn.Module
    for model in (Block(), ByValue()):
        trained(model, 3, model_info=info, model_info_path=str(told))
        plans = json.loads(told.read_text())["plans"]
        assert plans[3] == {}  # ranks that compute on the host have all of it there
        if isinstance(model, ByValue):
            assert set(plans[0]) == {"memory"}
            continue
        for (stage, micro), found in zip(((1, FEW), (3, MANY)), plans, strict=False):
            batch = torch.empty(micro, 64, device="meta")
            config = {**patch(stage, micro), "optimizer": {"type": "AdamW"}}
            cluster = cluster_here(torch.device("cpu"), 2)
            same = hadal.plan(Block(), config, (batch, batch), cluster=cluster)
            assert found["memory"] == same.total.device + same.total.host
            assert (found["samples"], found["seconds"] > 0) == (2 * micro, True)
        assert "zero_optimization.stage" in plans[2]["failure"]
        # Once a micro-batch does not fit, larger ones of the same settings are not planned.
        assert ("memory" in plans[4], plans[5], "memory" in plans[6]) == (True, {}, True)
    # A program's own optimizer is planned as what it is: without the two moments of Adam.
    trained(ByValue(), 3, torch.optim.SGD, model_info=info, model_info_path=str(told))
    less = plans[0]["memory"] - json.loads(told.read_text())["plans"][0]["memory"]
    assert less == 2 * 4 * sum(p.numel() for p in model.parameters()) // 2


@on_ranks(2)
def test_stages_and_degrees_are_planned_and_measured(tmp_path: Path) -> None:
    """The profile runs a model in stages, and plans other degrees of the model as it was."""
    degrees = [{"pipeline": {"stages": 1}}, {"pipeline": {"stages": 2}}]
    degrees += [{"pipeline": {"stages": 1}, **more} for more in (SLICED, EXPERTS)]
    asked = [{**patch(1, FEW), "gradient_accumulation_steps": 2, **each} for each in degrees]
    (tmp_path / "asked.json").write_text(json.dumps(asked))
    info = {"profile": True, "candidates": str(tmp_path / "asked.json")}
    told = tmp_path / "told.json"
    trained_in_stages(model_info=info, model_info_path=str(told))
    whole, halves, slices, experts = json.loads(told.read_text())["plans"]
    assert (whole["samples"], halves["samples"]) == (4 * FEW, 2 * FEW)
    assert halves["memory"] < whole["memory"]
    assert slices["samples"] == 2 * FEW
    assert "expert_parallel" in experts["failure"]  # the model has none
    # Stages wait between their phases, so an update takes longer than these.
    trained_in_stages(metric_path=str(told))
    found = json.loads(told.read_text())
    assert found["latency"] > found["forward"] + found["backward"] + found["step"]
    assert found["throughput"] * found["latency"] == pytest.approx(2 * FEW * 1000)


@pytest.mark.claims("autotuning.value_to_beat", "autotuning.start_step", "autotuning.end_step")
@pytest.mark.parametrize(
    ("metric", "best", "updates"),
    [
        ("throughput", 1e12, 2),
        ("throughput", 1e-6, 4),
        ("latency", 1e-6, 2),
        ("latency", 1e12, 4),
    ],
)
@on_ranks(2)
def test_what_cannot_win_ends_after_its_first_measured_update(
    tmp_path: Path, metric: str, best: float, updates: int
) -> None:
    told = tmp_path / f"{metric}{best:g}.json"
    made = trained(Block(), 1, metric=metric, value_to_beat=best, metric_path=str(told))
    found = json.loads(told.read_text())
    assert found["measured_steps"] == updates - 1
    assert found["latency"] == found["forward"] + found["backward"] + found["step"]
    assert found["throughput"] * found["latency"] == pytest.approx(2 * FEW * 1000)
    assert made in (updates - 1, updates)
