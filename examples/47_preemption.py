"""Saving when a signal announces that the node will be preempted, and resuming from there.

    hadal run --num_accelerators 2 examples/47_preemption.py

Here rank 1 sends itself the signal that Slurm, Kubernetes or a cloud would send. All ranks save at
the same update. With `save_dir` in `on_signal`, the engine does what this loop does at the signal.
"""

import os
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

import hadal

CONFIG = {
    "train_micro_batch_size_per_gpu": 4,
    "zero_optimization": {"stage": 2},
    "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
    "checkpoint": {"on_signal": {"signals": ["SIGTERM", "SIGUSR1"]}},
}
# A directory that all ranks see; here the working directory.
FOLDER = Path("hadal_example_preempted")


def make_engine() -> Any:
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 1))
    engine, _, _, _ = hadal.initialize(model=model, config=CONFIG)
    return engine


def step(engine: Any) -> float:
    inputs = torch.randn(4, 8, device=engine.device)
    loss = engine(inputs).square().mean()
    engine.backward(loss)
    engine.step()
    return loss.item()


def train(engine: Any) -> None:
    """Train until the signal; then save and exit."""
    losses = []
    for number in range(100_000):
        losses.append(step(engine))
        if number == 3 and hadal.comm.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGUSR1)
        if engine.is_preempted:
            engine.save_checkpoint(FOLDER, client_state={"losses": losses})
            engine.leave_preempted()  # raises SystemExit(75)
        time.sleep(0.01)


def main() -> None:
    """Get preempted, and resume as the job's next start would."""
    torch.manual_seed(0)
    engine = make_engine()
    try:
        train(engine)
    except SystemExit as left:
        assert left.code == 75
    expected = step(engine)
    engine.destroy()

    again = make_engine()
    path, client_state = again.load_checkpoint(FOLDER)
    assert path is not None and len(client_state["losses"]) == again.global_steps
    assert step(again) == expected  # the same inputs and dropout
    if hadal.comm.get_rank() == 0:
        print("preempted and resumed after update", len(client_state["losses"]))
        shutil.rmtree(FOLDER)


if __name__ == "__main__":
    main()
