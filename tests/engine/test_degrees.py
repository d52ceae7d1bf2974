"""Two kinds of parallelism at once, two ranks of each: one process's losses, norms and weights."""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import costs
import pytest
import torch
from ranks import RankPools
from torch import Tensor, nn

import hadal
from engine.toys import tiny_at
from hadal import comm
from hadal.errors import ConfigError

pytestmark = pytest.mark.skipif(
    find_spec("transformers") is None, reason="transformers is not installed"
)
WORDS, ROWS, LENGTH, UPDATES, MICROS, CLIP = 32, 2, 8, 3, 2, 0.3
# eps: where a gradient is all but zero, Adam would enlarge how fp32 rounds it.
ADAM: dict[str, Any] = {"lr": 1e-2, "weight_decay": 0.1, "eps": 1e-3}
LAYOUTS: dict[str, dict[str, Any]] = {
    "data": {},
    "data, tensor": {"tensor_parallel": {"autotp_size": 2}},
    "data, experts": {"expert_parallel": {"enabled": True, "autoep_size": 2}},
    "data, sequence": {"sequence_parallel_size": 2},
}
LAYOUTS["tensor, experts"] = LAYOUTS["data, tensor"] | LAYOUTS["data, experts"]
LAYOUTS["sequence, tensor"] = LAYOUTS["data, sequence"] | LAYOUTS["data, tensor"]
LAYOUTS["sequence, experts"] = LAYOUTS["data, sequence"] | LAYOUTS["data, experts"]
OFFLOADED = {"offload_optimizer": {"device": "cpu"}}
BF16 = {"bf16": {"enabled": True}}


def mixtral(seed: int = 0, *, tied: bool = False) -> Any:
    import transformers

    torch.manual_seed(seed)
    config = transformers.MixtralConfig(
        vocab_size=WORDS,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        num_local_experts=4,
        attn_implementation="sdpa",
        tie_word_embeddings=tied,
    )
    model = transformers.MixtralForCausalLM(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # A clear choice of experts, which rounding does not change.
            parameter.mul_(20.0 if ".gate." in name else 3.0)
    return model


def imported() -> None:
    mixtral()


@pytest.fixture(scope="module", autouse=True)
def _imported(ranks: RankPools) -> None:
    """Many tests share the ranks, and the time that they take to import transformers."""
    with costs.aside():
        mixtral()
        ranks(4).run(imported)


def batch_of(step: int, reader: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(100 * step + reader)
    tokens = torch.randint(WORDS, (ROWS, LENGTH), generator=generator)
    return {"input_ids": tokens, "labels": tokens}


Found = dict[str, Any]


@cache
def alone(readers: int, tied: bool = False) -> Found:
    """One process that reads all samples, without an engine."""
    model = mixtral(tied=tied)
    optimizer = torch.optim.AdamW(model.parameters(), **ADAM)
    losses, norms = [], []
    for update in range(UPDATES):
        for micro in range(update * MICROS, (update + 1) * MICROS):
            found = [model(**batch_of(micro, reader)).loss for reader in range(readers)]
            loss = torch.stack(found).mean()
            (loss / MICROS).backward()
            losses.append(loss.item())
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), CLIP)))
        optimizer.step()
        optimizer.zero_grad()
    return {"losses": losses, "norms": norms, "weights": dict(model.state_dict())}


def engine_in(layout: str, stage: int, zero: Found, keys: Found, seed: int = 0) -> Any:
    config = {
        "train_micro_batch_size_per_gpu": ROWS,
        "gradient_accumulation_steps": MICROS,
        "gradient_clipping": CLIP,
        "optimizer": {"type": "AdamW", "params": ADAM},
        "zero_optimization": {
            "stage": stage,
            "stage3_gather_16bit_weights_on_model_save": True,
            **tiny_at(stage),
            **zero,
        },
        **LAYOUTS[layout],
        **keys,
    }
    return hadal.initialize(model=mixtral(seed), config=config)[0]


def train(engine: Any, first: int = 0, updates: int = UPDATES) -> Found:
    """Mean losses over readers, norms, and on rank 0 the whole weights."""
    data, losses, norms = engine.topology.data_parallel, [], []
    for micro in range(first * MICROS, (first + updates) * MICROS):
        loss = engine(**batch_of(micro, data.rank)).loss
        engine.backward(loss)
        engine.step()
        total = loss.detach().float().clone()
        comm.all_reduce(total)
        losses.append(float(total) / comm.get_world_size())
        if micro % MICROS == MICROS - 1:
            norms.append(float(engine.get_global_grad_norm()))
    return {
        "losses": losses,
        "norms": norms,
        "readers": data.size,
        "weights": engine._consolidated_16bit_state_dict(),
    }


