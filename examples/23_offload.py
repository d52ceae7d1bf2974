"""Offloading: optimizer state and weights in host memory or on a disk.

    hadal run --num_accelerators 2 examples/23_offload.py

The disk is a temporary directory here; use the path of your NVMe. The results are the same in every
tier, and if the optimizer's state leaves the device for forward and backward alone.
"""

import tempfile

import torch
from torch import nn

import hadal


def train(offload: dict[str, object], **sections: object) -> float:
    """Return the loss after a few steps with the given offloading."""
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0, **offload},
        **sections,
    }
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 1))
    engine, _, _, _ = hadal.initialize(
        model=model, model_parameters=model.parameters(), config=config
    )
    generator = torch.Generator().manual_seed(hadal.comm.get_rank())
    value = 0.0
    for _ in range(5):
        x = torch.randn(2, 64, generator=generator).to(engine.device, torch.bfloat16)
        loss = engine(x).square().mean()
        engine.backward(loss)
        engine.step()
        value = loss.item()
    engine.destroy()
    return value


def main() -> None:
    """Train four times."""
    hadal.init_distributed()
    with tempfile.TemporaryDirectory() as path:
        nvme = {"device": "nvme", "nvme_path": path}
        losses = {
            "on the device": train({}),
            "optimizer state on the host": train({"offload_optimizer": {"device": "cpu"}}),
            "optimizer state away from passes": train(
                {}, compile={"deepcompile": True, "offload_opt_states": True}
            ),
            # max_in_cpu 0: no weight stays in host memory
            "everything on the disk": train(
                {"offload_optimizer": nvme, "offload_param": {**nvme, "max_in_cpu": 0}}
            ),
        }
    if hadal.comm.get_rank() == 0:
        for where, loss in losses.items():
            print(f"{where:33} loss {loss:.6f}")


if __name__ == "__main__":
    main()
