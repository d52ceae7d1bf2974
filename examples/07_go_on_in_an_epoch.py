"""Stop in the middle of an epoch, and go on with exactly the samples that are left.

    python -m torch.distributed.run --standalone --nproc_per_node=2 examples/07_go_on_in_an_epoch.py

The loader shuffles anew each epoch and gives every rank its own part. A checkpoint holds how much
of the epoch was handed out, whatever a loader's workers have read ahead.
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
    """An engine, and its batches for ever: at the end of an epoch the next one begins."""
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
    """Train ten steps at a stretch, and the same with a break after four."""
    engine, batches = start()
    # One folder that all ranks see: here that where they were started.
    folder = Path("hadal_example")
    first = train(engine, batches, 4)
    engine.save_checkpoint(folder)
    rest = train(engine, batches, 6)

    again, its_batches = start()
    again.load_checkpoint(folder)
    assert train(again, its_batches, 6) == rest
    assert torch.equal(again.state_dict()["weight"], engine.state_dict()["weight"])
    if hadal.comm.get_rank() == 0:
        print(f"an epoch has {len(batches)} batches for each rank; rank 0 read")
        print(f"before the break {first}")
        print(f"after it         {rest}")
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
