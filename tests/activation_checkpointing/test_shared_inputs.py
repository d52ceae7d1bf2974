"""Inputs that several blocks use, and caches of parts of a model: recomputation changes no bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hadal
from activation_checkpointing.test_modules import switch_on
from hadal.config.activation_checkpointing import ActivationCheckpointing
from hadal.plugins.activation_checkpointing import Recomputation

SECTIONS: list[dict[str, Any]] = [
    {"modules": "units"},
    {"modules": "units", "cpu_checkpointing": True},
    {"modules": "units", "profile": True, "synchronize_checkpoint_boundary": True},
    {"modules": ["T5Attention"]},
    {"memory_budget": 1 << 40},
]


@pytest.mark.parametrize("option", ["profile", "synchronize_checkpoint_boundary"])
@pytest.mark.parametrize("is_leaf", [False, True])
def test_boundaries_leave_the_order_of_sums(option: str, is_leaf: bool) -> None:
    torch.manual_seed(0)
    layers = nn.ModuleList(nn.Linear(12, 12) for _ in range(6))
    values, states = torch.randn(5, 12), torch.randn(5, 12)

    def block(i: int, hidden: Tensor, shared: Tensor) -> Tensor:
        return torch.tanh(layers[i](hidden)) * layers[i + 1](shared) + layers[i + 2](shared)

    def gradient(call: Callable[..., Tensor]) -> Tensor:
        start = states.clone().requires_grad_()
        shared = start if is_leaf else start * 3
        hidden = values
        for i in range(4):
            hidden = hidden + call(block, i, hidden, shared)
        hidden.square().sum().backward()
        assert start.grad is not None
        return start.grad

    call = Recomputation(ActivationCheckpointing(**{option: True})).call
    assert torch.equal(gradient(call), gradient(lambda block, *args: block(*args)))


def test_a_leaf_keeps_no_hook_of_a_backward_that_has_come() -> None:
    call = Recomputation(ActivationCheckpointing(profile=True)).call
    x = torch.randn(4, requires_grad=True)
    for _ in range(3):
        call(torch.sin, x).sum().backward()
    assert not x._backward_hooks


def _train(
    section: dict[str, Any] | None,
    stage: int,
    dropout: float,
    *,
    caches: bool = True,
    prepare: Callable[[Any], object] = lambda model: None,
) -> tuple[list[float], dict[str, Tensor]]:
    from transformers import T5Config, T5ForConditionalGeneration

    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 3}
    config = T5Config(**sizes, num_heads=4, dropout_rate=dropout, decoder_start_token_id=0)
    model = T5ForConditionalGeneration(config).train()
    model.config.use_cache = caches  # the decoder has a copy of its own
    prepare(model)
    engine, _, _, _ = hadal.initialize(
        model=model,
        config={
            "train_micro_batch_size_per_gpu": 2,
            "zero_optimization": {"stage": stage},
            "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
            **({} if section is None else {"activation_checkpointing": section}),
        },
    )
    torch.manual_seed(1)
    found = []
    for _ in range(3):
        mask = torch.ones(2, 24, dtype=torch.long)
        mask[0, 15:] = 0
        tokens, labels = torch.randint(64, (2, 24)), torch.randint(64, (2, 17))
        loss = engine(input_ids=tokens, attention_mask=mask, labels=labels).loss
        engine.backward(loss)
        engine.step()
        found.append(loss.item())
    weights = {name: value.clone() for name, value in engine.state_dict().items()}
    engine.destroy()
    return found, weights


def _without_caches(model: Any) -> None:
    """Switch caches off, as recomputation does: on some processors their layout changes bits."""
    for part in (model, model.encoder, model.decoder):
        part.config.use_cache = False


@pytest.mark.fast_cells("0.0-0")
@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_an_encoder_and_a_decoder_have_the_same_bits(stage: int, dropout: float) -> None:
    """The states of the encoder and the biases of positions are used by all blocks."""
    pytest.importorskip("transformers")
    losses, weights = _train(None, stage, dropout, prepare=_without_caches)
    assert _train(None, stage, dropout)[0] == pytest.approx(losses, rel=0, abs=2e-6)
    for section in SECTIONS:
        found, others = _train(section, stage, dropout)
        assert found == losses, section
        assert all(torch.equal(others[name], value) for name, value in weights.items()), section


def test_the_switch_of_transformers_changes_t5_by_rounding() -> None:
    """With it, biases of zero require gradients, so attention takes other kernels."""
    pytest.importorskip("transformers")

    def biases_alone(model: Any) -> None:
        _without_caches(model)
        for module in model.modules():
            if type(module).__name__ == "T5Attention":
                module.gradient_checkpointing = True

    losses, _ = _train(None, 0, 0.0)
    switched, weights = _train(None, 0, 0.0, prepare=switch_on)
    biased, others = _train(None, 0, 0.0, prepare=biases_alone)
    assert switched == biased  # nothing is recomputed there
    assert all(torch.equal(others[name], value) for name, value in weights.items())
    assert switched == pytest.approx(losses, rel=0, abs=2e-6)


def test_a_part_of_a_model_keeps_no_cache_either() -> None:
    """A copied configuration says `use_cache`, where that of the whole model does not."""
    pytest.importorskip("transformers")
    losses = _train(None, 0, 0.1, caches=False)[0]
    assert _train(SECTIONS[0], 0, 0.1, caches=False)[0] == losses


def test_a_part_that_alone_speaks_of_a_cache() -> None:
    """The configuration of a model of pictures and text says `use_cache` in that of its text."""
    pytest.importorskip("transformers")
    from transformers import Gemma3Config, Gemma3ForConditionalGeneration

    few = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
    few["num_attention_heads"] = 2
    text = {**few, "vocab_size": 64, "head_dim": 8, "num_key_value_heads": 2}
    found = []
    for section in ({}, {"activation_checkpointing": {"modules": ["Gemma3DecoderLayer"]}}):
        torch.manual_seed(0)
        vision = {**few, "image_size": 8, "patch_size": 4}
        config = Gemma3Config(text_config=text, vision_config=vision, image_token_index=62)
        assert not hasattr(config, "use_cache")
        model = Gemma3ForConditionalGeneration(config).train()
        keys = {"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "SGD"}, **section}
        engine, _, _, _ = hadal.initialize(model=model, config=keys)
        tokens = torch.arange(12).view(2, 6)
        loss = engine(input_ids=tokens, labels=tokens, token_type_ids=tokens * 0).loss
        engine.backward(loss)
        found += [loss.item(), engine.get_global_grad_norm()]
        engine.destroy()
    assert found[:2] == found[2:]
