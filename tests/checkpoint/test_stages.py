"""Checkpoints of models in stages: any number of stages loads them, and so does the whole model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from engine.test_pipeline import (
    MICRO,
    UPDATES,
    Whole,
    batch,
    batches,
    engine_of,
    loss_of,
    module_of,
)
from ranks import RankPools
from torch import Tensor

import hadal
from hadal import comm
from hadal.utils import get_fp32_state_dict_from_zero_checkpoint
from hadal.zero.state import safe_get_full_fp32_param, safe_get_full_optimizer_state

BF16 = {"bf16": {"enabled": True}}
BATCH = UPDATES * MICRO


def keys_of(stage: int, keys: dict[str, Any]) -> dict[str, Any]:
    return {"zero_optimization": {"stage": stage, "reduce_bucket_size": 64}, **keys}


def state_of(engine: Any) -> dict[str, Tensor]:
    """Masters and moments of what is here, by names."""
    found = {}
    for name, parameter in engine.module.named_parameters():
        found[name] = safe_get_full_fp32_param(parameter)
        for key in ("exp_avg", "exp_avg_sq"):
            found[f"{name}/{key}"] = safe_get_full_optimizer_state(parameter, key)
    return found


def save(folder: str, stages: int, stage: int, keys: dict[str, Any]) -> tuple[Any, float]:
    """Train, save, and train on; return the state that was saved, and the next loss."""
    replicas = comm.get_world_size() // stages
    engine = engine_of(stages, keys_of(stage, keys))
    data = batches(engine.grid.data_parallel_id, replicas)
    for _ in range(2):
        engine.train_batch(data)
    engine.save_checkpoint(folder, client_state={"told": stages})
    state = state_of(engine)
    return state, float(engine.train_batch(iter([batch(99 + n) for n in range(MICRO)])))


def load(
    folder: str, stages: int, stage: int, keys: dict[str, Any], expected: dict[str, Tensor]
) -> float:
    engine = engine_of(stages, keys_of(stage, keys), module_of(stages, base_seed=7))
    path, client = engine.load_checkpoint(folder)
    assert path is not None and "told" in client and engine.global_steps == 2
    found = state_of(engine)
    assert found.keys() <= expected.keys()
    for name, value in found.items():
        assert torch.equal(value, expected[name]), name
    return float(engine.train_batch(iter([batch(99 + n) for n in range(MICRO)])))


@pytest.mark.fast_cells("(2, 2, 1)-(4, 4, 0)-{}")
@pytest.mark.parametrize(
    ("here", "there", "keys"),
    [
        ((2, 2, 1), (4, 4, 0), {}),
        ((4, 4, 0), (2, 2, 2), BF16),
        ((4, 2, 2), (1, 1, 1), BF16),
        ((1, 1, 0), (4, 2, 1), {}),
        ((2, 2, 0), (2, 1, 2), {}),
    ],
    ids=str,
)
def test_stages_load_at_any_number(
    here: tuple[int, int, int],
    there: tuple[int, int, int],
    keys: dict[str, Any],
    ranks: RankPools,
    tmp_path: Path,
) -> None:
    whole: dict[str, Tensor] = {}
    found = ranks(here[0]).run(save, str(tmp_path), *here[1:], keys)
    for state, _ in found:
        whole |= state
    losses = ranks(there[0]).run(load, str(tmp_path), *there[1:], keys, whole)
    near = 1e-2 if keys else 1e-6
    assert losses == pytest.approx([found[0][1]] * there[0], rel=near)


def load_whole(folder: str, stage: int, expected: dict[str, Tensor]) -> float:
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        "zero_optimization": {"stage": stage},
    }
    torch.manual_seed(1)
    engine, *_ = hadal.initialize(model=Whole(), config=config)
    engine.load_checkpoint(folder)
    for name, value in state_of(engine).items():
        assert torch.equal(value, expected[name]), name
    with torch.no_grad():
        words, labels = batch(99)
        return float(loss_of(engine(words), labels))


def test_the_whole_model_loads_what_stages_saved(ranks: RankPools, tmp_path: Path) -> None:
    whole: dict[str, Tensor] = {}
    for state, _ in ranks(2).run(save, str(tmp_path), 2, 1, {}):
        whole |= state
    assert len(set(ranks(2).run(load_whole, str(tmp_path), 3, whole))) == 1
    exported = get_fp32_state_dict_from_zero_checkpoint(str(tmp_path))
    assert exported.keys() == dict(Whole().named_parameters()).keys()
    assert all(torch.equal(value, whole[name]) for name, value in exported.items())
