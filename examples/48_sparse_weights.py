"""Sparse weights: blocks of four rows are pruned during training, step by step.

    python examples/48_sparse_weights.py

At the end three quarters of the hidden weights are zero, and the model has its own classes again.
"""

import torch
from torch import nn

import hadal
from hadal.compression import init_compression, redundancy_clean

config = {
    "train_micro_batch_size_per_gpu": 64,
    "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
    "compression_training": {
        "sparse_pruning": {
            "shared_parameters": {
                "enabled": True,
                "method": "snip_momentum",
                "block_pattern": "4x1",
                "dense_ratio": 0.25,
                "schedule_offset": 10,
                "schedule_offset_end": 40,
                "schedule_offset_stride": 10,
                "excluded_modules": ["4"],
            }
        }
    },
}


def main() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1)
    )
    init_compression(model, config)
    engine, *_ = hadal.initialize(model=model, config=config)
    losses = []
    for _ in range(100):
        x = torch.randn(64, 8, device=engine.device)
        loss = (engine(x) - x.square().sum(1, keepdim=True).sqrt()).square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    assert losses[-1] < 0.1 * losses[0]

    redundancy_clean(engine, config)
    both = torch.cat([model[0].weight.flatten(), model[2].weight.flatten()])
    zeros = (both == 0).float().mean().item()
    assert abs(zeros - 0.75) < 0.01
    print(f"loss {losses[0]:.2f} -> {losses[-1]:.2f}; {zeros:.0%} of the weights are zero")


if __name__ == "__main__":
    main()
