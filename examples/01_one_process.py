"""A whole training run in one file and one process.

    python examples/01_one_process.py

The calls `engine(batch)`, `engine.backward(loss)` and `engine.step()` replace the model's own call,
`loss.backward()` and `optimizer.step()`. With gradient accumulation, call them for every
micro-batch; the engine updates the weights at the boundary.
"""

import torch
from torch import nn
from torch.nn import functional as F

import hadal

CONFIG = {
    "train_micro_batch_size_per_gpu": 16,
    "gradient_accumulation_steps": 2,
    "gradient_clipping": 1.0,
    "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
    "zero_optimization": {"stage": 1},
}


def main() -> None:
    """Learn to multiply two numbers."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 1))
    engine, _, _, _ = hadal.initialize(
        model=model, model_parameters=model.parameters(), config=CONFIG
    )

    first = last = float("nan")
    for micro_step in range(400):
        x = torch.rand(16, 2, device=engine.device) * 2 - 1
        loss = F.mse_loss(engine(x), x.prod(dim=1, keepdim=True))
        engine.backward(loss)
        engine.step()
        first, last = (loss.item() if micro_step == 0 else first), loss.item()

    print(f"loss {first:.4f} -> {last:.4f} in {engine.global_steps} updates")
    assert engine.global_steps == 200
    assert last < first / 10
    engine.destroy()


if __name__ == "__main__":
    main()
