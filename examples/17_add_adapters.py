"""Adapters: train a model, then add low-rank adapters to its frozen layers and train those.

    hadal run --num_accelerators 2 examples/17_add_adapters.py

The layers are wrapped in place while the engine is in use. Parameters added to a model later are
trained once they are passed to the optimizer, on every rank; rank 0's values are used.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import hadal

STEPS = 20
CONFIG = {
    "train_micro_batch_size_per_gpu": 16,
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
    "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
}


class Adapted(nn.Module):
    """A frozen linear layer with a low-rank update (Hu 2021)."""

    def __init__(self, base: nn.Linear, rank: int = 2) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the layer's output plus its update."""
        outputs: Tensor = self.base(inputs) + self.up(self.down(inputs))
        return outputs


def main() -> None:
    """Learn a sum, then twice the sum."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 1))
    engine, optimizer, _, _ = hadal.initialize(model=model, config=CONFIG)

    for task, factor in enumerate([1.0, 2.0]):
        if task:
            new: list[nn.Parameter] = []
            for index in (0, 2):
                model[index] = Adapted(model[index])
                new += [model[index].down.weight, model[index].up.weight]
            optimizer.add_param_group({"params": new, "lr": 0.05})
        losses = []
        for _ in range(STEPS):
            x = torch.randn(16, 4, device=engine.device)
            loss = F.mse_loss(engine(x), factor * x.sum(dim=1, keepdim=True))
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        if torch.distributed.get_rank() == 0:
            print(f"task {task}: loss {losses[0]:.2f}, now {losses[-1]:.2f}")
        assert sum(losses[-5:]) < sum(losses[:5])
    engine.destroy()


if __name__ == "__main__":
    main()
