"""DeepSpeed's checkpoints of models with experts: a file for each expert of each layer."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from engine.toys import engine_of
from moe.models import EXPERTS, filled
from moe.test_training import Mixture, global_name
from ranks import RankPools
from torch import Tensor

from hadal import comm
from hadal.checkpoint.deepspeed.source import DeepSpeedSource
from hadal.checkpoint.export import get_fp32_state_dict_from_zero_checkpoint
from hadal.errors import CheckpointError, NotBuiltYetError
from hadal.zero.state import safe_get_full_fp32_param

_EXPERT = re.compile(r"(\w+)\.deepspeed_moe\.experts\.deepspeed_experts\.(\d+)\..*")
LAYERS = ("dropless", "dropping")


def write(folder: Path) -> dict[str, Tensor]:
    """Write what DeepSpeed does at stage 0, with these names and keys; return all weights."""
    weights = {name: value.bfloat16() for name, value in filled(Mixture(1)).state_dict().items()}
    dense, experts = {}, dict[str, dict[str, Tensor]]()
    for name, value in weights.items():
        found = _EXPERT.fullmatch(name)
        if found is None:
            dense[name] = value
            continue
        file = f"layer_{LAYERS.index(found[1])}_expert_{found[2]}_mp_rank_00_model_states.pt"
        experts.setdefault(file, {})[name] = value
    place = folder / "tag"
    place.mkdir(parents=True)
    for file, states in experts.items():
        torch.save(states, place / file)
    path = place / "expp_rank_0_mp_rank_00_optim_states.pt"
    torch.save({"optimizer": {"state": {}, "param_groups": []}}, path)
    empty = "optimizer frozen_param_shapes shared_params frozen_param_fragments lr_scheduler"
    states: dict[str, Any] = {
        **dict.fromkeys(empty.split()),
        "module": dense,
        "buffer_names": [],
        "param_shapes": [{name: value.shape for name, value in weights.items()}],
        "skipped_steps": 0,
        "global_steps": 5,
        "global_samples": 40,
        "dp_world_size": 2,
        "mp_world_size": 1,
        "ds_config": {"zero_optimization": {"stage": 0}, "gradient_accumulation_steps": 1},
        "ds_version": "0.19.8",
        "num_experts": [EXPERTS, EXPERTS],
        "ds_autoep_layers": None,
        "epoch": 3,
    }
    torch.save(states, place / "mp_rank_00_model_states.pt")
    (folder / "latest").write_text("tag")
    return weights


def load(folder: str, ep_size: int, stage: int) -> dict[str, Tensor]:
    place = comm.get_rank() % ep_size
    engine = engine_of(stage, Mixture(ep_size), bf16={"enabled": True})
    with pytest.raises((CheckpointError, NotBuiltYetError), match="load_optimizer_states=False"):
        engine.load_checkpoint(folder)
    path, client_state = engine.load_checkpoint(folder, load_optimizer_states=False)
    assert path is not None and client_state == {"epoch": 3} and engine.global_steps == 5
    found = {}
    for name, parameter in engine.module.named_parameters():
        value = safe_get_full_fp32_param(parameter)
        assert value is not None
        found[global_name(name, place, EXPERTS // ep_size)] = value.clone()
    engine.destroy()
    return found


@pytest.mark.fast_cells("2-2")
@pytest.mark.parametrize(("ep_size", "stage"), [(2, 2), (2, 3), (1, 0)])
def test_weights_load_at_any_number_of_ranks(
    ep_size: int, stage: int, tmp_path: Path, ranks: RankPools
) -> None:
    weights = write(tmp_path)
    loaded: dict[str, Tensor] = {}
    for found in ranks(2).run(load, str(tmp_path), ep_size, stage):
        loaded |= found
    assert loaded.keys() == weights.keys()
    assert all(torch.equal(loaded[name], value.float()) for name, value in weights.items())
    exported = get_fp32_state_dict_from_zero_checkpoint(str(tmp_path))
    assert all(torch.equal(exported[name], value.float()) for name, value in weights.items())


def test_missing_experts_and_slices_are_refused_by_name(tmp_path: Path) -> None:
    write(tmp_path)
    place = tmp_path / "tag"
    assert any("only the weights are read" in note for note in DeepSpeedSource(place).notes)
    last = place / f"layer_1_expert_{EXPERTS - 1}_mp_rank_00_model_states.pt"
    kept = last.read_bytes()
    last.unlink()
    with pytest.raises(CheckpointError, match="files of 7 experts, and its model states count 8"):
        DeepSpeedSource(place)
    last.write_bytes(kept)
    first = place / "layer_1_expert_0_mp_rank_00_model_states.pt"
    first.rename(place / "layer_1_expert_9_mp_rank_00_model_states.pt")
    with pytest.raises(CheckpointError, match="has no states of layer 1's expert 0"):
        DeepSpeedSource(place)
    (place / "layer_1_expert_0_mp_rank_01_model_states.pt").write_bytes(kept)
    with pytest.raises(NotBuiltYetError, match=r"expert_0_mp_rank_01.* model-parallel parts"):
        DeepSpeedSource(place)
