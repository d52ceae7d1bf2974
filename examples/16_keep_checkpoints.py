"""Saving often, keeping the newest checkpoints, and resuming with the same random numbers.

    hadal run --num_accelerators 2 examples/16_keep_checkpoints.py

A killed save leaves earlier checkpoints intact; a damaged file is refused by name. Checkpoints
saved with `save_latest=False` are never deleted.
"""

import shutil
from pathlib import Path
from typing import Any

import torch
from torch import nn

import hadal

CONFIG = {
    "train_micro_batch_size_per_gpu": 4,
    "zero_optimization": {"stage": 2},
    "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
    "checkpoint": {"keep_last": 2},
}


def step(engine: Any) -> float:
    inputs = torch.randn(4, 8, device=engine.device)
    loss = engine(inputs).square().mean()
    engine.backward(loss)
    engine.step()
    return loss.item()


def main() -> None:
    """Train nine steps, saving after each; resume from the last but one."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 1))
    engine, _, _, _ = hadal.initialize(model=model, config=CONFIG)
    # A directory that all ranks see; here the working directory.
    folder = Path("hadal_example")
    losses = []
    for number in range(9):
        losses.append(step(engine))
        engine.save_checkpoint(folder, f"step{number}", client_state={"losses": losses})
    engine.save_checkpoint(folder, "mine", save_latest=False)

    _, client_state = engine.load_checkpoint(folder, "step7")
    assert client_state["losses"] == losses[:8]
    assert step(engine) == losses[8]  # the same inputs and dropout: random generators are restored
    if hadal.comm.get_rank() == 0:
        print("kept:", *sorted(path.name for path in folder.iterdir() if path.is_dir()))
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
