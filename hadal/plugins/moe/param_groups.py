"""Param groups in which experts and other parameters are separate."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, cast

from torch import Tensor

from hadal.plugins.moe.experts import is_moe_param

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
