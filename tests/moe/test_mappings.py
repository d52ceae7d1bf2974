"""Tokens split over ranks that have the same ones."""

from __future__ import annotations

import pytest
import torch
from ranks import RankPools

from hadal.comm import Ranks
from hadal.errors import ModelError
from hadal.plugins.moe.experts import dropped, gathered


def split(dim: int) -> list[bool]:
    world = Ranks.world()
    whole = torch.arange(24.0).view(4, 6).requires_grad_()
    mine = dropped(whole, world, dim)
    factor = torch.full_like(mine, world.rank + 1.0)
    back = gathered(mine * factor, world, dim)
    expected = torch.cat([whole.chunk(2, dim)[rank] * (rank + 1) for rank in range(2)], dim)
    (gradient,) = torch.autograd.grad(back.sum(), whole)
    told = torch.autograd.grad(expected.sum(), whole)[0]
    with pytest.raises(ModelError, match=r"2 tensor-parallel ranks do not divide 3 tokens"):
        dropped(torch.zeros(3, 1), world)
    return [torch.equal(back, expected), torch.equal(gradient, told)]


@pytest.mark.parametrize("dim", [0, 1])
def test_slices_are_put_together_again(ranks: RankPools, dim: int) -> None:
    assert ranks(2).run(split, dim) == [[True, True]] * 2


def test_without_such_ranks_nothing_happens() -> None:
    tokens = torch.ones(3)
    assert dropped(tokens, None) is tokens
    assert gathered(tokens, None) is tokens
