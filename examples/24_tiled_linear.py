"""A linear layer in tiles: stage 3 gathers only one at a time.

    hadal run --num_accelerators 2 examples/24_tiled_linear.py

Use it for a layer so wide that its gathered weight does not fit in memory. It computes the same as
`nn.Linear`, and can copy its values.
"""

import torch
from torch import nn

import hadal

CONFIG = {
    "train_micro_batch_size_per_gpu": 2,
    "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
    "zero_optimization": {
        "stage": 3,
        "stage3_param_persistence_threshold": 0,
        "stage3_max_live_parameters": 0,
    },
}


def main() -> None:
    """Train a few steps alongside the layer whose values the tiles copied."""
    hadal.init_distributed()
    torch.manual_seed(0)
    whole = nn.Linear(64, 256)
    tiled = hadal.zero.TiledLinear(64, 256, in_splits=2, out_splits=4, init_linear=whole)
    x = torch.randn(2, 64)
    torch.testing.assert_close(tiled(x), whole(x))
    model = nn.Sequential(tiled, nn.Tanh(), nn.Linear(256, 1))
    engine, _, _, _ = hadal.initialize(
        model=model, model_parameters=model.parameters(), config=CONFIG
    )
    for _ in range(5):
        loss = engine(x.to(engine.device)).square().mean()
        engine.backward(loss)
        engine.step()
    if hadal.comm.get_rank() == 0:
        print(f"{len(list(tiled.parameters()))} tensors in tiles; loss {loss.item():.3f}")
    engine.destroy()


if __name__ == "__main__":
    main()
