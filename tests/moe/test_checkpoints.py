"""Checkpoints of models with experts, loaded at other numbers of ranks and of experts per rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from engine.toys import engine_of
from ranks import RankPools
from safetensors.torch import load_file
from torch import Tensor, nn

from hadal import comm
from hadal.zero.state import safe_get_full_fp32_param, safe_get_full_optimizer_state
from moe.models import EXPERTS, filled
from moe.test_training import Mixture, batch_of, global_name


def mixtral() -> nn.Module:
    import transformers

    torch.manual_seed(0)
    config = transformers.MixtralConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        num_local_experts=4,
    )
    return transformers.MixtralForCausalLM(config)


def engine_over(kind: str, ep_size: int, stage: int) -> tuple[Any, int]:
    place = comm.get_rank() % ep_size
    keys: dict[str, Any] = {
        "zero_optimization": {"stage": stage, "stage3_gather_16bit_weights_on_model_save": True}
    }
    if kind == "deepspeed":
        return engine_of(stage, filled(Mixture(ep_size), place), **keys), place
    if ep_size > 1:
        keys["expert_parallel"] = {"enabled": True, "autoep_size": ep_size}
    return engine_of(stage, mixtral(), **keys), place


def step(engine: Any, kind: str, number: int) -> None:
    if kind == "deepspeed":
        inputs, targets = batch_of(number)
        logits, balance = engine(inputs)
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten()) + balance
    else:
        generator = torch.Generator().manual_seed(number)
        ids = torch.randint(0, 32, (3, 7), generator=generator)
        loss = engine(ids, labels=ids).loss
    engine.backward(loss)
    engine.step()


def state_of(engine: Any, place: int, ep_size: int) -> dict[str, Tensor]:
    """Masters and moments here, by names of the whole model; of stacked experts one by one."""
    found: dict[str, Tensor] = {}
    for name, parameter in engine.module.named_parameters():
        values = {
            "": safe_get_full_fp32_param(parameter),
            "/exp_avg": safe_get_full_optimizer_state(parameter, "exp_avg"),
            "/exp_avg_sq": safe_get_full_optimizer_state(parameter, "exp_avg_sq"),
        }
        is_stacked = ".mlp.experts." in name
        whole = global_name(name, place, EXPERTS // ep_size)
        for key, value in values.items():
            assert value is not None
            rows = value if is_stacked else [value]
            first = place * len(value) if is_stacked else 0
            found |= {f"{whole}[{n}]{key}": row.clone() for n, row in enumerate(rows, first)}
    return found


def save(folder: str, kind: str, ep_size: int, stage: int) -> dict[str, Tensor]:
    engine, place = engine_over(kind, ep_size, stage)
    for number in range(2):
        step(engine, kind, number)
    engine.save_checkpoint(folder)
    assert engine.save_16bit_model(f"{folder}/weights")
    whole = engine._consolidated_16bit_state_dict()
    assert (whole is not None) == (comm.get_rank() == 0)
    if whole is not None:
        torch.save(whole, f"{folder}/whole.pt")
    return state_of(engine, place, ep_size)


def load(folder: str, kind: str, ep_size: int, stage: int, expected: dict[str, Tensor]) -> set[str]:
    engine, place = engine_over(kind, ep_size, stage)
    assert engine.load_checkpoint(folder)[0] is not None
    found = state_of(engine, place, ep_size)
    for name, value in found.items():
        assert torch.equal(value, expected[name]), name
    step(engine, kind, 2)
    return set(found)


@pytest.mark.fast_cells("deepspeed-(4, 2, 3)-(1, 1, 0)")
@pytest.mark.parametrize(
    ("kind", "here", "there"),
    [
        ("deepspeed", (2, 2, 2), (4, 4, 3)),
        ("deepspeed", (4, 2, 3), (1, 1, 0)),
        ("transformers", (2, 2, 1), (1, 1, 0)),
        ("transformers", (1, 1, 0), (4, 2, 3)),
    ],
    ids=str,
)
def test_experts_move_to_other_ranks(
    kind: str,
    here: tuple[int, int, int],
    there: tuple[int, int, int],
    ranks: RankPools,
    tmp_path: Path,
) -> None:
    whole: dict[str, Tensor] = {}
    for found in ranks(here[0]).run(save, str(tmp_path), kind, *here[1:]):
        whole |= found
    weights = load_file(tmp_path / "weights" / "model.safetensors")
    model = Mixture(1) if kind == "deepspeed" else mixtral()
    assert weights.keys() == model.state_dict().keys()
    loaded = torch.load(tmp_path / "whole.pt")
    assert loaded.keys() == weights.keys()
    assert all(torch.equal(loaded[name], value) for name, value in weights.items())
    for name, value in weights.items():
        for n, row in enumerate(value if ".mlp.experts." in name else [value]):
            number = n if ".mlp.experts." in name else 0
            assert torch.equal(row, whole[f"{name}[{number}]"]), name
    loaded = ranks(there[0]).run(load, str(tmp_path), kind, *there[1:], whole)
    assert set().union(*loaded) == set(whole)
