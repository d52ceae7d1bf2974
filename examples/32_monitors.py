"""Losses, learning rates and speed in TensorBoard, Weights & Biases, Comet, CSV and JSON lines.

    hadal run --num_accelerators 2 examples/32_monitors.py

Install the packages first: pip install 'hadal-train[monitor]'. Nothing leaves this machine: the two
services run offline, and `wandb sync` or `comet upload` would send what they have written.
"""

import os
import shutil
from pathlib import Path

import torch
from torch import nn

import hadal
from hadal.monitor.files import read_lines

FOLDER = Path("monitors")
os.environ["WANDB_MODE"], os.environ["WANDB_SILENT"] = "offline", "true"
os.environ["WANDB_DIR"] = str(FOLDER)
os.environ["COMET_OFFLINE_DIRECTORY"] = str(FOLDER / "comet")
os.environ["COMET_LOGGING_CONSOLE"] = "ERROR"


def main() -> None:
    """Train a small model; show what rank 0 has written."""
    hadal.init_distributed(dist_backend="gloo")
    torch.manual_seed(0)
    files = {"enabled": True, "output_path": str(FOLDER), "job_name": "run"}
    model = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 1))
    engine, _, _, _ = hadal.initialize(
        model=model,
        config={
            "train_micro_batch_size_per_gpu": 16,
            "gradient_accumulation_steps": 2,
            "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
            "zero_optimization": {"stage": 1},
            "tensorboard": files,
            "csv_monitor": files,
            "jsonl_monitor": files,
            "wandb": {"enabled": True, "project": "examples"},
            "comet": {"enabled": True, "project": "examples", "online": False},
        },
    )
    data = torch.Generator().manual_seed(hadal.comm.get_rank())  # each rank has its own data
    for _ in range(20):
        inputs = torch.randn(16, 8, generator=data)
        engine.backward((engine(inputs) - inputs.sum(1, keepdim=True)).square().mean())
        engine.step()
    # A program's own scalars go to all monitors, at the samples so far.
    engine.monitor.write_events([("Eval/weight", model[2].bias.detach(), engine.global_samples)])
    engine.destroy()
    if hadal.comm.get_rank() == 0:
        lines = list(read_lines(FOLDER / "run" / "events.jsonl"))
        updates = [line for line in lines if line["kind"] == "update"]
        print(f"{lines[0]['model']['parameters']} parameters on {lines[0]['world_size']} ranks")
        print("names: " + ", ".join(name for name in updates[-1] if "/" in name))
        losses = [update["Train/Samples/train_loss"] for update in updates]
        print("mean losses of all ranks: " + " ".join(f"{loss:.3f}" for loss in losses))
        csv = (FOLDER / "run" / "Train_Samples_train_loss.csv").read_text().splitlines()
        assert [float(row.split(",")[1]) for row in csv[1:]] == losses
        shutil.rmtree(FOLDER)


if __name__ == "__main__":
    main()