def trained(layout: str, stage: int, zero: Found, keys: Found) -> Found:
    engine = engine_in(layout, stage, zero, keys)
    found = train(engine)
    engine.destroy()
    return found


@pytest.mark.fast_cells("sequence, tensor-2-zero2-keys2")
@pytest.mark.parametrize(
    ("layout", "stage", "zero", "keys"),
    [
        ("tensor, experts", 1, {}, {}),
        ("tensor, experts", 3, OFFLOADED, {}),
        ("sequence, tensor", 2, {}, {}),
        ("sequence, experts", 3, {}, {}),
        ("data, tensor", 2, OFFLOADED, {}),
        ("data, experts", 2, {}, BF16),
        ("tensor, experts", 2, {}, {}),
        ("tensor, experts", 0, {}, {}),
        ("sequence, tensor", 1, OFFLOADED, {}),
        ("sequence, tensor", 3, {}, {}),
        ("sequence, tensor", 2, {}, BF16),
        ("sequence, experts", 1, {}, {}),
        ("sequence, experts", 2, OFFLOADED, {}),
        ("sequence, experts", 2, {}, BF16),
        ("data, tensor", 3, {}, {}),
        ("data, tensor", 1, {}, BF16),
        ("data, experts", 2, OFFLOADED, {}),
        ("data, experts", 3, {}, {}),
        ("tensor, experts", 2, {}, BF16),
        ("data, sequence", 3, OFFLOADED, {}),
    ],
)
def test_two_kinds_at_once_train_as_one_process(
    layout: str, stage: int, zero: Found, keys: Found, ranks: RankPools
) -> None:
    found = ranks(4).run(trained, layout, stage, zero, keys)
    readers = found[0]["readers"]
    # What bf16 rounds is far more than the ways to compute differ: its reference rounds alike.
    expected = ranks(readers).run(trained, "data", stage, {}, keys)[0] if keys else alone(readers)
    coarse = 5e-3 if keys else 1e-6
    assert max(expected["norms"]) > CLIP
    for one in found:
        assert one["losses"] == pytest.approx(expected["losses"], rel=coarse)
        assert one["norms"][0] == pytest.approx(expected["norms"][0], rel=10 * coarse)
        # In bf16 a token between two experts may then change its choice, on some processors.
        assert one["norms"] == pytest.approx(expected["norms"], rel=0.15 if keys else 10 * coarse)
    weights, wanted, start = found[0]["weights"], expected["weights"], mixtral().state_dict()
    assert weights.keys() == wanted.keys()
    error = sum(float((weights[n].float() - wanted[n].float()).square().sum()) for n in wanted)
    moved = sum(float((wanted[n].float() - start[n]).square().sum()) for n in wanted)
    assert error**0.5 <= (0.15 if keys else 1e-5) * moved**0.5
    if not keys:
        for name, value in weights.items():
            torch.testing.assert_close(value, wanted[name], rtol=1e-6, atol=2e-6)


def refused() -> str:
    with pytest.raises(ConfigError) as caught:
        engine_in(
            "tensor, experts", 1, {}, {"expert_parallel": {"enabled": True, "autoep_size": 4}}
        )
    return str(caught.value)


def test_experts_are_shared_by_ranks_with_the_same_slices(ranks: RankPools) -> None:
    for told in ranks(4).run(refused):
        assert "expert_parallel.autoep_size" in told
        assert "4 does not divide the 2 ranks (of 4) that hold the same dense parameters" in told


def saved_and_loaded(folder: str, here: str, there: str, stages: tuple[int, int]) -> list[Found]:
    engine = engine_in(here, stages[0], {}, {})
    train(engine, updates=1)
    engine.save_checkpoint(folder)
    first = train(engine, 1)
    engine.destroy()
    engine = engine_in(there, stages[1], {}, {}, seed=7)
    assert engine.load_checkpoint(folder)[0] is not None
    second = train(engine, 1)
    engine.destroy()
    return [first, second]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("here", "there", "stages"),
    [
        ("tensor, experts", "sequence, tensor", (2, 3)),
        ("data, experts", "tensor, experts", (3, 1)),
        ("sequence, experts", "tensor, experts", (1, 2)),
        ("sequence, tensor", "sequence, experts", (0, 3)),
        ("tensor, experts", "data", (3, 0)),
        ("data, tensor", "data, experts", (2, 1)),
    ],
)
def test_a_checkpoint_of_one_layout_resumes_in_another(
    here: str, there: str, stages: tuple[int, int], tmp_path: Path, ranks: RankPools
) -> None:
    for first, second in ranks(4).run(saved_and_loaded, str(tmp_path), here, there, stages):
        if first["readers"] == second["readers"]:
            assert second["losses"] == pytest.approx(first["losses"], rel=1e-6)
            assert second["norms"] == pytest.approx(first["norms"], rel=1e-5)
