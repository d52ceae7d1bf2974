"""1-bit optimizers: signs instead of gradients, a sixteenth of the bytes.

    hadal run --num_accelerators 2 examples/26_signs.py

Each of these optimizers first learns the variance of the gradients and then freezes it. From then
on the momentum is sent as signs, and the error is sent later. ZeroOneAdam also makes several
updates without any exchange, so weights differ between ranks temporarily. `engine.eval()`,
checkpoints and reads of weights synchronize them first: all ranks must call these.
"""

import torch
from torch import nn
from torch.nn import functional as F

import hadal
from hadal import comm

STEPS = 120
SECTIONS = [
    {"type": "AdamW", "params": {"lr": 0.01}},
    {"type": "OneBitAdam", "params": {"lr": 0.01, "freeze_step": 40}},
    {"type": "OneBitLamb", "params": {"lr": 0.01, "freeze_step": 40}},
    {
        "type": "ZeroOneAdam",
        "params": {"lr": 0.01, "var_freeze_step": 60, "local_step_scaler": 20},
    },
]


def train(section: dict) -> None:
    """Train once on each rank's own batches; evaluate the same batches on all ranks."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 64), nn.ReLU(), nn.Linear(64, 1))
    config = {
        "train_micro_batch_size_per_gpu": 16,
        "zero_optimization": {"stage": 0},
        "optimizer": section,
    }
    engine, _, _, _ = hadal.initialize(model=model, config=config)
    torch.manual_seed(1 + comm.get_rank())
    for _ in range(STEPS):
        x = torch.randn(16, 4, device=engine.device)
        engine.backward(F.mse_loss(engine(x), x.abs().sum(dim=1, keepdim=True)))
        engine.step()
    engine.eval()
    torch.manual_seed(0)
    x = torch.randn(512, 4).to(engine.device)
    with torch.no_grad():
        loss = F.mse_loss(engine(x), x.abs().sum(dim=1, keepdim=True)).item()
    if comm.get_rank() == 0:
        print(f"{section['type']:12} loss {loss:.4f}")
    assert loss < 0.5
    engine.destroy()


def main() -> None:
    """Train with each of the sections."""
    for section in SECTIONS:
        train(section)


if __name__ == "__main__":
    main()
