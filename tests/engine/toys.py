"""Small models and engines for tests that train."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

import hadal
from hadal import comm

ROWS = 3
# Cut everything that can be cut, keep nothing longer than its use, and fill several buckets.
TINY = {
    "stage3_param_persistence_threshold": 0,
    "stage3_max_live_parameters": 0,
    "stage3_max_reuse_distance": 0,
    "reduce_bucket_size": 60,
}


def tiny_at(stage: int) -> dict[str, int]:
    """Those keys of `TINY` that act at a stage."""
    return {key: value for key, value in TINY.items() if stage == 3 or "stage3" not in key}


def model_of(seed: int = 3) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.LayerNorm(9), nn.Linear(9, 4))


def config_of(stage: int, **changes: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": ROWS,
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": stage, **tiny_at(stage)},
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        **changes,
    }


def engine_of(
    stage: int, model: nn.Module | None = None, wishes: dict[str, Any] | None = None, **changes: Any
) -> Any:
    """An engine; `wishes` go to `initialize`, `changes` to the configuration (None: left out)."""
    config = {key: value for key, value in config_of(stage, **changes).items() if value is not None}
    model = model_of() if model is None else model
    engine, _, _, _ = hadal.initialize(model=model, config=config, **(wishes or {}))
    return engine


def batch_of(step: int, rank: int | None = None) -> tuple[Tensor, Tensor]:
    rank = comm.get_rank() if rank is None else rank
    generator = torch.Generator().manual_seed(100 * step + rank)
    inputs = torch.randn(ROWS, 6, generator=generator)
    return inputs, torch.randn(ROWS, 4, generator=generator)


def loss_of(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs.float() - targets).square().mean()


def backward(engine: Any, step: int) -> Tensor:
    inputs, targets = batch_of(step)
    dtype = next(p.dtype for p in engine.module.parameters() if p.is_floating_point())
    loss = loss_of(engine(inputs.to(dtype)), targets)
    engine.backward(loss)
    return loss.detach()


def train(engine: Any, steps: range) -> list[Tensor]:
    losses = []
    for step in steps:
        losses.append(backward(engine, step))
        engine.step()
    return losses


def backward_alone(model: nn.Module, steps: Sequence[int]) -> None:
    """Collect in plain torch the mean gradients of all ranks' batches of these micro-steps."""
    world = comm.get_world_size()
    for step in steps:
        for rank in range(world):
            inputs, targets = batch_of(step, rank)
            (loss_of(model(inputs), targets) / (world * len(steps))).backward()


def alone(model: nn.Module, updates: Sequence[Sequence[int]], **settings: Any) -> dict[str, Tensor]:
    """Train in plain torch on all ranks' batches; each update adds up the given micro-steps."""
    optimizer = torch.optim.AdamW(
        model.parameters(), **{"lr": 0.01, "weight_decay": 0.0, **settings}
    )
    for steps in updates:
        optimizer.zero_grad()
        backward_alone(model, steps)
        optimizer.step()
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def assert_close(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert list(found) == list(expected)
    for name, value in expected.items():
        assert torch.allclose(found[name].float(), value.float(), rtol=1e-5, atol=1e-6), name


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert list(found) == list(expected)
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


class ByNorm(torch.optim.Optimizer):
    """Steps along each whole gradient's direction: an optimizer that must see whole parameters."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                length = parameter.grad.norm() + 1e-3 if parameter.numel() else 1.0
                parameter.add_(parameter.grad / length, alpha=-group["lr"])


class Leaves(nn.Module):
    """Parameters of any shape whose gradients are given: the loss is their sum of products."""

    def __init__(self, shapes: Sequence[tuple[int, ...]]) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(4)
        self.leaves = nn.ParameterList(
            nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes
        )

    def forward(self, gradients: Sequence[Tensor]) -> Tensor:
        products = [(p * g).sum() for p, g in zip(self.leaves, gradients, strict=True)]
        return torch.stack(products).sum()


def given_gradients(shapes: Sequence[tuple[int, ...]], step: int, rank: int) -> list[Tensor]:
    """Whole eighths, so that their sums over ranks are exact."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    return [torch.randint(-16, 17, shape, generator=generator) / 8 for shape in shapes]


def mean_gradients(shapes: Sequence[tuple[int, ...]], step: int) -> list[Tensor]:
    """Their mean over the ranks, rounded once."""
    world = comm.get_world_size()
    all_ranks = [given_gradients(shapes, step, rank) for rank in range(world)]
    return [torch.stack(one).sum(0) * (1.0 / world) for one in zip(*all_ranks, strict=True)]
