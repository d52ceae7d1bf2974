"""`deepspeed.utils.groups`: the ranks around distributed experts, by the name of their groups."""

from __future__ import annotations

import torch.distributed as dist

from hadal.comm import Ranks
from hadal.comm.ranks import (
    Table,
    expert_group_names,
    expert_groups,
    expert_tables,
    make_expert_groups,
)
from hadal.compat.groups import get_sequence_data_parallel_group
from hadal.errors import UsageError


def create(
    expert_parallel_size_: int,
    mp_size: int | None = None,
    pp_size: int | None = None,
    mp_mode: str = "tp",
    use_data_before_expert_parallel_: bool = False,
    folding_spec: None = None,
) -> None:
    """Make the groups of experts over a number of ranks, among those with the same parameters."""
    among = Ranks.of(get_sequence_data_parallel_group())
    make_expert_groups(expert_parallel_size_, among, data_first=use_data_before_expert_parallel_)


def ranks_of(
    world_size: int,
    tensor_parallel_size_: int,
    expert_parallel_size_: int,
    pipeline_parallel_size_: int = 1,
    use_data_before_expert_parallel_: bool = False,
) -> tuple[list[list[int]], list[list[int]]]:
    """Return the groups that share experts, and those with the same experts, of any layout."""
    block, tensor = world_size // pipeline_parallel_size_, tensor_parallel_size_
    found: tuple[list[list[int]], list[list[int]]] = ([], [])
    for stage in range(0, world_size, block):
        for place in range(tensor):
            tables: tuple[Table, Table] = expert_tables(
                range(stage + place, stage + block, tensor),
                expert_parallel_size_,
                data_first=use_data_before_expert_parallel_,
            )
            for kind, table in zip(found, tables, strict=True):
                kind.extend(map(list, table))
    return found


def parallel_group(group_name: str) -> dist.ProcessGroup:
    """Return the ranks that share the experts."""
    return expert_groups(group_name).parallel.group


def parallel_group_dict() -> dict[str, dist.ProcessGroup]:
    """Return the ranks that share experts, for each name."""
    return {name: parallel_group(name) for name in expert_group_names()}


def parallel_group_ranks(group_name: str) -> list[int]:
    """Return the global ranks of those that share the experts."""
    return list(expert_groups(group_name).parallel.numbers)


def parallel_rank(group_name: str) -> int:
    """Return this rank's place among those that share the experts."""
    return expert_groups(group_name).parallel.rank


def parallel_src_rank(group_name: str) -> int:
    """Return the global rank of the first of those that share the experts."""
    return expert_groups(group_name).parallel.numbers[0]


def parallel_world_size(group_name: str) -> int:
    """Return how many ranks share the experts."""
    return expert_groups(group_name).parallel.size


def data_parallel_group(group_name: str) -> dist.ProcessGroup:
    """Return the ranks that hold the same experts."""
    return expert_groups(group_name).data.group


def data_parallel_group_dict() -> dict[str, dist.ProcessGroup]:
    """Return the ranks that hold the same experts, for each name."""
    return {name: data_parallel_group(name) for name in expert_group_names()}


def data_parallel_group_ranks(group_name: str) -> list[int]:
    """Return the global ranks of those that hold the same experts."""
    return list(expert_groups(group_name).data.numbers)


def data_parallel_rank(group_name: str) -> int:
    """Return this rank's place among those that hold the same experts."""
    return expert_groups(group_name).data.rank


def data_parallel_src_rank(group_name: str) -> int:
    """Return the global rank of the first of those that hold the same experts."""
    return expert_groups(group_name).data.numbers[0]


def data_parallel_world_size(group_name: str) -> int:
    """Return how many ranks hold the same experts."""
    return expert_groups(group_name).data.size


def max_expert_size() -> int:
    """Return the largest number of ranks that share experts.

    Raises:
        UsageError: there are no groups of experts.
    """
    names = expert_group_names()
    if not names:
        raise UsageError("there are no groups of ranks for experts; make a MoE layer's first")
    return max(expert_groups(name).parallel.size for name in names)


def max_expert_size_name() -> str:
    """Return the name of the groups with the most ranks that share experts."""
    return f"ep_size_{max_expert_size()}"


def max_expert_parallel_group() -> dist.ProcessGroup:
    """Return the ranks that share experts, of the largest groups."""
    return parallel_group(max_expert_size_name())
