"""Tiles: the MLPs and the loss of a long sequence, computed one tile at a time.

    hadal run --num_accelerators 2 examples/34_tiles.py

The intermediate tensors of an MLP, and above all the logits over a large vocabulary, grow with the
sequence. With tiles, only those of one tile exist at a time; losses and gradients stay the same.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import hadal
from hadal.sequence import TiledFusedLogitsLoss, TiledMLP, linear_cross_entropy

WIDTH, WORDS, LENGTH, TILES = 16, 1000, 50, 4
CONFIG = {
    "train_micro_batch_size_per_gpu": 2,
    "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
}


class Model(nn.Module):
    def __init__(self, way: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.way = way
        self.words = nn.Embedding(WORDS, WIDTH)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )
        self.lm_head = nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        hidden = self.words(tokens)
        if self.way == "whole":
            return loss_of(self, hidden + self.mlp(hidden), targets)
        hidden = hidden + TiledMLP.apply(lambda self, x: self.mlp(x), self, hidden, TILES)
        if self.way == "linear":  # the fastest, if the loss is plain cross entropy
            return linear_cross_entropy(hidden, self.lm_head.weight, targets)
        return TiledFusedLogitsLoss.apply(loss_of, self, hidden, targets, shards=TILES)


def loss_of(self: Model, hidden: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(self.lm_head(hidden).flatten(0, 1), targets.flatten())


def train(way: str) -> list[float]:
    engine, _, _, _ = hadal.initialize(model=Model(way), config=CONFIG)
    losses = []
    for step in range(4):
        generator = torch.Generator().manual_seed(10 * step + hadal.comm.get_rank())
        tokens = torch.randint(WORDS, (2, LENGTH + 1), generator=generator).to(engine.device)
        loss = engine(tokens[:, :-1], tokens[:, 1:].contiguous())  # targets are shifted first
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    engine.destroy()
    return losses


def main() -> None:
    hadal.init_distributed()
    whole = train("whole")
    for way in ("tiles", "linear"):
        torch.testing.assert_close(train(way), whole, rtol=1e-5, atol=1e-5)
    if hadal.comm.get_rank() == 0:
        print(f"losses {whole[0]:.3f} to {whole[-1]:.3f}, whole, in tiles and fused")


if __name__ == "__main__":
    main()
