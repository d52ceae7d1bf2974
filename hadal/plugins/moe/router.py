"""The router of a transformers model, with settings of the configuration instead of its own."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class RouterRule:
    """Rule that turns scores into experts and weights."""

    top_k: int
    score: Literal["softmax", "sigmoid"]
    normalizes: bool
    """True: the chosen scores of a token sum to 1."""
    scale: float
    """Factor of the weights."""
    groups: int = 1
    """Equal groups of consecutive experts, E / groups each."""
    limited_groups: int = 1
    """Groups that a token may use."""


def routed(logits: Tensor, rule: RouterRule, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return weights and experts, [s, k] fp32 and int64, of [s, E] logits.

    Args:
        logits: of the router, in any floating dtype.
        rule: the settings.
        bias: [E]: added to the scores only for the choice ("Auxiliary-loss-free load balancing",
            Wang et al., 2024). A group then counts by its two best scores, else by its best one.
    """
    logits = logits.float()
    scores = logits.softmax(dim=-1) if rule.score == "softmax" else logits.sigmoid()
    choice = scores if bias is None else scores + bias
    if rule.groups > 1:
        choice = _within_groups(choice, rule, 1 if bias is None else 2)
    experts = choice.topk(rule.top_k, dim=-1).indices
    weights = scores.gather(1, experts)
    if rule.normalizes:
        weights = weights / weights.sum(dim=-1, keepdim=True).clamp(min=1e-20)
    return weights * rule.scale, experts


def _within_groups(choice: Tensor, rule: RouterRule, best: int) -> Tensor:
    """Exclude experts outside each token's best groups (DeepSeek-V2's group-limited choice)."""
    tokens, experts = choice.shape
    grouped = choice.view(tokens, rule.groups, -1)
    of_group = grouped.topk(min(best, grouped.shape[2]), dim=-1).values.sum(dim=-1)
    mask = torch.zeros_like(of_group, dtype=torch.bool)
    mask.scatter_(1, of_group.topk(rule.limited_groups, dim=-1).indices, True)
    return grouped.masked_fill(~mask.unsqueeze(-1), -math.inf).view(tokens, experts)
