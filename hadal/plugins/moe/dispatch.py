"""Sends tokens to the ranks of their experts, and the experts' outputs back.

Rows are sorted by expert, and each rank sends each other rank exactly the rows of its experts: no
padding, and nothing is dropped for lack of room. A rank without rows takes part too.

Shapes: s tokens of width m, k experts per token, n kept choices of this rank, r rows that arrive.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from hadal.comm import Ranks
from hadal.comm.adjoint import Way, across, gathered as all_slices, own
from hadal.comm.functions import all_to_all_single, labelled
from hadal.device import has_values, start_reading
from hadal.errors import ModelError

Table = list[list[int]]
"""Rows by rank, and by expert of that rank."""


@dataclass(frozen=True)
class Dispatch:
    """The rows that one rank sends, receives and computes in one forward of one layer."""

    ranks: Ranks | None
    """The ranks that share the experts; None if this rank has all of them."""
    order: Tensor
    """[n]: the kept choices, of s * k, sorted by expert."""
    per_token: int
    """k."""
    sent: list[int]
    """Rows for each rank."""
    received: list[int]
    """Rows from each rank."""
    by_expert: Tensor | None
    """[r]: the index of each received row, sorted by expert; None if they are sorted already."""
    counts: tuple[int, ...]
    """Rows of each of this rank's experts."""

    def to_experts(self, tokens: Tensor, weights: Tensor | None = None) -> Tensor:
        """Turn tokens [s, m] into the rows [r, m] of this rank's experts, sorted by expert.

        Args:
            tokens: this rank's tokens.
            weights: [s, k]: factors of each expert's inputs; None is 1.
        """
        rows: Tensor = _Spread.apply(tokens, self.order, self.per_token)  # type: ignore[no-untyped-call]
        if weights is not None:
            factors = weights.reshape(-1).index_select(0, self.order)
            rows = (rows.float() * factors.float().unsqueeze(1)).to(rows.dtype)
        if self.ranks is None:
            return rows
        rows = _exchanged(rows, self.ranks, self.sent, self.received)
        return rows if self.by_expert is None else rows.index_select(0, self.by_expert)

    def to_tokens(self, rows: Tensor, weights: Tensor) -> Tensor:
        """Turn rows [r, m] of experts into each token's weighted sum [s, m].

        The sum is fp32, in the order of a token's choices, and has the dtype of `rows`.

        Args:
            rows: the outputs for the result of `to_experts`.
            weights: [s, k]; those of dropped choices do not matter.
        """
        if self.ranks is not None:
            if self.by_expert is not None:
                rows = torch.zeros_like(rows).index_copy(0, self.by_expert, rows)
            rows = _exchanged(rows, self.ranks, self.received, self.sent)
        choices = rows.new_zeros(weights.numel(), rows.shape[1]).index_copy(0, self.order, rows)
        outputs = choices.view(*weights.shape, rows.shape[1]).float()
        return (outputs * weights.float().unsqueeze(-1)).sum(dim=1).to(rows.dtype)


def counts_of(experts: Tensor, kept: Tensor, num_experts: int) -> Tensor:
    """Return [E] int64: how many of [s, k] choices each expert keeps."""
    counts = torch.zeros(num_experts, dtype=torch.int64, device=experts.device)
    within = experts.clamp(max=num_experts - 1).reshape(-1)
    return counts.scatter_add_(0, within, kept.reshape(-1).to(torch.int64))


def plan_dispatch(experts: Tensor, kept: Tensor, num_experts: int, ranks: Ranks | None) -> Dispatch:
    """Agree on the exchange with the ranks that share the experts. All of them must call it.

    Rank i of them has the i-th equal slice of the experts. Waits for the device.

    Args:
        experts: [s, k] int64: each token's choices.
        kept: [s, k] bool: choices that were not dropped.
        num_experts: experts on all ranks together.
        ranks: they share the experts; with None or one rank, this rank has all of them.
    """
    if ranks is not None and ranks.size == 1:
        ranks = None
    counts = counts_of(experts, kept, num_experts)
    size = 1 if ranks is None else ranks.size
    mine = counts.view(size, -1)
    theirs = mine if ranks is None else _exchanged_counts(mine, ranks)
    reading = start_reading(torch.stack([mine, theirs]), "the numbers of tokens for experts")
    # Dropped choices come last. The device sorts while the host waits for the numbers.
    order = torch.where(kept, experts, num_experts).reshape(-1).argsort(stable=True)
    if has_values(counts):
        leaving, coming = reading.values().tolist()
    else:
        leaving, coming = _even_counts(experts.numel(), mine.shape, ranks)
    sent, received = [sum(row) for row in leaving], [sum(row) for row in coming]
    order = order[: sum(sent)]
    by_expert = None
    if ranks is not None and theirs.shape[1] > 1:
        by_expert = _sorted_by_expert(theirs, sum(received))
    return Dispatch(
        ranks,
        order,
        experts.shape[1],
        sent,
        received,
        by_expert,
        tuple(map(sum, zip(*coming, strict=True))),
    )


