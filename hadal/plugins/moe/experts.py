"""The experts of one rank (separate modules, or weights stacked in one tensor), and their tokens.

Tokens are sent to the ranks of their experts, and the experts' outputs back. Rows are sorted by
expert, and each rank sends each other rank exactly the rows of its experts: no padding, and nothing
is dropped for lack of room. A rank without rows takes part too.

Shapes: s tokens of width m, k experts per token, n kept choices of this rank, r rows that arrive.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hadal.comm import Ranks
from hadal.comm.adjoint import Way, across, gathered as all_slices, own
from hadal.comm.functions import all_to_all_single, labelled
from hadal.device import has_values, on_device, start_reading
from hadal.errors import ModelError


def mark_expert(parameter: nn.Parameter, group_name: str | None) -> None:
    """Mark a parameter as an expert's: its copies are on the ranks of the group's data ranks."""
    parameter.allreduce = False  # type: ignore[attr-defined]
    parameter.group_name = group_name  # type: ignore[attr-defined]


def is_moe_param(param: Tensor) -> bool:
    """Return True if a parameter is an expert's."""
    return getattr(param, "allreduce", True) is False


class Experts(nn.Module):
    """This rank's experts: copies of one module.

    Args:
        expert: the module of one expert. It takes and returns tokens, whose features are the last
            dimension;
            if it returns a tuple, the first item is used.
        num_local_experts: experts on this rank.
        expert_group_name: `group_name` of their parameters.
    """

    def __init__(
        self, expert: nn.Module, num_local_experts: int = 1, expert_group_name: str | None = None
    ) -> None:
        super().__init__()
        self.deepspeed_experts = nn.ModuleList([deepcopy(expert) for _ in range(num_local_experts)])
        self.num_local_experts = num_local_experts
        self.expert_group_name = expert_group_name
        self._mark()

    def _mark(self) -> None:
        for parameter in self.deepspeed_experts.parameters():
            mark_expert(parameter, self.expert_group_name)

    def __setstate__(self, state: Any) -> None:
        """Mark the parameters of a copy too: torch copies a parameter without its attributes."""
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._mark()

    def forward(self, inputs: Tensor) -> Tensor:
        """Compute [..., experts, rows, m] of equally many rows per expert."""
        found = [
            _called(expert, chunk)
            for expert, chunk in zip(
                self.deepspeed_experts, inputs.chunk(self.num_local_experts, dim=-3), strict=True
            )
        ]
        return torch.cat(found, dim=-3)

    def of_rows(self, rows: Tensor, counts: Sequence[int]) -> Tensor:
        """Compute [r, m] of `counts` rows for each expert in turn.

        An expert without rows still runs, on none: each rank of a group uses the same weights in
        the same order, and its backward returns a gradient of zero.
        """
        found = [
            _called(expert, some[None, None]).flatten(0, -2)
            for expert, some in zip(self.deepspeed_experts, rows.split(list(counts)), strict=True)
        ]
        return torch.cat(found)


def _called(expert: nn.Module, rows: Tensor) -> Tensor:
    output: Any = expert(rows)
    output = output[0] if isinstance(output, tuple) else output
    if not isinstance(output, Tensor) or output.shape[:-1] != rows.shape[:-1]:
        found = tuple(output.shape) if isinstance(output, Tensor) else type(output).__name__
        raise ModelError(
            f"an expert ({type(expert).__name__}) returned {found} for {tuple(rows.shape)};"
            " expected one row for each row"
        )
    return output


def grouped_linear(rows: Tensor, weight: Tensor, counts: Sequence[int]) -> Tensor:
    """Multiply [r, i] rows, sorted by expert, by the [experts, o, i] weights of their experts.

    One grouped product where the device and the sizes allow it, else one product per expert.
    """
    if not can_group(rows, weight):
        return looped_linear(rows, weight, counts)
    return cast(Tensor, _Grouped.apply(rows, weight, tuple(counts)))  # type: ignore[no-untyped-call]


def looped_linear(rows: Tensor, weight: Tensor, counts: Sequence[int]) -> Tensor:
    """Do the same with one product per expert."""
    pairs = zip(rows.split(list(counts)), weight, strict=True)
    return torch.cat([F.linear(some, one) for some, one in pairs])


def can_group(rows: Tensor, weight: Tensor) -> bool:
    """Return True if torch's grouped product supports these: rows must be multiples of 16 bytes."""
    if torch.is_autocast_enabled(rows.device.type) or rows.dtype != weight.dtype:
        return False
    is_even = all(size * rows.element_size() % 16 == 0 for size in weight.shape[1:])
    return hasattr(F, "grouped_mm") and is_even and rows.is_floating_point()


