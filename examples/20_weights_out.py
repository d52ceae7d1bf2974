"""Exporting weights: for the Hugging Face Hub, in fp32, and as a state dict.

    hadal run --num_accelerators 2 examples/20_weights_out.py

The same works with checkpoints of DeepSpeed, which `engine.load_checkpoint` also reads: see
docs/checkpoints.md.
"""

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import nn

import hadal
from hadal.utils import get_fp32_state_dict_from_zero_checkpoint

CONFIG = {
    "train_micro_batch_size_per_gpu": 4,
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 3, "stage3_gather_16bit_weights_on_model_save": True},
    "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
}


def train(engine: Any) -> None:
    for _ in range(3):
        inputs = torch.randn(4, 8, device=engine.device, dtype=torch.bfloat16)
        engine.backward(engine(inputs).float().square().mean())
        engine.step()


def hadal_command(*arguments: str) -> str:
    command = [sys.executable, "-m", "hadal", *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def main() -> None:
    """Train, save, and export the weights."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
    engine, _, _, _ = hadal.initialize(model=model, config=CONFIG)
    train(engine)
    folder = Path("hadal_example")
    engine.save_checkpoint(folder / "run")
    engine.save_16bit_model(folder / "model")  # during training; all ranks call it
    if hadal.comm.get_rank() == 0:
        # Later, in a single process: in a shell, or from Python.
        print(hadal_command("checkpoint", "inspect", str(folder / "run")))
        hadal_command("checkpoint", "to-fp32", str(folder / "run"), str(folder / "exact"))
        state = get_fp32_state_dict_from_zero_checkpoint(folder / "run")
        for name, value in load_file(folder / "exact" / "model.safetensors").items():
            assert torch.equal(value, state[name])
        for name, value in load_file(folder / "model" / "model.safetensors").items():
            assert torch.equal(value, state[name].bfloat16())
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
