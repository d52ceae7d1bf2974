"""A byte-level GPT in plain `torch.nn`: this file is independent of how it is trained."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

BYTES = 256


@dataclass(frozen=True)
class Shape:
    """The size of the model. The default has 10.8 million parameters."""

    width: int = 384
    depth: int = 6
    heads: int = 6
    context: int = 128


class Attention(nn.Module):
    """Causal self-attention over several heads."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.qkv = nn.Linear(shape.width, 3 * shape.width, bias=False)
        self.out = nn.Linear(shape.width, shape.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Let each position attend to itself and to earlier positions."""
        batch, length, width = x.shape
        heads = self.qkv(x).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        query, key, value = heads.unbind(0)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(batch, length, width))


class Block(nn.Module):
    """A transformer block: attention and a two-layer perceptron, each on normalized input."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.norm_1 = nn.LayerNorm(shape.width)
        self.attention = Attention(shape)
        self.norm_2 = nn.LayerNorm(shape.width)
        self.up = nn.Linear(shape.width, 4 * shape.width)
        self.down = nn.Linear(4 * shape.width, shape.width)

    def forward(self, x: Tensor) -> Tensor:
        """Add the block's output to the residual stream."""
        x = x + self.attention(self.norm_1(x))
        return x + self.down(F.gelu(self.up(self.norm_2(x)), approximate="tanh"))


class GPT(nn.Module):
    """Predicts the next byte. The head shares its weight with the embedding."""

    def __init__(self, shape: Shape | None = None) -> None:
        super().__init__()
        self.shape = shape or Shape()
        self.bytes = nn.Embedding(BYTES, self.shape.width)
        self.places = nn.Embedding(self.shape.context, self.shape.width)
        self.blocks = nn.ModuleList(Block(self.shape) for _ in range(self.shape.depth))
        self.norm = nn.LayerNorm(self.shape.width)
        self.head = nn.Linear(self.shape.width, BYTES, bias=False)
        self.apply(self._start_values)
        for block in self.blocks:  # keep the stream's variance the same at any depth
            for last in (block.attention.out, block.down):
                nn.init.normal_(last.weight, std=0.02 / (2 * self.shape.depth) ** 0.5)
        self.head.weight = self.bytes.weight

    @staticmethod
    def _start_values(module: nn.Module) -> None:
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        """Return the mean loss in nats if the next bytes `y` are given, otherwise the logits."""
        places = torch.arange(x.shape[1], device=x.device)
        stream = self.bytes(x) + self.places(places)
        for block in self.blocks:
            stream = block(stream)
        logits = self.head(self.norm(stream)).float()
        return logits if y is None else F.cross_entropy(logits.flatten(0, 1), y.flatten())

    @torch.no_grad()
    def generate(self, prompt: bytes, count: int, *, heat: float = 0.8, seed: int = 0) -> bytes:
        """Continue `prompt` by `count` bytes; a lower `heat` samples more cautiously."""
        device = self.bytes.weight.device
        generator = torch.Generator().manual_seed(seed)
        text = list(prompt)
        for _ in range(count):
            seen = torch.tensor([text[-self.shape.context :]], device=device)
            chances = (self(seen)[0, -1] / heat).softmax(-1).cpu()
            text.append(int(torch.multinomial(chances, 1, generator=generator)))
        return bytes(text)
