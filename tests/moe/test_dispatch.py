"""The exchange of tokens with the ranks of their experts."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings, strategies as st
from ranks import RankPools
from torch import Tensor

from hadal import comm
from hadal.comm import Ranks
from hadal.plugins.moe.experts import plan_dispatch


def choices_of(tokens: int, experts: int, k: int, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    chosen = torch.rand(tokens, experts, generator=generator).topk(k, dim=1).indices
    return chosen, torch.rand(tokens, k, generator=generator) > 0.3


@settings(deadline=None, max_examples=30)
@given(st.integers(0, 8), st.integers(1, 5), st.integers(1, 3), st.integers(0, 1000))
def test_on_one_rank_rows_are_sorted_and_come_back(
    tokens: int, experts: int, k: int, seed: int
) -> None:
    chosen, kept = choices_of(tokens, experts, min(k, experts), seed)
    values = torch.arange(tokens * 2.0).view(tokens, 2).requires_grad_()
    dispatch = plan_dispatch(chosen, kept, experts, None)
    rows = dispatch.to_experts(values)
    numbers = torch.arange(experts).repeat_interleave(torch.tensor(dispatch.counts))
    for expert in range(experts):
        mine = [t for t in range(tokens) if kept[t][chosen[t] == expert].any()]
        assert torch.equal(rows[numbers == expert], values[mine])
    weights = torch.rand(chosen.shape, generator=torch.Generator().manual_seed(seed)) * kept
    found = dispatch.to_tokens(rows * (numbers[:, None] + 1), weights)
    expected = values * (weights * (chosen + 1)).sum(dim=1, keepdim=True)
    assert torch.allclose(found, expected)
    (gradient,) = torch.autograd.grad(found.sum(), values)
    assert torch.allclose(gradient, torch.autograd.grad(expected.sum(), values)[0])


def send(tokens: tuple[int, ...], experts: int, k: int) -> bool:
    """Each expert multiplies by its number plus one, and tells the numbers of its rows."""
    world, rank = Ranks.world(), comm.get_rank()
    chosen, kept = choices_of(tokens[rank], experts, k, rank)
    values = torch.randn(tokens[rank], 3, generator=torch.Generator().manual_seed(rank))
    values.requires_grad_()
    dispatch = plan_dispatch(chosen, kept, experts, world)
    rows = dispatch.to_experts(values)
    assert len(rows) == sum(dispatch.counts) == sum(dispatch.received)
    first = rank * experts // world.size
    numbers = first + torch.arange(len(dispatch.counts))
    factors = numbers.repeat_interleave(torch.tensor(dispatch.counts)) + 1
    found = dispatch.to_tokens(rows * factors[:, None], kept.float())
    expected = values * ((chosen + 1) * kept).sum(dim=1, keepdim=True)
    (gradient,) = torch.autograd.grad(found.sum(), values)
    told = torch.autograd.grad(expected.sum(), values)[0]
    return torch.allclose(found, expected) and torch.allclose(gradient, told)


@pytest.mark.parametrize(
    ("tokens", "experts", "k"), [((5, 3), 2, 1), ((4, 6), 6, 3), ((0, 5), 4, 2), ((0, 0), 2, 2)]
)
def test_on_ranks_each_row_meets_its_expert(
    ranks: RankPools, tokens: tuple[int, ...], experts: int, k: int
) -> None:
    assert all(ranks(2).run(send, tokens, experts, k))
