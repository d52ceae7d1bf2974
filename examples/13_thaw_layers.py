"""Unfreezing layers: train the head first, then one more layer at a time.

    hadal run --num_accelerators 2 examples/13_thaw_layers.py

Muon steps the matrices and Adam the biases. A param group added during training is trained from the
next update on, as in torch: unfreeze its parameters, then add the group on every rank.
"""

import torch
from torch import nn
from torch.nn import functional as F

import hadal

STEPS = 15
CONFIG = {
    "train_micro_batch_size_per_gpu": 16,
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
    "optimizer": {"type": "Muon", "params": {"lr": 0.02, "adam_lr": 0.005}},
}


def main() -> None:
    """Unfreeze two of three layers, from the top."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(4, 24), nn.Tanh(), nn.Linear(24, 24), nn.Tanh(), nn.Linear(24, 1)
    )
    for layer in (model[0], model[2]):
        layer.requires_grad_(False)
    engine, optimizer, _, _ = hadal.initialize(model=model, config=CONFIG)

    losses = []
    for phase, layer in enumerate([None, model[2], model[0]]):
        if layer is not None:
            layer.requires_grad_(True)
            optimizer.add_param_group({"params": [layer.weight], "use_muon": True})
            optimizer.add_param_group({"params": [layer.bias], "use_muon": False})
        for _ in range(STEPS):
            x = torch.randn(16, 4, device=engine.device)
            loss = F.mse_loss(engine(x), x.abs().sum(dim=1, keepdim=True))
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        if torch.distributed.get_rank() == 0:
            groups = len(optimizer.param_groups)
            print(f"phase {phase}: {groups} param groups, loss {losses[-1]:.3f}")

    assert sum(losses[-5:]) < sum(losses[:5]) / 2
    engine.destroy()


if __name__ == "__main__":
    main()