def _even_counts(rows: int, shape: Sequence[int], ranks: Ranks | None) -> tuple[Table, Table]:
    """Return what this rank sends and receives if all experts get as many of all ranks' rows."""
    size, each = shape
    bounds = [rows * number // (size * each) for number in range(size * each + 1)]
    counts = [stop - start for start, stop in pairwise(bounds)]
    leaving = [counts[first : first + each] for first in range(0, size * each, each)]
    return leaving, [leaving[0 if ranks is None else ranks.rank]] * size


def _exchanged_counts(mine: Tensor, ranks: Ranks) -> Tensor:
    """Exchange [ranks, experts per rank] counts: mine for their experts, theirs for mine."""
    theirs = torch.empty_like(mine)
    label = "the exchange of the numbers of tokens for experts"
    labelled(label, all_to_all_single, theirs, mine, group=ranks.group_for(mine))
    return theirs


def _sorted_by_expert(counts: Tensor, rows: int) -> Tensor:
    """Return [rows]: positions, sorted by expert, of rows that arrive by rank and then expert."""
    ranks, experts = counts.shape
    numbers = torch.arange(experts, device=counts.device).repeat(ranks)
    of_row = numbers.repeat_interleave(counts.reshape(-1), output_size=rows)
    return of_row.argsort(stable=True)


class _Spread(torch.autograd.Function):
    """Copies of tokens, one for each kept choice; the gradients of a token's copies add up.

    torch's own gradient of indexing would add them in an arbitrary order on an accelerator.
    """

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, order: Tensor, per_token: int) -> Tensor:
        ctx.save_for_backward(order)
        ctx.shape = (tokens.shape[0], per_token, tokens.shape[1])
        return tokens.index_select(0, order // per_token)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        (order,) = ctx.saved_tensors
        tokens, per_token, width = ctx.shape
        choices = gradient.new_zeros(tokens * per_token, width).index_copy(0, order, gradient)
        return choices.view(ctx.shape).sum(dim=1), None, None


def _exchanged(rows: Tensor, ranks: Ranks, sent: list[int], received: list[int]) -> Tensor:
    found: Tensor = _TokenExchange.apply(rows, ranks, sent, received)  # type: ignore[no-untyped-call]
    return found


class _TokenExchange(torch.autograd.Function):
    """Exchanges each rank's rows for each other rank; backward is the reverse exchange."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, ranks: Ranks, sent: list[int], received: list[int]
    ) -> Tensor:
        ctx.choices = (ranks, received, sent)
        arrived = rows.new_empty(sum(received), rows.shape[1])
        labelled(
            "the exchange of tokens with experts",
            all_to_all_single,
            arrived,
            rows.contiguous(),
            received,
            sent,
            group=ranks.group_for(rows),
        )
        return arrived

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        return _exchanged(gradient, *ctx.choices), None, None, None


# ---- tensor-parallel ranks -----------------------------------------------------------------------


def gathered(tokens: Tensor, ranks: Ranks | None, dim: int = 0) -> Tensor:
    """Return all ranks' tokens, one rank's after another; backward keeps this rank's slice."""
    if ranks is None or ranks.size == 1:
        return tokens
    return across(tokens, *_token_ways(tokens.shape[dim], ranks, dim))


def dropped(tokens: Tensor, ranks: Ranks | None, dim: int = 0) -> Tensor:
    """Return this rank's equal slice of tokens that all ranks have; backward gathers.

    Raises:
        ModelError: the ranks do not divide the tokens.
    """
    if ranks is None or ranks.size == 1:
        return tokens
    if tokens.shape[dim] % ranks.size:
        raise ModelError(
            f"drop_tokens: {ranks.size} tensor-parallel ranks do not divide {tokens.shape[dim]}"
            f" tokens (dimension {dim} of {tuple(tokens.shape)}); pad them"
        )
    whole, mine = _token_ways(tokens.shape[dim] // ranks.size, ranks, dim)
    return across(tokens, mine, whole)


def _token_ways(count: int, ranks: Ranks, dim: int) -> tuple[Way, Way]:
    """Return the gather of all ranks' tokens, and the choice of this rank's; each has `count`."""
    sizes = [count] * ranks.size
    label = "the gather of tokens"
    return lambda x: all_slices(x, dim, sizes, ranks, label), lambda x: own(x, dim, sizes, ranks)
