"""`deepspeed.moe`: gates and token mappings in DeepSpeed's forms."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from hadal.comm import Ranks, ReduceOp, all_reduce, all_to_all_single
from hadal.comm.adjoint import across
from hadal.compat.groups import get_tensor_model_parallel_group
from hadal.plugins.moe.experts import dropped, gathered
from hadal.plugins.moe.gate import (
    DropPolicy,
    Routing,
    capacity_of,
    dense,
    gumbel_like,
    jittered,
    largest,
    route_to_many,
    route_to_one,
    route_to_two,
)

TUTEL_INSTALLED = False
Gated = tuple[Any, ...]
"""(balance loss, weights [s, E, capacity], mask of nonzeros, counts [E]); with `sparse_routes`,
(balance loss, capacity, E, experts [k, s] or -1, slots [k, s], weights [k, s], counts [E])."""


def top1gating(  # noqa: PLR0913 - the signature is DeepSpeed's
    logits: Tensor,
    capacity_factor: float,
    min_capacity: int,
    used_token: Tensor | None = None,
    noisy_gate_policy: str | None = None,
    drop_tokens: bool = True,
    use_rts: bool = True,
    ep_group: Any = None,
    sparse_routes: bool = False,
    use_tutel: bool = False,
) -> Gated:
    """Route each row of [s, E] logits to one expert."""
    tokens, experts = logits.shape
    capacity = capacity_of(tokens, experts, 1, capacity_factor, min_capacity)
    routing = route_to_one(
        logits,
        capacity if drop_tokens else None,
        used=used_token,
        is_noisy=noisy_gate_policy == "RSample",
        keeps_at_random=use_rts,
    )
    return _gated(routing, capacity if drop_tokens else _agreed(routing, ep_group), sparse_routes)


def top2gating(
    logits: Tensor,
    capacity_factor: float,
    min_capacity: int,
    drop_tokens: bool = True,
    ep_group: Any = None,
    top2_2nd_expert_sampling: bool = True,
    sparse_routes: bool = False,
) -> Gated:
    """Route each row of [s, E] logits to two experts; the logits are not modified."""
    tokens, experts = logits.shape
    capacity = capacity_of(tokens, experts, 2, capacity_factor, min_capacity)
    limit = capacity if drop_tokens else None
    routing = route_to_two(logits, limit, samples_second=top2_2nd_expert_sampling)
    return _gated(routing, capacity if drop_tokens else _agreed(routing, ep_group), sparse_routes)


def topkgating(
    logits: Tensor,
    k: int,
    capacity_factor: float,
    min_capacity: int,
    drop_tokens: bool = True,
    ep_group: Any = None,
    drop_policy: DropPolicy = "probs",
    sparse_routes: bool = False,
) -> Gated:
    """Route each row of [s, E] logits to `k` experts."""
    tokens, experts = logits.shape
    capacity = capacity_of(tokens, experts, k, capacity_factor, min_capacity)
    limit = capacity if drop_tokens else None
    routing = route_to_many(logits, k, limit, policy=drop_policy)
    return _gated(routing, capacity if drop_tokens else _agreed(routing, ep_group), sparse_routes)


def _agreed(routing: Routing, group: Any) -> int:
    """Return the capacity with which no rank of the group drops anything."""
    if group is None:
        return largest(routing.counts)
    found = routing.counts.max()
    all_reduce(found, ReduceOp.MAX, group)
    return int(found)


def _gated(routing: Routing, capacity: int, is_sparse: bool) -> Gated:
    if not is_sparse:
        weights = dense(routing, capacity)
        return routing.balance_loss, weights, weights.bool(), routing.counts
    experts = torch.where(routing.kept, routing.experts, -1)
    columns = (experts.T, routing.slots.clamp(min=0).T, routing.weights.T)
    return routing.balance_loss, capacity, len(routing.counts), *columns, routing.counts


def route_slots(indices: Tensor, locations: Tensor, num_experts: int, capacity: int) -> Tensor:
    """Return each choice's row of the experts' buffers; a dropped one has the row beyond them.

    `sparse_routes` gives the experts and the slots, both [k, s].
    """
    return torch.where(indices >= 0, indices * capacity + locations, num_experts * capacity)


def sparse_encode(reshaped_input: Tensor, slots: Tensor, num_experts: int, capacity: int) -> Tensor:
    """Return the experts' buffers [E, capacity, m] with the tokens [s, m] in their rows."""
    rows = reshaped_input.new_zeros(num_experts * capacity + 1, reshaped_input.size(1))
    filled = rows.index_copy(0, slots.flatten(), reshaped_input.repeat(len(slots), 1))
    return filled[:-1].view(num_experts, capacity, -1)


def sparse_decode(expert_output: Tensor, slots: Tensor, gates: Tensor, num_tokens: int) -> Tensor:
    """Return each token's sum of its rows [E, capacity, m], weighted by `gates` [k, s]."""
    rows = nn.functional.pad(expert_output.flatten(0, -2), (0, 0, 0, 1))
    return (rows[slots] * gates.unsqueeze(-1)).sum(0).to(expert_output.dtype)


class BufferExchange:
    """The exchange of experts' buffers in the form of an autograd function."""

    @staticmethod
    def apply(group: Any, input: Tensor) -> Tensor:
        """Send each rank its slice along the first dimension; gradients go the same way back."""

        def exchanged(values: Tensor) -> Tensor:
            found = torch.empty_like(values, memory_format=torch.contiguous_format)
            all_to_all_single(found, values.contiguous(), group=group)
            return found

        return across(input, exchanged, exchanged)


def multiplicative_jitter(x: Tensor, device: Any = None, epsilon: float = 1e-2) -> Tensor:
    """Multiply each value by a random factor from 1 - epsilon to 1 + epsilon."""
    return x if epsilon == 0 else jittered(x, epsilon)


def gumbel_rsample(shape: tuple[int, ...], device: Any) -> Tensor:
    """Return values of the standard Gumbel distribution."""
    return gumbel_like(torch.empty(shape, device=device))


def einsum(rule: str, a: Tensor, b: Tensor) -> Tensor:
    """Return torch's sum of products of two tensors."""
    return torch.einsum(rule, a, b)


def _tensor_parallel() -> Ranks | None:
    group = get_tensor_model_parallel_group()
    return None if group is None else Ranks.of(group)


def gather_tokens(input_: Tensor, dim: int = 0) -> Tensor:
    """Return the tokens of all tensor-parallel ranks of the newest engine."""
    return gathered(input_, _tensor_parallel(), dim)


def drop_tokens(input_: Tensor, dim: int = 0) -> Tensor:
    """Return this tensor-parallel rank's slice of the tokens; the newest engine has the ranks."""
    return dropped(input_, _tensor_parallel(), dim)
