"""The GPT-2-shaped model and its random batches."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from peers.settings import Workload

_INITIAL_DEVIATION = 0.02


class Block(nn.Module):
    """A pre-norm transformer block with causal attention."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1 = nn.LayerNorm(width)
        self.attention = nn.Linear(width, 3 * width)
        self.projection = nn.Linear(width, width)
        self.norm_2 = nn.LayerNorm(width)
        self.widen = nn.Linear(width, 4 * width)
        self.narrow = nn.Linear(4 * width, width)

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = hidden + self._attend(self.norm_1(hidden))
        inner = F.gelu(self.widen(self.norm_2(hidden)), approximate="tanh")
        narrowed: Tensor = self.narrow(inner)
        return hidden + narrowed

    def _attend(self, hidden: Tensor) -> Tensor:
        batch, length, width = hidden.shape
        parts = self.attention(hidden).view(batch, length, 3, self.heads, -1)
        query, key, value = parts.permute(2, 0, 3, 1, 4).unbind(0)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        projected: Tensor = self.projection(mixed.transpose(1, 2).reshape(batch, length, width))
        return projected


class Gpt(nn.Module):
    """Returns the mean next-token loss of a batch of ``sequence + 1`` tokens."""

    def __init__(self, workload: Workload) -> None:
        super().__init__()
        width = workload.width
        self.tokens = nn.Embedding(workload.vocabulary, width)
        self.positions = nn.Embedding(workload.sequence, width)
        self.blocks = nn.ModuleList(Block(width, workload.heads) for _ in range(workload.layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, workload.vocabulary, bias=False)
        self.apply(_initialise)
        self.head.weight = self.tokens.weight

    def forward(self, batch: Tensor) -> Tensor:
        tokens, targets = batch[:, :-1], batch[:, 1:]
        places = torch.arange(tokens.shape[1], device=tokens.device)
        hidden = self.tokens(tokens) + self.positions(places)
        for block in self.blocks:
            hidden = block(hidden)
        logits = self.head(self.norm(hidden))
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def _initialise(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=_INITIAL_DEVIATION)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)


def build_model(workload: Workload) -> Gpt:
    """The model, with the same values on every rank and for every contestant."""
    torch.manual_seed(0)
    return Gpt(workload)


def build_batches(workload: Workload, rank: int) -> list[Tensor]:
    """This rank's micro-batches of one optimiser step; every step repeats them."""
    generator = torch.Generator().manual_seed(1 + rank)
    shape = (workload.micro_batch, workload.sequence + 1)
    return [
        torch.randint(workload.vocabulary, shape, generator=generator)
        for _ in range(workload.accumulation)
    ]