class _Grouped(torch.autograd.Function):
    """torch's grouped product, also for no rows and for gradients in any layout."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, counts: tuple[int, ...]) -> Tensor:
        ends = torch.tensor(counts, dtype=torch.int32, device="cpu").cumsum(0, dtype=torch.int32)
        ends = on_device(ends, rows.device)
        ctx.save_for_backward(rows, weight, ends)
        return _grouped(rows, weight.transpose(1, 2), ends)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        rows, weight, ends = ctx.saved_tensors
        gradient = gradient.contiguous()
        of_rows = of_weight = None
        if ctx.needs_input_grad[0]:
            of_rows = _grouped(gradient, weight, ends)
        if ctx.needs_input_grad[1]:
            of_weight = _weight_gradient(gradient, rows, weight, ends)
        return of_rows, of_weight, None


def _grouped(rows: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    if not len(rows):
        return rows.new_zeros(0, weights.shape[2])
    return F.grouped_mm(rows.contiguous(), weights, offs=ends)


def _weight_gradient(gradient: Tensor, rows: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """[experts, o, i]: zero for an expert without rows."""
    if not len(rows):
        return torch.zeros_like(weight)
    return F.grouped_mm(gradient.transpose(0, 1), rows.contiguous(), offs=ends)


# ---- param groups --------------------------------------------------------------------------------

Group = dict[str, Any]
DENSE = "dense-params"


def split_params_into_different_moe_groups_for_optimizer(
    param_groups: Group | Sequence[Group], max_group_size: float = 178956971
) -> list[Group]:
    """Move the experts out of param groups into separate groups at the end.

    Such a group has the options of the original one, `name` = the name of the experts' ranks
    (`ep_size_<ranks>`), and `moe` = True.

    Args:
        param_groups: one or several; they are not changed.
        max_group_size: a group is split before it has more elements than this.
    """
    given = [param_groups] if isinstance(param_groups, dict) else list(param_groups)
    dense: list[Group] = []
    experts: list[Group] = []
    for group in given:
        params = list(group["params"])
        others = [p for p in params if not is_moe_param(p)]
        if others or not params:
            dense.append({**group, "params": others})
        by_name: dict[str, list[Tensor]] = {}
        for parameter in filter(is_moe_param, params):
            by_name.setdefault(parameter.group_name, []).append(parameter)
        for name, members in by_name.items():
            for some in _cut(members, max_group_size):
                experts.append({**group, "params": some, "name": name, "moe": True})
    return [*dense, *experts]


def _cut(members: Iterable[Tensor], size: float) -> list[list[Tensor]]:
    found: list[list[Tensor]] = []
    room = 0.0
    for parameter in members:
        if not found or parameter.numel() > room:
            found.append([])
            room = size
        found[-1].append(parameter)
        room -= parameter.numel()
    return found


def configure_moe_param_groups(model_parameters: Sequence[Any]) -> list[Group]:
    """Return param groups with separate experts, from parameters or param groups."""
    given = list(model_parameters)
    if given and isinstance(given[0], dict):
        return split_params_into_different_moe_groups_for_optimizer(cast(list[Group], given))
    group = {"params": given, "name": DENSE}
    return split_params_into_different_moe_groups_for_optimizer(group)


def is_moe_param_group(param_group: Group) -> bool:
    """Return True if a param group has only experts."""
    return bool(param_group.get("moe", False))


def split_params_into_shared_and_expert_params(
    params: Iterable[Tensor],
) -> tuple[list[Tensor], list[Tensor]]:
    """Return the parameters that do not belong to experts, and those that do."""
    given = list(params)
    return [p for p in given if not is_moe_param(p)], [p for p in given if is_moe_param(p)]


def split_params_grads_into_shared_and_expert_params(
    group: Iterable[Tensor],
) -> tuple[list[Tensor], list[Tensor]]:
    """Return the gradients of parameters that do not belong to experts, and of those that do."""
    shared, experts = split_params_into_shared_and_expert_params(group)
    grads = [[p.grad for p in some if p.grad is not None] for some in (shared, experts)]
    return grads[0], grads[1]


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
    """Exchange each rank's rows for each other rank; backward is the reverse exchange."""

    def exchange(rows: Tensor, sent: list[int], received: list[int]) -> Tensor:
        arrived = rows.new_empty(sum(received), rows.shape[1])
        group, label = ranks.group_for(rows), "the exchange of tokens with experts"
        given = rows.contiguous()
        labelled(label, all_to_all_single, arrived, given, received, sent, group=group)
        return arrived

    return across(
        rows, lambda x: exchange(x, sent, received), lambda x: exchange(x, received, sent)
    )


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
