"""Activation checkpointing from the configuration: the same losses with fewer bytes in forward.

    python examples/36_activation_checkpointing.py

The section selects the modules to recompute; the model does not change.
"""

import torch
from torch import Tensor, nn

import hadal

CONFIG = {
    "train_micro_batch_size_per_gpu": 4,
    "optimizer": {"type": "AdamW", "params": {"lr": 0.001}},
    "zero_optimization": {"stage": 2},
}


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(0.1)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.dropout(self.down(torch.relu(self.up(self.norm(hidden)))))


class Model(nn.Module):
    def __init__(self, width: int = 64, depth: int = 6) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.head = nn.Linear(width, 1)

    def forward(self, hidden: Tensor) -> Tensor:
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden)


def train(section: dict[str, object]) -> tuple[list[float], int]:
    """Return the losses, and the bytes that autograd stores between forward and backward."""
    torch.manual_seed(0)
    config = {**CONFIG, "activation_checkpointing": section}
    engine, _, _, _ = hadal.initialize(model=Model(), config=config)
    losses, stored = [], {}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        stored[storage.data_ptr()] = storage.nbytes()
        return tensor

    for _ in range(3):
        stored.clear()
        with torch.autograd.graph.saved_tensors_hooks(note, lambda saved: saved):
            loss = engine(torch.randn(4, 128, 64, device=engine.device)).square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    engine.destroy()
    return losses, sum(stored.values())


def main() -> None:
    plain, all_bytes = train({})
    losses, nbytes = train({"modules": "units", "cpu_checkpointing": True})
    assert losses == plain, "the same losses, to the bit"
    print(f"losses {losses}; autograd stores {nbytes:,} bytes instead of {all_bytes:,}")


if __name__ == "__main__":
    main()
