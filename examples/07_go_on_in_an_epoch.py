"""Resuming in the middle of an epoch with exactly the remaining samples.

    hadal run --num_accelerators 2 examples/07_go_on_in_an_epoch.py

The loader shuffles every epoch and gives each rank its own samples. A checkpoint records how much
of the epoch has been used, regardless of what the loader's workers have read ahead.
"""

import shutil
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import hadal

CONFIG = {
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 1,
    "zero_optimization": {"stage": 1},
    "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
}


def start() -> tuple[Any, hadal.RepeatingLoader]:
    """Return an engine and its endless batches: at the end of an epoch the next one begins."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(50, 3, generator=generator)
    data = TensorDataset(torch.arange(50), inputs, inputs.sum(dim=1, keepdim=True))
    torch.manual_seed(0)
    engine, _, loader, _ = hadal.initialize(
        model=nn.Linear(3, 1), training_data=data, config=CONFIG
    )
    return engine, hadal.RepeatingLoader(loader)


def train(engine: Any, batches: hadal.RepeatingLoader, steps: int) -> list[int]:
    seen = []
    for _ in range(steps):
        numbers, x, y = next(batches)
        loss = F.mse_loss(engine(x.to(engine.device)), y.to(engine.device))
        engine.backward(loss)
        engine.step()
        seen += numbers.tolist()
    return seen


def main() -> None:
    """Train ten steps without a break, and again with a break after four."""
    engine, batches = start()
    # A directory that all ranks see; here the working directory.
    folder = Path("hadal_example")
    first = train(engine, batches, 4)
    engine.save_checkpoint(folder)
    rest = train(engine, batches, 6)

    again, its_batches = start()
    again.load_checkpoint(folder)
    assert train(again, its_batches, 6) == rest
    assert torch.equal(again.state_dict()["weight"], engine.state_dict()["weight"])
    if hadal.comm.get_rank() == 0:
        print(f"An epoch has {len(batches)} batches per rank. Rank 0 read these samples:")
        print(f"before the break {first}")
        print(f"after it         {rest}")
        print(
            "No sample repeats within the epoch; the new engine read the same ones after loading."
        )
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
