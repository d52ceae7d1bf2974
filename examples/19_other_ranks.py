"""Saving at one stage in bf16, in the background, and loading at another stage in fp32.

    hadal run --num_accelerators 2 examples/19_other_ranks.py

Parameters are found by name, for any stage, number of ranks, dtypes and buckets. The
loading half works with any number of processes.
"""

import shutil
from pathlib import Path
from typing import Any

import torch
from torch import nn

import hadal

ADAM = {"type": "AdamW", "params": {"lr": 0.01}}
SAVED = {
    "train_micro_batch_size_per_gpu": 4,
    "zero_optimization": {"stage": 3},
    "bf16": {"enabled": True},
    "optimizer": ADAM,
    "checkpoint": {"async_save": True},
}
LOADED = {
    "train_micro_batch_size_per_gpu": 4,
    "zero_optimization": {"stage": 1},
    "optimizer": ADAM,
}


def engine_of(config: dict[str, Any]) -> Any:
    """Return an engine for a new model."""
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
    engine, _, _, _ = hadal.initialize(model=model, config=config)
    return engine


def step(engine: Any) -> float:
    """Make one update on random inputs."""
    dtype = next(engine.module.parameters()).dtype
    inputs = torch.randn(4, 8, device=engine.device, dtype=dtype)
    loss = (engine(inputs).float() - 1.0).square().mean()
    engine.backward(loss)
    engine.step()
    return loss.item()


def main() -> None:
    """Train with one configuration, and continue with the other."""
    # A directory that all ranks see; here the working directory.
    folder = Path("hadal_example")
    first = engine_of(SAVED)
    before = [step(first) for _ in range(30)]
    first.save_checkpoint(folder)  # returns at once
    masters = [hadal.utils.safe_get_full_fp32_param(p) for p in first.module.parameters()]
    step(first)
    first.wait_for_checkpoint()

    second = engine_of(LOADED)
    second.load_checkpoint(folder)
    for parameter, master in zip(second.module.parameters(), masters, strict=True):
        assert torch.equal(parameter, master)  # fp32 weights equal the saved masters
    after = [step(second) for _ in range(10)]
    assert max(after) < before[0]
    if hadal.comm.get_rank() == 0:
        print(f"loss {before[0]:.2f}, then {after[0]:.3f}, now {after[-1]:.3f}")
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
