"""The speedup of a step by random token dropping.

A GPT trains on CPUs or an accelerator, with all tokens, and with fewer in all layers except the
first and the last. See `docs/data.md`.

    python benchmarks/token_drop.py
"""

from __future__ import annotations

import argparse
import json
import time
from statistics import median

import torch
from torch import Tensor, nn

import hadal
from hadal.device import synchronize
from hadal.plugins.data_efficiency.token_drop import convert_to_random_ltd


class Block(nn.Module):
    """Pre-norm transformer block."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.heads = max(1, width // 64)
        self.ln1, self.ln2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, hidden: Tensor) -> Tensor:
        rows, length, width = hidden.shape
        split = self.qkv(self.ln1(hidden)).view(rows, length, 3, self.heads, -1).transpose(1, 3)
        found = nn.functional.scaled_dot_product_attention(*split.unbind(2), is_causal=True)
        hidden = hidden + self.out(found.transpose(1, 2).reshape(rows, length, width))
        return hidden + self.mlp(self.ln2(hidden))


class Gpt(nn.Module):
    """Language model that returns its loss."""

    def __init__(self, layers: int, width: int, length: int, words: int) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(words, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.head = nn.Linear(width, words, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.words(ids) + self.places.weight[: ids.shape[1]]
        for block in self.blocks:
            hidden = block(hidden)
        logits = self.head(hidden[:, :-1]).flatten(0, 1)
        return nn.functional.cross_entropy(logits, ids[:, 1:].flatten())


def config_of(options: argparse.Namespace, kept: int) -> dict[str, object]:
    middle = list(range(1, options.layers - 1))
    schedule = {"min_value": kept, "max_value": options.length, "schedule_type": "fixed_linear"}
    schedule["schedule_config"] = {"require_steps": 10**9, "seq_per_step": 1}
    ltd = {
        "enabled": True,
        "total_layer_num": options.layers,
        "random_ltd_layer_num": len(middle),
        "random_ltd_layer_id": middle,
        "model_mask_name": None,
        "model_type": "decoder",
        "hidden_state_order": "batch_seq_dim",
        "random_ltd_schedule": schedule,
    }
    return {
        "train_micro_batch_size_per_gpu": options.rows,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "data_efficiency": {"data_routing": {"random_ltd": ltd}},
    }


def engine_of(options: argparse.Namespace, kept: int) -> hadal.Engine:
    torch.manual_seed(0)
    model = Gpt(options.layers, options.width, options.length, 8192)
    engine, *_ = hadal.initialize(
        model=convert_to_random_ltd(model, Block), config=config_of(options, kept)
    )
    return engine


def step_s(engine: hadal.Engine, ids: Tensor) -> float:
    began = time.perf_counter()
    engine.backward(engine(ids))
    engine.step()
    synchronize(engine.device)
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    shares = (1.0, 0.75, 0.5, 0.25)
    engines = {share: engine_of(options, int(options.length * share)) for share in shares}
    device = engines[1.0].device
    ids = torch.randint(8192, (options.rows, options.length), device=device)
    times: dict[float, list[float]] = {share: [] for share in shares}
    for _ in range(options.rounds + 1):  # the first one warms up
        for share, engine in engines.items():
            times[share].append(step_s(engine, ids))
    whole = median(times[1.0][1:])
    for share in shares:
        mine = median(times[share][1:])
        found = {
            "kept": share,
            "step_ms": round(1e3 * mine, 1),
            "saved": round(1 - mine / whole, 3),
        }
        print(json.dumps(found))


if __name__ == "__main__":
    main()
