"""Checkpoints of experts that are spread over ranks: any number of ranks loads them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from engine.test_treatments import TwoExperts
from engine.toys import TINY, batch_of, engine_of, loss_of
from ranks import RankPools
from safetensors.torch import load_file

from hadal import comm
from hadal.comm.ranks import make_expert_groups
from hadal.errors import ModelError
from hadal.utils import get_fp32_state_dict_from_zero_checkpoint
from hadal.zero.boxes import Box
from hadal.zero.state import safe_get_full_fp32_param, safe_get_full_optimizer_state

SIZE, BF16 = 2, {"bf16": {"enabled": True}}


def engine_over(size: int, stage: int, kind: str = "AdamW", **keys: Any) -> tuple[Any, int]:
    """An engine whose experts are on `size` ranks, and the first one that is here."""
    zero = {"stage": stage, **{k: v for k, v in TINY.items() if stage == 3 or "stage3" not in k}}
    place = make_expert_groups(size, comm.Ranks.world()).parallel.rank if size > 1 else None
    model = TwoExperts(SIZE, place)
    if place is not None:
        for name, parameter in model.named_parameters():
            if name.startswith("experts.0."):
                own = name.replace("experts.0.", f"experts.{place}.")
                parameter.hadal_box = Box.whole(own, tuple(parameter.shape))  # type: ignore[attr-defined]
    optimizer = {"type": kind, "params": {"lr": 0.01}}
    return engine_of(stage, model, optimizer=optimizer, zero_optimization=zero, **keys), place or 0


def state_of(engine: Any, first: int) -> dict[str, torch.Tensor]:
    """Weights, masters and moments of what is here, by their names in the whole model."""
    found = {}
    for name, parameter in engine.module.named_parameters():
        whole = name.replace("experts.0.", f"experts.{first}.") if first else name
        found[whole] = safe_get_full_fp32_param(parameter)
        for key in ("exp_avg", "exp_avg_sq"):
            value = safe_get_full_optimizer_state(parameter, key)
            found[f"{whole}/{key}"] = value
    return found


def save(folder: str, size: int, stage: int, keys: dict[str, Any]) -> dict[str, torch.Tensor]:
    engine, first = engine_over(size, stage, gradient_accumulation_steps=2, **keys)
    _train(engine)
    engine.save_checkpoint(folder)
    return state_of(engine, first)


def _train(engine: Any) -> None:
    for step in range(4):
        inputs, targets = batch_of(step)
        outputs = engine(inputs.to(next(engine.module.parameters()).dtype))
        engine.backward(loss_of(outputs, targets))
        engine.step()


def load(
    folder: str, size: int, stage: int, keys: dict[str, Any], expected: dict[str, torch.Tensor]
) -> None:
    engine, first = engine_over(size, stage, gradient_accumulation_steps=2, **keys)
    path, _ = engine.load_checkpoint(folder)
    assert path is not None
    found = state_of(engine, first)
    assert found.keys() <= expected.keys()
    for name, value in found.items():
        assert torch.equal(value, expected[name]), name
    _train(engine)


@pytest.mark.fast_cells("(2, 2, 1)-(4, 2, 3)-{}")
@pytest.mark.parametrize(
    ("here", "there", "keys"),
    [
        ((2, 2, 1), (4, 2, 3), {}),
        ((4, 2, 3), (2, 2, 0), {}),
        ((4, 2, 2), (1, 1, 1), BF16),
        ((1, 1, 0), (2, 2, 2), {}),
        ((4, 2, 0), (4, 2, 1), BF16),
    ],
    ids=str,
)
def test_experts_load_at_any_number_of_ranks(
    here: tuple[int, int, int],
    there: tuple[int, int, int],
    keys: dict[str, Any],
    ranks: RankPools,
    tmp_path: Path,
) -> None:
    whole: dict[str, torch.Tensor] = {}
    for found in ranks(here[0]).run(save, str(tmp_path), *here[1:], keys):
        whole |= found
    ranks(there[0]).run(load, str(tmp_path), *there[1:], keys, whole)


def export(folder: str) -> None:
    engine, _ = engine_over(2, 1)
    _train(engine)
    engine.save_checkpoint(folder, "tag")
    assert engine.save_16bit_model(folder)
    for parameter in engine.module.parameters():
        vars(parameter).pop("hadal_box", None)
    with pytest.raises(ModelError, match=r"nothing says which are in experts\.0\."):
        engine.save_16bit_model(folder)


def test_an_export_has_all_experts(ranks: RankPools, tmp_path: Path) -> None:
    ranks(2).run(export, str(tmp_path))
    whole = get_fp32_state_dict_from_zero_checkpoint(str(tmp_path), "tag")
    assert whole.keys() == dict(TwoExperts(SIZE, None).named_parameters()).keys()
    weights = load_file(tmp_path / "model.safetensors")
    assert weights.keys() == whole.keys()
    assert all(torch.equal(weights[name], value) for name, value in whole.items())
