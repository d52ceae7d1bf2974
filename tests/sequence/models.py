"""A tiny model of transformers, and one process's training of it."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor

WORDS = 32


def llama(heads: int = 4, key_heads: int = 2, **changes: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from transformers import LlamaConfig, LlamaForCausalLM

        config = LlamaConfig(
            vocab_size=WORDS,
            hidden_size=8 * heads,
            intermediate_size=24,
            num_hidden_layers=2,
            num_attention_heads=heads,
            num_key_value_heads=key_heads,
            head_dim=8,
            max_position_embeddings=64,
            attn_implementation="sdpa",
            **changes,
        )
        torch.manual_seed(0)
        return LlamaForCausalLM(config)


def recomputes(model: Any) -> Any:
    """Let every layer recompute itself in backward; return the model."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the name changes in transformers 6
        model.gradient_checkpointing_enable()
    return model


def tokens(seed: int, rows: int = 2, length: int = 12) -> dict[str, Tensor]:
    """Rows whose first tokens, a prompt, are no targets."""
    generator = torch.Generator().manual_seed(seed)
    found = torch.randint(1, WORDS, (rows, length), generator=generator)
    labels = found.clone()
    labels[:, : length // 2 + seed % 3] = -100
    return {
        "input_ids": found,
        "labels": labels,
        "position_ids": torch.arange(length).expand(rows, -1).contiguous(),
    }
