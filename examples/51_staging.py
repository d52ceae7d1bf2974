"""Saving to a URL during training: the state is staged on a local disk, and a thread uploads it.

    python examples/51_staging.py

`memory://` replaces an object store here; with `s3://bucket/run` (and the package s3fs) nothing
else changes, on any number of ranks.
"""

import tempfile
from typing import Any

import torch
from torch import nn

import hadal

URL = "memory://bucket/run"


def make_engine(scratch: str) -> Any:
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        "checkpoint": {
            "async_save": True,
            # Without "folder" the copy is in host memory.
            "staging": {"folder": scratch, "size": "20GB"},
        },
    }
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 1))
    return hadal.initialize(model=model, config=config)[0]


def step(engine: Any) -> float:
    inputs = torch.randn(4, 8, device=engine.device)
    loss = engine(inputs).square().mean()
    engine.backward(loss)
    engine.step()
    return loss.item()


def main() -> None:
    """Save, train during the upload, and resume from the checkpoint."""
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as scratch:  # on a cluster, the node's local disk
        engine = make_engine(scratch)
        step(engine)
        engine.save_checkpoint(URL)  # returns once the state is in `scratch`
        losses = [step(engine) for _ in range(3)]
        engine.wait_for_checkpoint()  # so does the end of the program
        engine.load_checkpoint(URL)
        assert [step(engine) for _ in range(3)] == losses  # with the same inputs and dropout
        engine.destroy()
    print("saved during training, and resumed:", losses)


if __name__ == "__main__":
    main()
