"""A linear layer in tiles: the results of `nn.Linear`, gathered tile by tile."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from engine.toys import config_of
from hypothesis import given, strategies as st
from ranks import RankPools
from torch import nn

import hadal
from hadal.compat.install import alias
from hadal.errors import ModelError
from hadal.zero import TiledLinear
from hadal.zero.bucket import Weights
from hadal.zero.leaves import even_parts


@given(st.integers(1, 50), st.data())
def test_parts_are_even_and_whole(numel: int, data: Any) -> None:
    parts = even_parts(numel, data.draw(st.integers(1, numel)))
    assert sum(parts) == numel
    assert max(parts) - min(parts) <= 1


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("splits", [(1, 1), (3, 2), (5, 7)])
def test_tiles_compute_the_same_as_one_layer(splits: tuple[int, int], bias: bool) -> None:
    whole = nn.Linear(5, 7, bias=bias, dtype=torch.float64)
    tiled = TiledLinear(5, 7, bias, *splits, init_linear=whole, dtype=torch.float64)
    x = torch.randn(2, 3, 5, dtype=torch.float64)
    torch.testing.assert_close(tiled(x), whole(x))
    apart = TiledLinear(5, 7, bias, *splits, True, False, init_linear=whole, dtype=torch.float64)
    parts = apart([x[..., a:b] for a, b in pairwise(apart.in_parts)])
    assert [part.shape[-1] for part in parts] == [b - a for a, b in pairwise(apart.out_parts)]
    for row, (top, bottom) in enumerate(pairwise(apart.out_parts)):
        for column, (left, right) in enumerate(pairwise(apart.in_parts)):
            tile = apart.linears[row][column]  # type: ignore[index]
            assert torch.equal(tile.weight, whole.weight[top:bottom, left:right])
    torch.testing.assert_close(torch.cat(parts, dim=-1), whole(x))


class _Apart(nn.Linear):
    """A layer that returns its bias apart from the product."""

    def forward(self, x: torch.Tensor) -> Any:
        return nn.functional.linear(x, self.weight), self.bias


@pytest.mark.parametrize("bias", [True, False])
def test_tiles_return_their_biases_apart(bias: bool) -> None:
    tiled = alias("deepspeed.zero").TiledLinearReturnBias
    whole = nn.Linear(5, 7, bias=bias)
    product, added = tiled(5, 7, bias, 3, 2, linear_cls=_Apart, init_linear=whole)(torch.ones(2, 5))
    torch.testing.assert_close(product + (added if bias else 0), whole(torch.ones(2, 5)))
    assert (added is None) == (not bias)


def test_models_that_cannot_be_cut_are_refused() -> None:
    with pytest.raises(ModelError, match="4 features cannot be split into 5 parts"):
        TiledLinear(4, 8, in_splits=5)
    with pytest.raises(ModelError, match=r"shape \(8, 4\) with a bias.*\(8, 4\) without a bias"):
        TiledLinear(4, 8).copy_params_from(nn.Linear(4, 8, bias=False))


class _Block(nn.Module):
    """A block of a model: all in it would be gathered together."""

    def __init__(self, tiles: bool) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        torch.manual_seed(1)
        whole = nn.Linear(8, 8)
        self.wide = TiledLinear(8, 8, True, 2, 2, init_linear=whole) if tiles else whole

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = x + self.wide(self.norm(x))
        return out


def _train(tiles: bool) -> tuple[list[float], int, int]:
    model = nn.Sequential(_Block(tiles), _Block(tiles))
    keys = {"stage3_param_persistence_threshold": 0, "reduce_bucket_size": 16}
    config = config_of(3)
    config["zero_optimization"] |= {**keys, "stage3_max_live_parameters": 0}
    engine = hadal.initialize(model=model, config=config)[0]
    most = 0
    runtime = engine._parts.runtime

    def look(*_: object) -> None:
        nonlocal most
        live = (
            b.layout.numel
            for b in runtime.buckets
            if b.state is Weights.FULL and b.partition.weights
        )
        most = max(most, sum(live))

    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.register_forward_hook(look)
    losses = []
    for step in range(4):
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(step))
        loss = engine(x).square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses, most, len(runtime.buckets)


def test_each_tile_is_gathered_by_itself_at_stage_3(ranks: RankPools) -> None:
    for whole, tiled in zip(ranks(2).run(_train, False), ranks(2).run(_train, True), strict=True):
        assert tiled[0] == pytest.approx(whole[0], abs=1e-6)
        assert tiled[1] < whole[1]
