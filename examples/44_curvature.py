"""Curvature: the dominant eigenvalue of each block's Hessian, during training.

    python examples/44_curvature.py

Blocks with a large eigenvalue are sensitive to changes of their weights, such as fewer bits.
"""

import torch
from torch import nn

import hadal

config = {
    "train_micro_batch_size_per_gpu": 16,
    "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
    "eigenvalue": {
        "enabled": True,
        "layer_name": "blocks",
        "layer_num": 3,
        "gas_boundary_resolution": 10,  # in every tenth update
        "tol": 0.001,
    },
}


class Model(nn.Module):
    """Three blocks; forward returns the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            inputs = block(inputs).tanh()
        return nn.functional.mse_loss(inputs, targets)


def main() -> None:
    torch.manual_seed(0)
    engine, *_ = hadal.initialize(model=Model(), config=config)
    for _ in range(20):
        inputs = torch.randn(16, 8, device=engine.device)
        engine.backward(engine(inputs, inputs.roll(1, dims=1).tanh()))
        engine.step()
    found = engine.eigenvalues
    assert len(found.values) == 3
    assert max(found.relative) == 1.0
    for number, (value, share) in enumerate(zip(found.values, found.relative, strict=True)):
        print(f"block {number}: {value:.4f}, {share:.0%} of the largest")
    engine.destroy()


main()
