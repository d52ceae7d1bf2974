"""Routers by settings of the configuration."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor

from hadal.plugins.moe.blocks import RouterRule, routed


def logits_of(seed: int, experts: int = 8) -> Tensor:
    return torch.randn(5, experts, generator=torch.Generator().manual_seed(seed))


@given(st.integers(0, 99), st.sampled_from(["softmax", "sigmoid"]), st.integers(1, 8))
def test_weights_are_scores_of_the_best_experts(seed: int, score: str, top_k: int) -> None:
    logits = logits_of(seed)
    scores = logits.softmax(1) if score == "softmax" else logits.sigmoid()
    plain = RouterRule(top_k, score, normalizes=False, scale=1.0)  # type: ignore[arg-type]
    weights, experts = routed(logits, plain)
    assert torch.equal(weights, scores.gather(1, experts))
    rest = scores.scatter(1, experts, -1.0)
    assert (weights.min(dim=1).values >= rest.max(dim=1).values).all()
    scaled = RouterRule(top_k, score, normalizes=True, scale=2.5)  # type: ignore[arg-type]
    assert torch.allclose(routed(logits, scaled)[0].sum(dim=1), torch.full((5,), 2.5))


def test_a_bias_changes_the_choice_and_not_the_weights() -> None:
    bias = torch.tensor([9.0, 0, 0, 0, 0, 0, 0, 0])
    rule = RouterRule(2, "sigmoid", normalizes=False, scale=1.0)
    weights, experts = routed(logits_of(1), rule, bias)
    assert (experts[:, 0] == 0).all()
    assert torch.equal(weights, logits_of(1).sigmoid().gather(1, experts))


@pytest.mark.parametrize("bias", [None, torch.zeros(8)])
def test_experts_are_of_the_best_groups(bias: Tensor | None) -> None:
    rule = RouterRule(3, "softmax", normalizes=True, scale=1.0, groups=4, limited_groups=2)
    logits = logits_of(2)
    _, experts = routed(logits, rule, bias)
    of_group = logits.softmax(1).view(5, 4, 2)
    counted = of_group.max(dim=2).values if bias is None else of_group.sum(dim=2)
    best = counted.topk(2, dim=1).indices
    for row in range(5):
        assert set((experts[row] // 2).tolist()) <= set(best[row].tolist())
