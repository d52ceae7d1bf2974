"""Tiny models of transformers, one of each way to lay out attention and feed-forward layers."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor

WORDS = 35
_SIZES = {"vocab_size": WORDS, "num_hidden_layers": 2, "num_attention_heads": 4}
_WIDTHS = {**_SIZES, "hidden_size": 32, "intermediate_size": 24}
_GROUPED = {**_WIDTHS, "num_key_value_heads": 2}
_LAYERS = {"vocab_size": WORDS, "n_layer": 2, "n_head": 4}
_NONE = {"pad_token_id": None, "bos_token_id": None, "eos_token_id": None}
_OPT = {"ffn_dim": 24, "word_embed_proj_dim": 32, "max_position_embeddings": 32}
_FALCON = {"alibi": False, "new_decoder_architecture": True, "num_kv_heads": 2}
_T5 = {"d_model": 32, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": 4}
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", _GROUPED),
    "tied llama": ("LlamaConfig", {**_GROUPED, "tie_word_embeddings": True}),
    "uneven llama": (
        "LlamaConfig",
        {**_GROUPED, "hidden_size": 48, "num_attention_heads": 6, "num_key_value_heads": 3},
    ),
    "qwen2": ("Qwen2Config", _GROUPED),
    "qwen3": ("Qwen3Config", {**_GROUPED, "head_dim": 8}),
    "phi3": ("Phi3Config", _GROUPED),
    "gptneox": ("GPTNeoXConfig", _WIDTHS),
    "phi": ("PhiConfig", _GROUPED),
    "opt": ("OPTConfig", {**_SIZES, **_OPT, "hidden_size": 32}),
    "bloom": ("BloomConfig", {**_LAYERS, "hidden_size": 32}),
    "bert": ("BertConfig", _WIDTHS),
    "t5": ("T5Config", {"vocab_size": WORDS, **_T5}),
    "gptj": ("GPTJConfig", {**_LAYERS, "n_embd": 32, "rotary_dim": 4}),
    "falcon": ("FalconConfig", {**_SIZES, **_FALCON, "hidden_size": 32}),
    "gpt2": ("GPT2Config", {**_LAYERS, "n_embd": 32}),
}


def config_of(kind: str) -> Any:
    import transformers

    name, values = CONFIGS[kind]
    config = getattr(transformers, name)(**_NONE, **values)
    for one in vars(config):
        if "drop" in one and isinstance(getattr(config, one), float):
            setattr(config, one, 0.0)
    if kind == "t5":
        config.decoder_start_token_id = config.pad_token_id = 0
    return config


def model_of(kind: str, seed: int = 0) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import transformers

        kinds = {
            "t5": transformers.AutoModelForSeq2SeqLM,
            "bert": transformers.AutoModelForMaskedLM,
        }
        torch.manual_seed(seed)
        maker = kinds.get(kind, transformers.AutoModelForCausalLM)
        model = maker.from_config(config_of(kind))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "bias" in name:  # zeros hide faults
                parameter.add_(torch.randn(parameter.shape) * 0.05)
            elif "norm" in name or "ln" in name:
                parameter.add_(torch.randn(parameter.shape) * 0.1)
            else:
                parameter.mul_(3.0)
    return model


def batch_of(step: int, reader: int = 0, rows: int = 2, length: int = 7) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(100 * step + reader)
    tokens = torch.randint(1, WORDS, (rows, length), generator=generator)
    labels = tokens.clone()
    labels[:, : 1 + step % 2] = -100
    return {"input_ids": tokens, "labels": labels}
