"""Your own optimizer and schedule: any torch objects, without sections in the configuration.

    python examples/03_own_optimizer_and_schedule.py

The engine keeps the optimizer's groups and steps it once per update. Pass a schedule as a function:
the engine calls it with the optimizer once that is ready, and steps the two together.
"""

import torch
from torch import nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import CosineAnnealingLR

import hadal

STEPS = 50
CONFIG = {
    "train_micro_batch_size_per_gpu": 16,
    "gradient_accumulation_steps": 1,
    "zero_optimization": {"stage": 2},
}


def main() -> None:
    """Train with two groups of parameters: weights decay, biases do not."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 1))
    weights = [p for p in model.parameters() if p.ndim > 1]
    biases = [p for p in model.parameters() if p.ndim == 1]
    mine = torch.optim.AdamW(
        [{"params": weights, "weight_decay": 0.1}, {"params": biases, "weight_decay": 0.0}],
        lr=0.02,
    )
    engine, optimizer, _, scheduler = hadal.initialize(
        model=model,
        model_parameters=model.parameters(),
        optimizer=mine,
        lr_scheduler=lambda its: CosineAnnealingLR(its, T_max=STEPS),
        config=CONFIG,
    )

    losses, rates = [], [engine.get_lr()[0]]
    for _ in range(STEPS):
        x = torch.randn(16, 4, device=engine.device)
        loss = F.mse_loss(engine(x), x.abs().sum(dim=1, keepdim=True))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
        rates.append(engine.get_lr()[0])

    print(
        f"loss {losses[0]:.3f} -> {losses[-1]:.3f}, learning rate {rates[0]:g} -> {rates[-1]:.1g}"
    )
    assert isinstance(scheduler, CosineAnnealingLR)
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.0]
    assert losses[-1] < losses[0] / 2
    assert rates[-1] < 1e-6
    engine.destroy()


if __name__ == "__main__":
    main()
