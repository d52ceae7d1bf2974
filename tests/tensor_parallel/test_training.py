"""Engines whose model is cut over ranks train as one process does."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import RankPools, on_ranks
from safetensors.torch import load_file

import hadal
from hadal import comm
from hadal.zero import GatheredParameters
from tensor_parallel.models import batch_of, model_of

pytestmark = pytest.mark.skipif(
    find_spec("transformers") is None, reason="transformers is not installed"
)
# eps: where a gradient is all but zero (a bias of keys), Adam would enlarge how fp32 rounds it.
UPDATES, ACCUMULATED = 3, 2


def config_of(stage: int, size: int, **keys: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": ACCUMULATED,
        "gradient_clipping": 0.5,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1, "eps": 1e-3}},
        "zero_optimization": {"stage": stage},
        "tensor_parallel": {"autotp_size": size, **keys},
    }


def expected_of(kind: str, readers: int) -> tuple[dict[str, torch.Tensor], list[float]]:
    """The weights and norms of one process that reads all samples, without Hadal."""
    model = model_of(kind)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1, eps=1e-3)
    norms = []
    for update in range(UPDATES):
        for part in range(ACCUMULATED):
            for reader in range(readers):
                loss = model(**batch_of(update * ACCUMULATED + part, reader, length=8)).loss
                (loss / ACCUMULATED / readers).backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)))
        optimizer.step()
        optimizer.zero_grad()
    return {name: one.detach() for name, one in model.named_parameters()}, norms


def train(engine: Any, first: int = 0, updates: int = UPDATES) -> list[float]:
    reader, norms = engine.topology.data_parallel.rank, []
    for update in range(first, first + updates):
        for part in range(ACCUMULATED):
            engine.backward(engine(**batch_of(update * ACCUMULATED + part, reader, length=8)).loss)
            engine.step()
        norms.append(float(engine.get_global_grad_norm()))
    return norms


def alike(kind: str, stage: int, size: int, keys: dict[str, Any]) -> None:
    readers = comm.get_world_size() // size
    weights, norms = expected_of(kind, readers)
    engine, *_ = hadal.initialize(
        model=model_of(kind, seed=comm.get_rank()) if stage < 2 else model_of(kind),
        config=config_of(stage, size, **keys),
    )
    assert engine.topology.data_parallel.size == readers
    torch.testing.assert_close(train(engine), norms, rtol=1e-5, atol=0)
    cut = 0
    with GatheredParameters(list(engine.module.parameters())):
        for name, parameter in engine.module.named_parameters():
            whole = (
                parameter.hadal_slice.whole(parameter)
                if hasattr(parameter, "hadal_slice")
                else parameter
            )
            cut += whole is not parameter
            assert whole.shape == weights[name].shape
            torch.testing.assert_close(
                whole,
                weights[name],
                rtol=1e-5,
                atol=1e-5,
                msg=lambda told, name=name: f"{name}: {told}",
            )
    assert cut


@pytest.mark.fast_cells("llama-2-4-keys5")
@pytest.mark.parametrize(
    ("kind", "stage", "world", "keys"),
    [
        ("llama", 0, 2, {}),
        ("tied llama", 1, 2, {}),
        ("qwen2", 2, 2, {}),
        ("gptneox", 3, 2, {}),
        ("phi3", 3, 2, {}),
        ("llama", 2, 4, {}),
        ("tied llama", 3, 4, {}),
        ("tied llama", 2, 4, {"vocab_parallel_lm_head": True, "sequence_parallel": True}),
        ("qwen2", 3, 4, {"tp_overlap_comm": True, "sequence_parallel": True}),
    ],
)
def test_an_engine_trains_as_one_process(
    kind: str, stage: int, world: int, keys: dict[str, Any], ranks: RankPools
) -> None:
    ranks(world).run(alike, kind, stage, 2, keys)


@pytest.mark.fast_cells("3")
@pytest.mark.parametrize("stage", [1, 3])
@on_ranks(2)
def test_slices_are_saved_and_whole_weights_given_out(tmp_path: Path, stage: int) -> None:
    config = config_of(stage, 2)
    config["zero_optimization"]["stage3_gather_16bit_weights_on_model_save"] = True
    engine, *_ = hadal.initialize(model=model_of("tied llama"), config=config)
    train(engine)
    engine.save_checkpoint(tmp_path)
    whole = engine._consolidated_16bit_state_dict()
    assert engine.save_16bit_model(tmp_path / "weights")
    comm.barrier()
    model = model_of("tied llama", seed=9)
    if comm.get_rank() == 0:
        assert {name: one.shape for name, one in whole.items()} == {
            name: one.shape for name, one in model.state_dict().items()
        }
        saved = load_file(tmp_path / "weights/model.safetensors")
        assert all(torch.equal(whole[name], one) for name, one in saved.items())
        model.load_state_dict(saved, strict=False)
    else:
        assert whole is None
    comm.barrier()
    again, *_ = hadal.initialize(model=model_of("tied llama", seed=5), config=config)
    again.load_checkpoint(tmp_path)
    assert train(again, UPDATES) == train(engine, UPDATES)
