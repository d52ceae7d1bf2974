"""Checkpoints of models that are cut over ranks, loaded at other numbers of them."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import RankPools
from safetensors.torch import load_file
from torch import Tensor

import hadal
from hadal import comm
from hadal.checkpoint.export import get_fp32_state_dict_from_zero_checkpoint
from hadal.zero.state import safe_get_full_fp32_param, safe_get_full_optimizer_state
from tensor_parallel.models import batch_of, model_of

pytestmark = pytest.mark.skipif(
    find_spec("transformers") is None, reason="transformers is not installed"
)
ROWS, UPDATES = 4, 2


def engine_at(kind: str, size: int, stage: int, optimizer: str, keys: dict[str, Any]) -> Any:
    """An engine whose ranks read `ROWS` samples together, for any number of ranks."""
    params: dict[str, Any] = {"lr": 1e-2, "weight_decay": 0.1, "eps": 1e-3}
    config = {
        "train_micro_batch_size_per_gpu": ROWS * size // comm.get_world_size(),
        "gradient_clipping": 0.5,
        "optimizer": {"type": optimizer, "params": params},
        "zero_optimization": {
            "stage": stage,
            "stage3_gather_16bit_weights_on_model_save": True,
        },
        **({"tensor_parallel": {"autotp_size": size, **keys}} if size > 1 else {}),
    }
    model = model_of(kind, seed=size)
    return hadal.initialize(model=model, config=config)[0]


def train(engine: Any, first: int) -> list[float]:
    """The losses of all samples, update by update."""
    readers, losses = engine.topology.data_parallel, []
    for step in range(first, first + UPDATES):
        batch = batch_of(step, rows=ROWS, length=8)
        mine = {name: one.chunk(readers.size)[readers.rank] for name, one in batch.items()}
        loss = engine(**mine).loss
        engine.backward(loss)
        engine.step()
        total = loss.detach().clone()
        comm.all_reduce(total)
        losses.append(float(total) / comm.get_world_size())
    return losses


def state_of(engine: Any) -> dict[str, Tensor]:
    """Whole masters and optimizer state."""
    found: dict[str, Tensor] = {}
    for name, parameter in engine.module.named_parameters():
        values = {"": safe_get_full_fp32_param(parameter)}
        for key in ("exp_avg", "exp_avg_sq"):
            values[f"/{key}"] = safe_get_full_optimizer_state(parameter, key)
        for key, mine in values.items():
            assert mine is not None
            is_cut = hasattr(parameter, "hadal_slice")
            found[name + key] = (parameter.hadal_slice.whole(mine) if is_cut else mine).clone()
    return found


def save(folder: str, *cell: Any) -> dict[str, Any]:
    engine = engine_at(*cell)
    train(engine, 0)
    engine.save_checkpoint(folder, "tag", client_state={"epoch": 3})
    assert engine.save_16bit_model(folder + "/weights")
    found = state_of(engine)
    losses = train(engine, UPDATES)
    engine.destroy()
    return {"state": found, "losses": losses}


def load(folder: str, *cell: Any) -> dict[str, Any]:
    engine = engine_at(*cell)
    _, client_state = engine.load_checkpoint(folder, "tag")
    assert client_state == {"epoch": 3} and engine.global_steps == UPDATES
    found = state_of(engine)
    losses = train(engine, UPDATES)
    engine.destroy()
    return {"state": found, "losses": losses}


VOCABULARY = {"vocab_parallel_lm_head": True}


@pytest.mark.fast_cells("phi3-Lamb-{}-(2, 2, 3)-(2, 1, 1)")
@pytest.mark.parametrize(
    ("kind", "optimizer", "keys", "here", "there"),
    [
        ("tied llama", "AdamW", VOCABULARY, (2, 2, 1), (1, 1, 0)),
        ("gptneox", "AdamW", {}, (1, 1, 0), (4, 4, 2)),
        ("phi3", "Lamb", {}, (2, 2, 3), (2, 1, 1)),
        ("gptneox", "Lamb", {}, (4, 4, 0), (4, 2, 3)),
        ("uneven llama", "AdamW", {}, (2, 1, 2), (2, 2, 3)),
        ("falcon", "AdamW", {}, (2, 2, 3), (4, 2, 1)),
        ("t5", "AdamW", {}, (4, 2, 2), (2, 1, 3)),
        ("bloom", "Lamb", {}, (2, 2, 2), (4, 4, 3)),
        ("qwen2", "AdamW", VOCABULARY, (4, 2, 3), (1, 1, 0)),
        ("opt", "AdamW", {}, (4, 4, 1), (2, 2, 0)),
    ],
    ids=str,
)
def test_slices_load_at_any_number_of_ranks(
    kind: str,
    optimizer: str,
    keys: dict[str, Any],
    here: tuple[int, int, int],
    there: tuple[int, int, int],
    ranks: RankPools,
    tmp_path: Path,
) -> None:
    """A place is (ranks, tensor-parallel ones, ZeRO stage)."""
    folder = str(tmp_path)
    saved = ranks(here[0]).run(save, folder, kind, *here[1:], optimizer, keys)[0]
    found = ranks(there[0]).run(load, folder, kind, *there[1:], optimizer, keys)
    for one in found:
        assert one["state"].keys() == saved["state"].keys()
        for name, value in saved["state"].items():
            assert torch.equal(one["state"][name], value), name
        assert one["losses"] == pytest.approx(saved["losses"], rel=1e-6)
    exported = get_fp32_state_dict_from_zero_checkpoint(folder, "tag")
    assert exported.keys() == model_of(kind).state_dict().keys()
    written = load_file(tmp_path / "weights" / "model.safetensors")
    assert written.keys() <= exported.keys()
    for name, value in saved["state"].items():
        if "/" not in name:
            assert torch.equal(exported[name], value), name
            assert torch.equal(written[name], value), name
