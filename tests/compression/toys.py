"""Golden values, a BERT-shaped model and sections for tests of compression."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

X = torch.tensor([[0.9, -1.0, 0.26, -0.33], [0.05, 0.4, -0.61, 0.77], [1.5, -0.2, 0.0, 0.31]])
# DeepSpeed's linear layer of its golden values.
WEIGHT = torch.tensor(
    [
        *([-1.25, 0.5, -0.5, 1.25], [0.25, -0.75, 1.0, 0.0], [-1.0, 0.75, -0.25, -1.25]),
        *([0.5, -0.5, 1.25, 0.25], [-0.75, 1.0, 0.0, -1.0], [0.75, -0.25, -1.25, 0.5]),
    ]
)
INPUT = torch.tensor([[1.0, 2.0, -1.0, 0.5], [0.3, -0.7, 0.2, 1.1]])


def linear() -> nn.Linear:
    made = nn.Linear(4, 6)
    with torch.no_grad():
        made.weight.copy_(WEIGHT)
        made.bias.copy_(torch.arange(6) / 10)
    return made


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.self = nn.ModuleDict({name: nn.Linear(16, 16) for name in ("query", "key", "value")})
        self.output = nn.ModuleDict({"dense": nn.Linear(16, 16)})

    def forward(self, x: Tensor) -> Tensor:
        rows, length, _ = x.shape
        parts = [
            self.self[name](x).view(rows, length, -1, 4).transpose(1, 2)
            for name in ("query", "key", "value")
        ]
        found = nn.functional.scaled_dot_product_attention(*parts)
        return x + self.output["dense"](found.transpose(1, 2).reshape(rows, length, -1))


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = Attention()
        self.intermediate = nn.ModuleDict({"dense": nn.Linear(16, 64)})
        self.output = nn.ModuleDict({"dense": nn.Linear(64, 16)})

    def forward(self, x: Tensor) -> Tensor:
        x = self.attention(x)
        return x + self.output["dense"](torch.relu(self.intermediate["dense"](x)))


class Bert(nn.Module):
    """Names as Hugging Face's; four heads."""

    def __init__(self, layers: int = 2) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.bert = nn.Module()
        self.bert.embeddings = nn.ModuleDict({"word_embeddings": nn.Embedding(12, 16)})
        self.bert.encoder = nn.Module()
        self.bert.encoder.layer = nn.ModuleList(Layer() for _ in range(layers))
        self.classifier = nn.Linear(16, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.bert.embeddings["word_embeddings"](tokens)
        for layer in self.bert.encoder.layer:
            x = layer(x)
        return self.classifier(x.mean(1))


TOKENS = torch.arange(24).reshape(4, 6) % 12


def section(
    technique: str,
    shared: dict[str, Any] | None = None,
    params: dict[str, Any] | None = None,
    modules: Any = ("attention.self",),
    **group: Any,
) -> dict[str, Any]:
    """One technique that is on, with one group."""
    scope = {} if modules is None else {"modules": modules}
    if not isinstance(modules, str) and modules is not None:
        scope = {"modules": list(modules)}
    return {
        technique: {
            "shared_parameters": {"enabled": True, **(shared or {})},
            "different_groups": {"g": {"params": params or {}, **scope, **group}},
        }
    }


def config(*sections: dict[str, Any]) -> dict[str, Any]:
    """A configuration with these techniques."""
    return {"compression_training": {name: one for each in sections for name, one in each.items()}}


def weights(start: int, target: int, period: int = 1, modules: Any = ("attention.self",), **shared):
    """Weight quantization."""
    bits = {"start_bits": start, "target_bits": target, "quantization_period": period}
    return section("weight_quantization", shared, bits, modules)


def inputs(bits: int, modules: Any = ("attention.self",), **shared: Any) -> dict[str, Any]:
    """Activation quantization."""
    shared = {"schedule_offset": 0, **shared}
    return section("activation_quantization", shared, {"bits": bits}, modules)
