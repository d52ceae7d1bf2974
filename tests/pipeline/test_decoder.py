"""Decoders of transformers train in stages as they do in one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import RankPools, on_ranks
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

import hadal
from hadal import comm
from hadal.engine.pipeline import PipelineEngine
from hadal.errors import ConfigError, ModelError, PipelineError, UsageError
from hadal.plugins.pipeline.decoder import check_decoder

ROWS, LENGTH, MICRO, WORDS = 2, 6, 4, 17
SIZES = {
    "vocab_size": WORDS,
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 4,
    "max_position_embeddings": 16,
    "pad_token_id": 0,
}
KINDS: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {"tie_word_embeddings": True},
    "gemma3_text": {
        "sliding_window": 2,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
    "mistral": {"sliding_window": 3},
    "olmo2": {"tie_word_embeddings": True},
    "phi3": {},
}


def model_of(kind: str, **more: Any) -> nn.Module:
    sizes = {**SIZES, **KINDS[kind], **more}
    sizes["num_hidden_layers"] = len(sizes.get("layer_types", range(3)))
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **sizes)).float()


def batch(number: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(number)
    words = torch.randint(1, WORDS, (ROWS, LENGTH), generator=generator)
    mask = torch.ones_like(words)
    mask[0, :2] = 0  # padding on the left
    labels = words.masked_fill(mask == 0, -100)
    return {"input_ids": words, "attention_mask": mask, "labels": labels}


def config_of(zero: int = 1, **section: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": ROWS,
        "gradient_accumulation_steps": MICRO,
        "gradient_clipping": 0.1,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "eps": 1e-4}},
        "zero_optimization": {"stage": zero},
        **({"pipeline": section} if section else {}),
    }


def train(kind: str, section: dict[str, Any], zero: int) -> tuple[list[float], dict[str, Tensor]]:
    """Losses, and the weights of this stage."""
    model = model_of(kind)
    engine, *_ = hadal.initialize(model=model, config=config_of(zero, auto=True, **section))
    assert type(engine) is PipelineEngine
    replicas = comm.get_world_size() // section["stages"]
    first = engine.grid.data_parallel_id
    data = iter([batch(n * replicas + first) for n in range(3 * MICRO)])
    losses = [float(engine.train_batch(data)) for _ in range(3)]
    weights = {name: value.clone() for name, value in engine.module.named_parameters()}
    seen = engine.eval_batch(iter([batch(n) for n in range(MICRO)]))
    engine.destroy()
    return [*losses, float(seen)], weights


def train_whole(kind: str, replicas: int = 1) -> tuple[list[float], dict[str, Tensor]]:
    model = model_of(kind)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-4, weight_decay=0.0)
    losses = []
    for update in range(3):
        total = 0.0
        for number in range(MICRO * replicas):
            given = batch(update * MICRO * replicas + number)
            loss = model(**given, use_cache=False).loss / (MICRO * replicas)
            loss.backward()
            total += loss.item()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    model.eval()
    with torch.no_grad():
        seen = [float(model(**batch(n), use_cache=False).loss) for n in range(MICRO)]
    return [*losses, sum(seen) / MICRO], dict(model.named_parameters())


def check(found: list[Any], kind: str, replicas: int = 1) -> None:
    losses, weights = train_whole(kind, replicas)
    for seen, own in found:
        assert seen == pytest.approx(losses, rel=1e-5)
        for name, value in own.items():
            expected = weights.get(name, weights.get("model.embed_tokens.weight"))
            torch.testing.assert_close(value, expected, rtol=1e-5, atol=1e-5)
    names = {name for _, own in found for name in own}
    assert names >= weights.keys()


@pytest.mark.fast_cells("gemma3_text")
@pytest.mark.claims("pipeline.stages")
@pytest.mark.parametrize("kind", list(KINDS))
def test_stages_of_a_decoder_equal_one_process(kind: str, ranks: RankPools) -> None:
    check(ranks(2).run(train, kind, {"stages": 2}, 1), kind)


SCHEDULES: list[dict[str, Any]] = [
    {"stages": 2, "chunks": 2, "schedule": "interleaved", "partition": "uniform"},
    {"stages": 2, "schedule": "zero_bubble"},
]


@pytest.mark.fast_cells("zero_bubble")
@pytest.mark.claims("pipeline.partition")
@pytest.mark.parametrize("section", SCHEDULES, ids=["interleaved", "zero_bubble"])
def test_schedules_of_a_decoder(section: dict[str, Any], ranks: RankPools) -> None:
    check(ranks(2).run(train, "llama", section, 1), "llama")


@pytest.mark.slow
def test_replicas_of_a_decoder(ranks: RankPools) -> None:
    check(ranks(4).run(train, "qwen3", SCHEDULES[0], 2), "qwen3", 2)


def save(folder: str) -> dict[str, Tensor]:
    config = config_of(1, auto=True, stages=2)
    engine, *_ = hadal.initialize(model=model_of("qwen3"), config=config)
    engine.train_batch(iter([batch(n) for n in range(MICRO)]))
    engine.save_checkpoint(folder)
    return {name: value.clone() for name, value in engine.module.named_parameters()}


def load(folder: str, expected: dict[str, Tensor]) -> None:
    engine, *_ = hadal.initialize(model=model_of("qwen3"), config=config_of(1))
    engine.load_checkpoint(folder)
    for name, value in engine.module.named_parameters():
        assert torch.equal(value, expected[name]), name


@pytest.mark.slow
def test_the_model_without_stages_loads_their_checkpoint(ranks: RankPools, tmp_path: Path) -> None:
    first, second = ranks(2).run(save, str(tmp_path))
    assert torch.equal(first["model.embed_tokens.weight"], second["lm_head.weight"])
    ranks(1).run(load, str(tmp_path), {**second, **first})


@on_ranks(2)
def test_models_that_cannot_be_cut_are_refused() -> None:
    def refused(kind: Any, text: str, model: nn.Module, section: Any, **more: Any) -> None:
        with pytest.raises(kind, match=text):
            hadal.initialize(model=model, config=config_of(1, **section), **more)

    auto = {"auto": True, "stages": 2}
    refused(ConfigError, "needs the number of stages", model_of("llama"), {"auto": True})
    refused(ConfigError, "set pipeline.auto", model_of("llama"), {"stages": 2})
    refused(ModelError, "Linear has no", nn.Linear(2, 2), auto)
    refused(ConfigError, "multiple of 3", model_of("llama"), {"auto": True, "stages": 3})
    refused(UsageError, "into 12 stages", model_of("llama"), {**auto, "chunks": 6})
    refused(UsageError, "itself", model_of("llama"), {**auto, "activation_checkpoint_interval": 1})
    model = model_of("llama")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    refused(UsageError, "other stages will hold", model, auto, optimizer=optimizer)
    engine, *_ = hadal.initialize(model=model_of("llama"), config=config_of(1, **auto))
    words = batch(0)["input_ids"]
    for given, text in [
        ({"input_ids": words}, "no labels"),
        ({"input_ids": words, "pixels": words, "labels": words}, "expected input_ids"),
    ]:
        with pytest.raises((UsageError, PipelineError), match=text):
            engine.train_batch(iter([given] * MICRO))


@pytest.mark.parametrize("kind", ["granite", "cohere"])
def test_models_that_change_their_embeddings(kind: str) -> None:
    sizes = {**SIZES, "num_hidden_layers": 1, "embedding_multiplier": 2.0}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **sizes))
    modes = {name: module.training for name, module in model.named_modules()}
    if kind == "granite":
        with pytest.raises(ModelError, match="scales, drops or adds"):
            check_decoder(model)
    else:
        check_decoder(model)
    assert modes == {name: module.training for name, module in model.named_modules()}


def test_models_of_another_shape() -> None:
    model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=1, n_embd=4, vocab_size=8))
    with pytest.raises(ModelError, match="GPT2LMHeadModel has no decoder"):
        check_decoder(model)
