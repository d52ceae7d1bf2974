"""Seconds to generate tokens at stage 3, with weights gathered once (`hybrid_engine`) and in turns.

Run it with `torchrun --nproc-per-node 2 benchmarks/generation.py`. A transformers GPT-2 of 91 M
with a limit of 10 M gathered elements stands for a model of 9 billion with the default limit of
1 billion. See ``benchmarks/README.md``.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from transformers import GPT2Config, GPT2LMHeadModel

from hadal import init_distributed, initialize

_SMALL = {"bos_token_id": 0, "eos_token_id": None}
_GPT = {"n_layer": 12, "n_embd": 768, "n_head": 12, "vocab_size": 8192, "n_positions": 64}
_CONFIG = {
    "train_micro_batch_size_per_gpu": 1,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
    "zero_optimization": {"stage": 3, "stage3_max_live_parameters": 10_000_000},
    "hybrid_engine": {"enabled": True},
}


def _seconds(generate: Callable[..., Any], tokens: int) -> float:
    words = torch.ones(1, 8, dtype=torch.long)
    dist.barrier()
    began = time.perf_counter()
    generate(words, max_new_tokens=tokens, do_sample=False, pad_token_id=0)
    dist.barrier()
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=32)
    given = parser.parse_args()
    init_distributed()
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(**_GPT, **_SMALL))
    engine, *_ = initialize(model=model, config=_CONFIG)
    engine.eval()
    ways = {"once": model.generate, "for each token": partial(GPT2LMHeadModel.generate, model)}
    found: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(given.rounds + 1):
        for name, generate in ways.items():
            seconds = _seconds(generate, given.tokens)
            if number:  # the first round records the uses
                found[name].append(seconds)
    if dist.get_rank() == 0:
        for name, several in found.items():
            print(f"gathered {name}: {median(several):.2f} s for {given.tokens} tokens")
        pairs = zip(*found.values(), strict=True)
        print(f"ratio {median(once / each for once, each in pairs):.2f}")
    engine.destroy()


if __name__ == "__main__":
    main()
