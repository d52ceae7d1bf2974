"""Gates: the experts of each token, and their weights (arithmetic, no communication).

Shapes: s tokens, E experts, k experts per token. Logits, probabilities and weights are fp32.
"Switch Transformers" (Fedus et al., 2021) has the gate for one expert and its balance loss,
"GShard" (Lepikhin et al., 2020) the one for two.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

DropPolicy = Literal["probs", "position"]
"""The tokens that an expert keeps if its capacity is exceeded: the most probable or the first."""


@dataclass(frozen=True)
class Routing:
    """The experts of each token; a dropped choice has weight 0 and slot -1."""

    experts: Tensor
    """[s, k] int64: the chosen experts, including dropped choices."""
    weights: Tensor
    """[s, k] fp32: the factors of the experts' outputs."""
    slots: Tensor
    """[s, k] int64: the position of each choice among those of its expert."""
    counts: Tensor
    """[E] int64: choices per expert before any was dropped."""
    balance_loss: Tensor
    """0-dim fp32: 1 if all experts get the same number of tokens, more if not."""

    @property
    def kept(self) -> Tensor:
        """[s, k] bool: the choices that were not dropped."""
        return self.slots >= 0


def capacity_of(tokens: int, experts: int, per_token: int, factor: float, minimum: int) -> int:
    """Return how many choices an expert may keep: the mean times `factor`, at least `minimum`."""
    return max(math.ceil(tokens / experts * per_token * factor), minimum)


def largest(counts: Tensor) -> int:
    """Return the capacity with which nothing is dropped. Waits for the device."""
    return int(counts.max()) if counts.numel() else 0


def jittered(values: Tensor, epsilon: float = 1e-2) -> Tensor:
    """Multiply each value by a random factor from 1 - epsilon to 1 + epsilon."""
    low, high = (values.new_full((), 1.0 + sign * epsilon) for sign in (-1, 1))
    return values * (low + _uniform(values) * (high - low))


def gumbel_like(values: Tensor) -> Tensor:
    """Return values of the standard Gumbel distribution: -log(-log u) for uniform u."""
    kind = torch.finfo(values.dtype)
    low, high = (values.new_full((), bound) for bound in (kind.tiny, 1 - kind.eps))
    return -torch.log(-torch.log(low + _uniform(values) * (high - low)))


def _uniform(values: Tensor) -> Tensor:
    return torch.rand(values.shape, dtype=values.dtype, device=values.device)


def route_to_one(
    logits: Tensor,
    capacity: int | None,
    *,
    used: Tensor | None = None,
    is_noisy: bool = False,
    keeps_at_random: bool = True,
) -> Routing:
    """Send each token to its most probable expert, with that probability as the weight.

    Args:
        logits: [s, E] fp32.
        capacity: choices that each expert keeps; None keeps all.
        used: [s]; tokens with zero go to no expert. None: all tokens are used.
        is_noisy: choose by the logits plus Gumbel noise.
        keeps_at_random: an expert with more tokens than its capacity keeps random ones; otherwise
            those that torch's `topk` returns first.
    """
    probabilities = logits.softmax(dim=1)
    scores = logits + gumbel_like(logits) if is_noisy else probabilities
    experts = scores.argmax(dim=1, keepdim=True)
    valid = _valid(experts, used)
    kept = valid
    if capacity is not None:
        drawn = _uniform(probabilities) if keeps_at_random else None
        kept = valid & _largest_drawn(experts, valid, logits.shape[1], capacity, drawn)
    slots = _queued(experts, kept, logits.shape[1], None, None)
    weights = probabilities.gather(1, experts) * (slots >= 0)
    return _routing(probabilities, experts, weights, slots, valid, valid, 1)


def route_to_two(
    logits: Tensor, capacity: int | None, *, used: Tensor | None = None, samples_second: bool = True
) -> Routing:
    """Send each token to two experts, weighted by their probabilities over their sum.

    Args:
        logits: [s, E] fp32, with two experts or more.
        capacity: choices that each expert keeps, all first choices before all second ones; None
            keeps all.
        used: [s]; tokens with zero go to no expert. None: all tokens are used.
        samples_second: choose the second expert by the logits plus Gumbel noise.
    """
    probabilities = logits.softmax(dim=1)
    first = probabilities.argmax(dim=1, keepdim=True)
    scores = logits + gumbel_like(logits) if samples_second else logits
    second = scores.scatter(1, first, -math.inf).argmax(dim=1, keepdim=True)
    experts = torch.cat([first, second], dim=1)
    valid = _valid(experts, used)
    # First choices queue before second ones.
    order = torch.arange(experts.numel(), device=logits.device).view(-1, 2).T.reshape(-1)
    slots = _queued(experts, valid, logits.shape[1], capacity, order)
    weights = _shares(probabilities, experts, slots)
    is_first = torch.arange(2, device=logits.device) == 0
    return _routing(probabilities, experts, weights, slots, valid, valid & is_first, 1)


