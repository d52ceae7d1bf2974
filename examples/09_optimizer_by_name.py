"""The optimizer by name in the configuration, with its arguments and param groups.

    python examples/09_optimizer_by_name.py

Built-in names (Adam, AdamW, Lion, Adagrad) are accepted in any case, other classes of torch.optim
by their exact name. Each gives the same results at every ZeRO stage.
"""

import torch
from torch import nn
from torch.nn import functional as F

import hadal

STEPS = 60
SECTIONS = [
    {"type": "lion", "params": {"lr": 0.01, "weight_decay": 0.01}},
    {"type": "AdamW", "params": {"lr": 0.02, "bias_correction": False}},
    {"type": "Adagrad", "params": {"lr": 0.1}},
    {"type": "SGD", "params": {"lr": 0.02, "momentum": 0.9, "nesterov": True}},
]


def train(section: dict) -> None:
    """Train once; the last layer is a group with half the learning rate."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 1))
    rate = section["params"]["lr"]
    groups = [
        {"params": list(model[0].parameters())},
        {"params": list(model[2].parameters()), "lr": rate / 2},
    ]
    config = {
        "train_micro_batch_size_per_gpu": 16,
        "zero_optimization": {"stage": 2},
        "optimizer": section,
    }
    engine, optimizer, _, _ = hadal.initialize(model=model, model_parameters=groups, config=config)
    losses = []
    for _ in range(STEPS):
        x = torch.randn(16, 4, device=engine.device)
        loss = F.mse_loss(engine(x), x.abs().sum(dim=1, keepdim=True))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    print(f"{type(optimizer).__name__:16} loss {losses[0]:.3f} -> {losses[-1]:.3f}")
    assert engine.get_lr() == [rate, rate / 2]
    assert losses[-1] < losses[0] / 2
    engine.destroy()


def main() -> None:
    """Train with each of the sections."""
    for section in SECTIONS:
        train(section)


if __name__ == "__main__":
    main()
