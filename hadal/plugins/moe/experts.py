"""The experts of one rank: separate modules, or weights stacked in one tensor."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from copy import deepcopy
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hadal.device import on_device
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
