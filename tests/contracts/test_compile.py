"""A compiled model trains to the same numbers: hooks stay outside of graphs."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from ranks import RankPools
from torch import Tensor, nn

import hadal

UPDATES = 3


class Block(nn.Module):
    """Two units in one graph: what a trace must not take in."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.widen = nn.Linear(width, 2 * width)
        self.narrow = nn.Linear(2 * width, width)

    def forward(self, values: Tensor) -> Tensor:
        inner: Tensor = self.narrow(torch.tanh(self.widen(self.norm(values))))
        return values + inner


def train_compiled(stage: int, whole: bool) -> float:
    """The largest distance of a weight from plain torch's, after a few updates."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the compiler's own, about itself
        torch.manual_seed(0)
        model = nn.Sequential(Block(8), Block(8))
        plain = copy.deepcopy(model)
        if whole:
            model.compile(backend="aot_eager")
        else:
            for block in model:
                block.compile(backend="aot_eager")
        config = {
            "train_micro_batch_size_per_gpu": 4,
            "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
            "gradient_clipping": 0,
            "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        }
        engine, _, _, _ = hadal.initialize(model=model, config=config)
        optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
        inputs = torch.linspace(-1, 1, 32).reshape(4, 8)
        for _ in range(UPDATES):
            engine.backward(engine(inputs).square().mean())
            engine.step()
            optimizer.zero_grad()
            plain(inputs).square().mean().backward()
            optimizer.step()
        got = engine.state_dict()
        engine.destroy()
        torch.compiler.reset()
    return max(float((got[name] - value).abs().max()) for name, value in plain.state_dict().items())


@pytest.mark.parametrize("whole", [True, False], ids=["model", "blocks"])
@pytest.mark.parametrize("stage", range(4))
def test_a_compiled_model_trains_as_a_plain_one(stage: int, whole: bool, ranks: RankPools) -> None:
    """At every stage, compiled as a whole or block by block."""
    for distance in ranks(2).run(train_compiled, stage, whole):
        assert distance < 1e-6
