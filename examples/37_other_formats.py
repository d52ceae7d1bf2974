"""Checkpoints for other libraries: torch.distributed.checkpoint and DeepSpeed's universal format.

    hadal run --num_accelerators 2 examples/37_other_formats.py

Both hold weights and optimizer state, and both load back into Hadal: see docs/checkpoints.md.
"""

import shutil
import subprocess
import sys
import warnings
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import hadal

CONFIG = {
    "train_micro_batch_size_per_gpu": 4,
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 2},
    "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
}


def model_of() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))


def export(folder: Path, kind: str) -> None:
    words = ["checkpoint", "export", str(folder / "run"), str(folder / kind), "--format", kind]
    subprocess.run([sys.executable, "-m", "hadal", *words], check=True, capture_output=True)


def load_in_plain_torch(folder: Path) -> nn.Module:
    """Load weights and optimizer state without Hadal."""
    model = model_of()
    optimizer = torch.optim.AdamW(model.parameters())
    weights, moments = get_state_dict(model, optimizer)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about the single process
        dcp.load({"model": weights, "optimizer": moments}, checkpoint_id=folder, no_dist=True)
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)
    assert optimizer.param_groups[0]["lr"] == 0.01
    return model


def main() -> None:
    """Train and save, export, and load the exports."""
    engine, _, _, _ = hadal.initialize(model=model_of(), config=CONFIG)
    for _ in range(3):
        inputs = torch.randn(4, 8, device=engine.device, dtype=torch.bfloat16)
        engine.backward(engine(inputs).float().square().mean())
        engine.step()
    folder = Path("hadal_example")
    engine.save_checkpoint(folder / "run")
    if hadal.comm.get_rank() == 0:
        for kind in ("dcp", "deepspeed-universal"):
            export(folder, kind)
    hadal.comm.barrier()
    exact = hadal.utils.safe_get_full_fp32_param(engine.module[0].weight)
    for kind in ("dcp", "deepspeed-universal"):
        again, _, _, _ = hadal.initialize(model=model_of(), config=CONFIG)
        again.load_checkpoint(folder / kind)
        assert torch.equal(hadal.utils.safe_get_full_fp32_param(again.module[0].weight), exact)
    hadal.comm.barrier()
    if hadal.comm.get_rank() == 0:
        assert torch.equal(load_in_plain_torch(folder / "dcp")[0].weight, exact.cpu())
        print(sorted(path.name for path in (folder / "deepspeed-universal").iterdir()))
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
