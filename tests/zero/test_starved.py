"""Ranks that lack gradients the others have: an expert without tokens, a head nobody asks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from engine.toys import engine_of
from ranks import RankPools
from torch import Tensor, nn

from hadal import comm

WIDTH, BLOCKS = 8, 6
# No bucket holds two weights, and nothing stays gathered.
EACH_ALONE = {
    "reduce_bucket_size": WIDTH * WIDTH,
    "stage3_param_persistence_threshold": 0,
    "stage3_max_live_parameters": 0,
    "stage3_max_reuse_distance": 0,
    "leaf_module": {"classes": ["Mixture"]},
}


class Mixture(nn.Module):
    """Two experts; the second takes part where it is given tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))

    def forward(self, values: Tensor, is_fed: bool) -> Tensor:
        values = values + self.experts[0](values)
        return values + self.experts[1](values) if is_fed else values


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.Linear(WIDTH, WIDTH, bias=False)
        self.mixture = Mixture()

    def forward(self, values: Tensor, is_fed: bool) -> Tensor:
        return self.mixture(values + self.attention(values), is_fed)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.heads = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))

    def forward(self, values: Tensor, fed: list[bool], head: int) -> Tensor:
        for block, is_fed in zip(self.blocks, fed, strict=True):
            values = block(values, is_fed)
        return self.heads[head](values)


# For each update, the blocks whose second expert starves on rank 1, and the head that is asked.
PATHS = {
    "even": [((), 0)] * 4,
    "one expert of the last block": [((), 0), ((BLOCKS - 1,), 0), ((BLOCKS - 1,), 0), ((), 0)],
    "in the first update": [((BLOCKS - 1, 2), 0)] * 3,
    "another one each time": [((step,), 0) for step in range(4)],
    "all of them": [((), 0), (tuple(range(BLOCKS)), 0), (tuple(range(BLOCKS)), 0)],
    "a head unused at first": [((), 0), ((), 0), ((), 1), ((), 1)],
}


def held_at_once(path: list[tuple[tuple[int, ...], int]], stage: int) -> list[int]:
    """The most gradient buffers that this rank held at a time, in each update."""
    torch.manual_seed(1)
    model = Model()
    engine = engine_of(stage, model, zero_optimization={"stage": stage, **EACH_ALONE})
    many: list[int] = []
    all_gradients = engine._parts.runtime.gradients

    def count(_: Any) -> None:
        many[-1] = max(many[-1], sum(one.full is not None for one in all_gradients))

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(count)
    generator = torch.Generator().manual_seed(comm.get_rank())
    for starved, head in path:
        many.append(0)
        fed = [comm.get_rank() == 0 or block not in starved for block in range(BLOCKS)]
        inputs = torch.randn(2, WIDTH, generator=generator)
        engine.backward(engine(inputs.to(engine.device), fed, head).square().mean())
        engine.step()
    engine.destroy()
    return many


@pytest.mark.fast_cells("even-3")
@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("path", PATHS)
def test_gradients_that_do_not_come_hold_nothing_up(
    path: str, stage: int, ranks: RankPools
) -> None:
    held = ranks(2).run(held_at_once, PATHS[path], stage)
    assert max(max(many) for many in held) <= (4 if "head" in path else 2), held
    if "head" not in path:
        assert max(max(many[2:]) for many in held) == 1, held
