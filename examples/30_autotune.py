"""Autotuning: a search for the fastest micro-batch with `hadal run --autotuning`.

    python examples/30_autotune.py

Each experiment runs this file with another configuration for three updates. One of the sizes
simulates an out-of-memory error; the table shows the reason. `--autotuning run` instead of `tune`
would then train with the best one. Your own search:

    hadal run --autotuning run train.py --deepspeed ds_config.json
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

CONFIG = {
    "train_micro_batch_size_per_gpu": [8, 64],
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    "zero_optimization": {"stage": 0},
    "autotuning": {
        "enabled": True,
        "start_profile_step": 2,
        "end_profile_step": 3,
        # Given, so that no profiling run has to count them.
        "model_info": {"num_params": 33_088},
    },
}


def train(config: str, largest: int) -> None:
    """Train like any program that takes the path of its configuration."""
    import torch
    from torch import nn

    import hadal

    model = nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 64))
    engine, *_ = hadal.initialize(model=model, config=config)
    size = engine.train_micro_batch_size_per_gpu()
    if size > largest:
        raise ValueError(f"there are {largest} samples, fewer than {size}")
    for _ in range(100):
        x = torch.randn(size, 64, device=engine.device)
        engine.backward(nn.functional.mse_loss(engine(x), x))
        engine.step()


def search() -> None:
    """Write a configuration, search, and print the result."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "ds_config.json").write_text(json.dumps(CONFIG))
        command = [sys.executable, "-m", "hadal", "run", "--autotuning", "tune"]
        command += ["--num_accelerators", "1", os.path.abspath(__file__)]
        command += ["--deepspeed", "ds_config.json", "--largest", "32"]
        subprocess.run(command, cwd=folder, check=True)
        results = Path(folder, "autotuning_results")
        print(results.joinpath("summary.txt").read_text())
        print("best:", results.joinpath("ds_config_optimal.json").read_text())


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--deepspeed", metavar="CONFIG", help="train, as one experiment")
    parser.add_argument("--largest", type=int, default=32)
    args = parser.parse_args()
    if args.deepspeed:
        train(args.deepspeed, args.largest)
    else:
        search()
