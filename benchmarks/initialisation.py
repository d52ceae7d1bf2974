"""Seconds to build and initialize a transformers GPT-2 of 91 M, plainly and inside `zero.Init`.

FSDP2 runs in turn with them: it shards what each rank has built, without comparing ranks.

Run it with `torchrun --nproc-per-node 2 benchmarks/initialisation.py`. Imports and the start of
the process group are not counted. See ``benchmarks/README.md``.
"""

from __future__ import annotations

import argparse
import contextlib
import time
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import GPT2Config, GPT2LMHeadModel, logging as transformers_log

import hadal.compat.install
import hadal.zero
from hadal import initialize

_SMALL = {"bos_token_id": 0, "eos_token_id": 0}
_GPT = {"n_layer": 12, "n_embd": 768, "n_head": 12, "vocab_size": 8192, "n_positions": 64}
_TINY = {"n_layer": 1, "n_embd": 8, "n_head": 1, "vocab_size": 16, "n_positions": 4}


def _config(stage: int) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "zero_optimization": {"stage": stage},
    }


def _seconds(stage: int, *, born: bool) -> tuple[float, float]:
    """Seconds of building and of `initialize`, on the slower rank."""
    config = _config(stage)
    dist.barrier()
    began = time.perf_counter()
    context: Any = hadal.zero.Init(config=config) if born else contextlib.nullcontext()
    with context:
        model = GPT2LMHeadModel(GPT2Config(**_GPT, **_SMALL))
    dist.barrier()
    built = time.perf_counter()
    engine, *_ = initialize(model=model, config=config)
    dist.barrier()
    ready = time.perf_counter()
    engine.destroy()
    return built - began, ready - built


def _seconds_of_fsdp2() -> tuple[float, float]:
    """Seconds of building, and of sharding and making the optimizer, on the slower rank."""
    dist.barrier()
    began = time.perf_counter()
    model = GPT2LMHeadModel(GPT2Config(**_GPT, **_SMALL))
    dist.barrier()
    built = time.perf_counter()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    for module in (*model.transformer.h, model):
        fully_shard(module, mp_policy=policy)
    torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    dist.barrier()
    return built - began, time.perf_counter() - built


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--stages", default="0,1,2,3")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    transformers_log.set_verbosity_error()
    GPT2LMHeadModel(GPT2Config(**_TINY, **_SMALL))  # imports modules on first use
    cases = [(int(stage), born) for stage in options.stages.split(",") for born in (False, True)]
    found: dict[tuple[int, bool], list[tuple[float, float]]] = {case: [] for case in cases}
    peer = []
    for number in range(options.rounds):
        peer.append(_seconds_of_fsdp2())
        for stage, born in cases if number % 2 == 0 else reversed(cases):
            found[stage, born].append(_seconds(stage, born=born))
    if dist.get_rank() == 0:
        print("| stage | built | build s | initialize s | both s | of FSDP2's |")
        print("|---|---|---|---|---|---|")
        named = {
            f"{stage} | {'in zero.Init' if born else 'plainly'}": times
            for (stage, born), times in found.items()
        }
        for name, times in {**named, "FSDP2 | plainly": peer}.items():
            parts = [median(column) for column in zip(*times, strict=True)]
            ratio = median(sum(mine) / sum(its) for mine, its in zip(times, peer, strict=True))
            both = median(map(sum, times))
            print(f"| {name} | {parts[0]:.2f} | {parts[1]:.2f} | {both:.2f} | {ratio:.2f} |")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
