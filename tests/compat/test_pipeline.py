"""A program written for DeepSpeed's pipelines, also in Megatron's way, runs unchanged."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest
import torch
from compat.clients import load
from ranks import RankPools
from torch import Tensor, nn


def loss_of(outputs: Tensor, labels: Tensor) -> Tensor:
    return nn.functional.mse_loss(outputs, labels)


def train(folder: Path) -> list[float]:
    deepspeed, pipe = load("deepspeed"), load("deepspeed.pipe")
    LayerSpec, TiedLayerSpec = pipe.LayerSpec, pipe.TiedLayerSpec
    engine_type = load("deepspeed.runtime.pipe.engine").PipelineEngine
    error = load("deepspeed.runtime.pipe.module").PipelineError
    topology = load("deepspeed.runtime.pipe.topology").PipeDataParallelTopology(num_pp=2, num_dp=1)

    class Net(pipe.PipelineModule):  # type: ignore[misc, name-defined]
        def get_additional_losses(self) -> dict[str, Tensor]:
            return {"moe loss": torch.tensor(0.5)}

    def last(module: nn.Module, value: Tensor) -> Tensor:
        return value @ module.weight

    layers = [
        lambda value: value.float(),
        TiedLayerSpec("embed", nn.Linear, 4, 4, bias=False, tied_weight_attr="weight"),
        LayerSpec(nn.Linear, 4, 4),
        TiedLayerSpec("embed", nn.Linear, 4, 4, bias=False, forward_fn=last),
    ]
    net = Net(layers, topology=topology, loss_fn=loss_of, partition_method="type:linear")
    monitor = {"enabled": True, "output_path": str(folder), "job_name": "run"}
    config = {
        "train_batch_size": 8,
        "train_micro_batch_size_per_gpu": 2,
        "steps_per_print": 1,
        "optimizer": {"type": "Adam", "params": {"lr": 0.01}},
        "csv_monitor": monitor,
    }
    engine, optimizer, _, _ = deepspeed.initialize(
        model=net, model_parameters=[p for p in net.parameters() if p.requires_grad], config=config
    )
    assert type(engine) is engine_type and isinstance(engine, deepspeed.DeepSpeedEngine)
    assert optimizer is engine.optimizer and engine.pipeline_parallelism
    assert engine.mp_world_size == 2 and engine.dp_world_size == 1
    assert engine.grid is net.mpu() and engine.num_stages == 2 == net.num_pipeline_stages()
    engine.set_batch_fn(lambda batch: (batch["x"], batch["y"]))
    engine.set_has_attention_mask(True)
    x = torch.ones(2, 4)
    found = []
    for _ in range(3):
        engine.reset_activation_shape()
        found.append(engine.train_batch(data_iter=iter([{"x": x, "y": -x}] * 4)).item())
        assert engine.was_step_applied() and engine.get_global_grad_norm().item() > 0
    assert engine.get_additional_losses() == {"moe loss": torch.tensor(0.5)}
    assert engine.agg_train_loss.item() == found[-1]
    assert engine.global_steps == 3 and engine.global_samples == 24 and engine.micro_steps == 0
    seen = engine.eval_batch(iter([{"x": x, "y": -x}] * 4))
    for call in (engine, engine.backward, engine.step):
        with pytest.raises(error):
            call()
    engine.log_for_device("here")
    engine.tput_log("now")
    engine.destroy()
    return [*found, seen.item()]


def rows_of(folder: Path) -> dict[str, list[Any]]:
    return {
        file.stem: list(csv.reader(file.read_text().splitlines()))[1:]
        for file in sorted(folder.rglob("*.csv"))
    }


def test_a_program_in_stages(ranks: RankPools, tmp_path: Path) -> None:
    first, second = ranks(2).run(train, tmp_path)
    assert first == second and first[0] > first[1] > first[2] > first[3]
    rows = rows_of(tmp_path)
    losses = rows["Train_Samples_train_loss"]
    assert [int(step) for step, _ in losses] == [8, 16, 24]
    assert [float(value) for _, value in losses] == pytest.approx(first[:3])
    assert [(int(step), float(value)) for step, value in rows["Train_Samples_eval_loss"]] == [
        (24, pytest.approx(first[3]))
    ]
