"""The model, batches and configuration of the kept DeepSpeed checkpoints.

Nothing here imports DeepSpeed or Hadal: `make.py` trains with the one, tests with the other.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

ROWS, TOKENS, WORDS, WIDTH = 2, 5, 13, 7
TRAINED = 3
"""Updates before the checkpoint; one more is recorded beside it."""


class Toy(nn.Module):
    """Odd sizes, a tied head, a frozen weight, a buffer that is saved and one that is not."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(17)
        self.words = nn.Embedding(WORDS, WIDTH)
        self.inner = nn.Linear(WIDTH, 11)
        self.fixed = nn.Linear(11, 11, bias=False)
        self.outer = nn.Linear(11, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.gain = nn.Parameter(torch.tensor([1.5]))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.words.weight
        self.fixed.weight.requires_grad_(False)
        self.register_buffer("shift", torch.linspace(-0.5, 0.5, WIDTH))
        self.register_buffer("unsaved", torch.ones(3), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.words(tokens)
        hidden = hidden + self.outer(torch.tanh(self.fixed(torch.tanh(self.inner(hidden)))))
        return self.head(self.norm(hidden) * self.gain + self.shift.to(hidden.dtype))


class Mixture(nn.Module):
    """A layer of four experts, which differ from the start; `ep_size` ranks share them."""

    def __init__(self, moe: Callable[..., Any], ep_size: int, rank: int) -> None:
        super().__init__()
        torch.manual_seed(17)
        self.words = nn.Embedding(WORDS, WIDTH)
        expert = nn.Sequential(nn.Linear(WIDTH, 11), nn.Tanh(), nn.Linear(11, WIDTH))
        self.moe = moe(WIDTH, expert, 4, ep_size, drop_tokens=False, use_rts=False)
        self.head = nn.Linear(WIDTH, WORDS)
        experts = self.moe.deepspeed_moe.experts.deepspeed_experts
        for local, one in enumerate(experts):
            one[0].bias.data += (rank % ep_size * len(experts) + local) / 4

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.words(tokens)
        return self.head(hidden + self.moe(hidden)[0])


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.norm = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.norm(hidden + torch.tanh(self.inner(hidden)))


def pipeline(pipe: Any, stages: int) -> nn.Module:
    """Return three blocks between tied embeddings, in stages; `pipe`: a library's module."""
    tied = partial(pipe.TiedLayerSpec, "words", nn.Embedding, WORDS, WIDTH)
    logits = tied(forward_fn=lambda words, hidden: hidden @ words.weight.T)
    layers = [tied(), *[pipe.LayerSpec(Block) for _ in range(3)], logits]
    module: nn.Module = pipe.PipelineModule(
        layers, num_stages=stages, loss_fn=loss_of, seed_layers=True, partition_method="uniform"
    )
    return module


def model_of(kind: str, moe: Callable[..., Any], pipe: Any, size: int) -> nn.Module:
    """Return a model of a kind, with experts or a pipeline's stages on `size` ranks."""
    if kind == "experts":
        return Mixture(moe, size, torch.distributed.get_rank())
    return pipeline(pipe, size) if kind == "pipeline" else Toy()


def update(engine: Any, step: int, batches: int) -> float:
    """Train one update with so many batches of all ranks; return the mean loss."""
    every = [batch_of(step, number) for number in range(batches)]
    world = torch.distributed.get_world_size()
    if type(engine).__name__ == "PipelineEngine":
        return float(engine.train_batch(iter([(tokens, tokens) for tokens in every])))
    tokens = torch.cat(every).chunk(world)[torch.distributed.get_rank()]
    loss = loss_of(engine(tokens), tokens)
    engine.backward(loss)
    engine.step()
    told = loss.detach().float()
    torch.distributed.all_reduce(told)
    return told.item() / world


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    """Two param groups: matrices decay, the rest does not."""
    trained = [p for p in model.parameters() if p.requires_grad]
    return [
        {"params": [p for p in trained if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in trained if p.dim() < 2], "weight_decay": 0.0, "lr": 0.02},
    ]


def batch_of(step: int, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randint(WORDS, (ROWS, TOKENS), generator=generator)


def loss_of(logits: Tensor, tokens: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits.float().flatten(0, 1), tokens.roll(1, 1).flatten())


def client_state() -> dict[str, Any]:
    return {"epoch": 2, "best": 0.25, "history": [3, 2, 1], "note": {"who": "a caller"}}


def config_of(stage: int, dtype: str) -> dict[str, Any]:
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": ROWS,
        "gradient_clipping": 0.5,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 8},
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": 0.01, "betas": [0.9, 0.99], "eps": 1e-6},
        },
        "scheduler": {
            "type": "WarmupLR",
            "params": {"warmup_max_lr": 0.02, "warmup_num_steps": 10, "warmup_type": "linear"},
        },
    }
    if dtype == "bf16":
        config["bf16"] = {"enabled": True}
    if dtype == "fp16":
        config["fp16"] = {"enabled": True, "initial_scale_power": 8, "loss_scale_window": 2}
    return config