def route_to_many(
    logits: Tensor,
    per_token: int,
    capacity: int | None,
    *,
    used: Tensor | None = None,
    policy: DropPolicy = "probs",
) -> Routing:
    """Send each token to its most probable experts, weighted by probabilities over their sum.

    Args:
        logits: [s, E] fp32.
        per_token: k, at most E.
        capacity: choices that each expert keeps; None keeps all.
        used: [s]; tokens with zero go to no expert. None: all tokens are used.
        policy: which choices an expert keeps beyond its capacity.
    """
    probabilities = logits.softmax(dim=1)
    chosen, experts = probabilities.topk(per_token, dim=1)
    valid = _valid(experts, used)
    order = None
    if policy == "probs" and capacity is not None:
        order = _flat(chosen).argsort(descending=True, stable=True)
    slots = _slots(experts, valid, logits.shape[1], capacity, order)
    weights = _shares(probabilities, experts, slots)
    return _routing(probabilities, experts, weights, slots, valid, valid, per_token)


def z_loss(logits: Tensor) -> Tensor:
    """Return the mean squared log-sum-exp of [s, E] logits, which keeps them small (ST-MoE)."""
    return logits.logsumexp(dim=1).square().mean()


def _valid(experts: Tensor, used: Tensor | None) -> Tensor:
    """[s, k] bool: choices of tokens that are used."""
    if used is None:
        return torch.ones_like(experts, dtype=torch.bool)
    return (used.reshape(-1, 1) != 0).expand_as(experts)


def _routing(
    probabilities: Tensor,
    experts: Tensor,
    weights: Tensor,
    slots: Tensor,
    valid: Tensor,
    balanced: Tensor,
    per_token: int,
) -> Routing:
    """Return the routing of each token.

    `balanced` holds the choices that count towards the load-balancing loss, `per_token` per token.
    """
    tokens, size = probabilities.shape
    counts = _counts(experts, valid, size)
    fractions = _counts(experts, balanced, size).to(probabilities.dtype) / max(tokens, 1)
    # E * the sum of mean probability times fraction of tokens: 1 at balance (Fedus et al., eq. 4).
    means = probabilities.sum(dim=0) / max(tokens, 1)
    loss = (means * fractions).sum() * (size / per_token)
    return Routing(experts, weights, slots, counts, loss)


def _counts(experts: Tensor, valid: Tensor, size: int) -> Tensor:
    counts = torch.zeros(size, dtype=torch.int64, device=experts.device)
    return counts.scatter_add_(0, _flat(experts), _flat(valid).to(torch.int64))


def _largest_drawn(
    experts: Tensor, valid: Tensor, size: int, capacity: int, drawn: Tensor | None
) -> Tensor:
    """[s, 1] bool: the `capacity` tokens of each expert with the largest `drawn` [s, E] numbers."""
    mask = torch.zeros(len(experts), size, dtype=torch.int64, device=experts.device)
    mask.scatter_(1, experts, valid.to(torch.int64))
    scores = mask if drawn is None else mask * drawn
    found = scores.topk(min(capacity, len(experts)), dim=0).indices
    return torch.zeros_like(mask).scatter_(0, found, 1).gather(1, experts) > 0


def _slots(
    experts: Tensor, valid: Tensor, size: int, capacity: int | None, order: Tensor | None
) -> Tensor:
    """Number the choices that each expert keeps, by token order; it keeps the first in `order`.

    `order`: [s * k], the choices in the order in which experts take them; None: of the tokens.
    """
    if order is not None:
        valid = _queued(experts, valid, size, capacity, order) >= 0
    return _queued(experts, valid, size, capacity, None)


def _queued(
    experts: Tensor, valid: Tensor, size: int, capacity: int | None, order: Tensor | None
) -> Tensor:
    """[s, k]: each choice's place in the queue of its expert, in `order`; -1 beyond `capacity`."""
    # Invalid choices queue at an extra expert.
    flat = _flat(torch.where(valid, experts, size))
    queue = flat if order is None else flat[order]
    counts = torch.zeros(size + 1, dtype=torch.int64, device=flat.device)
    counts.scatter_add_(0, queue, torch.ones_like(queue))
    starts = counts.cumsum(0) - counts
    by_expert = queue.argsort(stable=True)
    places = torch.arange(len(queue), device=flat.device) - starts[queue[by_expert]]
    found = torch.empty_like(flat)
    found[by_expert if order is None else order[by_expert]] = places
    found = found.view_as(experts)
    is_kept = valid if capacity is None else valid & (found < capacity)
    return torch.where(is_kept, found, -1)


def _shares(probabilities: Tensor, experts: Tensor, slots: Tensor) -> Tensor:
    """[s, k]: probabilities of the kept choices over their sum."""
    kept = probabilities.gather(1, experts) * (slots >= 0)
    eps = torch.finfo(kept.dtype).eps
    return kept / kept.sum(dim=1, keepdim=True).clamp(min=eps)


def _flat(values: Tensor) -> Tensor:
    return values.reshape(-1)


def dense(routing: Routing, capacity: int) -> Tensor:
    """Return the weights as [s, E, capacity], zero where nothing is routed (GShard's form)."""
    tokens, size = len(routing.experts), len(routing.counts)
    found = routing.weights.new_zeros(tokens, size * capacity + 1)
    # Dropped choices go to an extra slot, which is cut off.
    places = routing.experts * capacity + routing.slots
    places = torch.where(routing.kept, places, size * capacity)
    return found.scatter(1, places, routing.weights)[:, :-1].view(tokens, size, capacity)
