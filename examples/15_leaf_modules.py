"""Leaf modules: stage 3 gathers a layer of experts as a whole, for any expert that a rank uses.

    hadal run --num_accelerators 2 examples/15_leaf_modules.py

Otherwise the ranks' paths differ, and every gather is announced to all ranks; this works too, with
one warning. A leaf module keeps all ranks on one path, so gathers are planned and prefetched.
"""

import torch
from torch import nn

import hadal

CONFIG = {
    "train_micro_batch_size_per_gpu": 2,
    "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
}


class Experts(nn.Module):
    """Sends each batch to one of its experts."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Choose the expert by the values, so that ranks choose different ones."""
        chosen = int(x.abs().sum() * 100) % len(self.experts)
        return x + self.experts[chosen](x)


def main() -> None:
    """Train a few steps."""
    hadal.init_distributed()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), Experts(), nn.Linear(8, 1))
    leaves = hadal.set_z3_leaf_modules(model, [Experts])
    engine, _, _, _ = hadal.initialize(
        model=model, model_parameters=model.parameters(), config=CONFIG
    )
    rank = hadal.comm.get_rank()
    generator = torch.Generator().manual_seed(rank)
    for _ in range(5):
        x = torch.randn(2, 8, generator=generator).to(engine.device)
        loss = engine(x).square().mean()
        engine.backward(loss)
        engine.step()
    if rank == 0:
        print(f"{len(leaves)} leaf module; loss {loss.item():.3f}")
    engine.destroy()


if __name__ == "__main__":
    main()
