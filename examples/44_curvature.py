"""Curvature: the dominant eigenvalue of each block's Hessian, during training.

    python examples/44_curvature.py

Blocks with a large eigenvalue are sensitive to changes of their weights, so their bits fall slowly.
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
        "gas_boundary_resolution": 2,  # in every second update
        "tol": 0.001,
    },
    "compression_training": {
        "weight_quantization": {
            "shared_parameters": {"enabled": True, "schedule_offset": 2},
            "different_groups": {
                "all": {"params": {"start_bits": 8, "target_bits": 4, "quantization_period": 2}}
            },
        }
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
    bits = [block.compression.bits.bits for block in engine.module.blocks]
    assert max(bits) > min(bits)
    for number, share in enumerate(found.relative):
        value = found.values[number]
        print(f"block {number}: {value:.4f}, {share:.0%} of the largest, {bits[number]} bits")
    engine.destroy()


main()
