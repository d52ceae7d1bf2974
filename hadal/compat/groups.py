"""`deepspeed.utils.groups`: the process groups of the newest engine and of experts."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from hadal.comm import Ranks, init_distributed, ranks
from hadal.comm.ranks import Table, expert_group_names, expert_tables, make_expert_groups
from hadal.compat.kinds import also
from hadal.compat.surface import unbuilt
from hadal.errors import UsageError

if TYPE_CHECKING:
    from hadal.engine.topology import Topology


expert_groups = also(AssertionError)(ranks.expert_groups)
_newest: list[tuple[Topology, dist.ProcessGroup | None]] = []


def remember_groups(topology: Topology) -> None:
    """Use these groups for all answers from now on."""
    _newest[:] = [(topology, dist.group.WORLD)]


def _topology() -> Topology | None:
    """Return the newest engine's topology, if its process group still exists."""
    lives = bool(_newest) and dist.is_initialized() and _newest[0][1] is dist.group.WORLD
    return _newest[0][0] if lives else None


def initialize(ep_size: int = 1, mpu: object = None) -> None:
    """Do nothing: the `initialize` of an engine makes the groups.

    Raises:
        NotBuiltYetError: experts are to be distributed over ranks.
    """
    if ep_size > 1:
        raise unbuilt(f"deepspeed.utils.groups.initialize(ep_size={ep_size})")


def _data_parallel() -> Ranks:
    """Return the ranks that see different samples; all ranks if there is no engine."""
    topology = _topology()
    if topology is not None:
        return topology.data_parallel
    init_distributed()
    return Ranks.world()


def _sequence_parallel() -> Ranks | None:
    topology = _topology()
    return None if topology is None else topology.sequence_parallel


def _model_parallel() -> Ranks | None:
    topology = _topology()
    return None if topology is None else topology.model_parallel


def get_data_parallel_group() -> dist.ProcessGroup:
    """Return the ranks that see different samples."""
    return _data_parallel().group


def get_data_parallel_world_size() -> int:
    """Return the number of ranks that see different samples."""
    return _data_parallel().size


def get_data_parallel_rank() -> int:
    """Return this rank's index among those that see different samples."""
    return _data_parallel().rank


def get_data_parallel_group_ranks() -> list[int]:
    """Return the global ranks of that group."""
    return list(_data_parallel().numbers)


def get_broadcast_src_rank() -> int:
    """Return the global rank of the first of that group."""
    return _data_parallel().numbers[0]


def get_sequence_data_parallel_group() -> dist.ProcessGroup:
    """Return the ranks that average gradients."""
    topology = _topology()
    return (_data_parallel() if topology is None else topology.sharding).group


def get_sequence_data_parallel_world_size() -> int:
    """Return the number of ranks that average gradients."""
    return get_sequence_data_parallel_group().size()


def get_sequence_data_parallel_rank() -> int:
    """Return this rank's index among those that average gradients."""
    return get_sequence_data_parallel_group().rank()


def get_sequence_parallel_group() -> dist.ProcessGroup | None:
    """Return the ranks that share this rank's sequences; None if none do."""
    shared = _sequence_parallel()
    return None if shared is None else shared.group


def get_sequence_parallel_world_size() -> int:
    """Return the number of ranks that share each sequence."""
    shared = _sequence_parallel()
    return 1 if shared is None else shared.size


def get_sequence_parallel_rank() -> int:
    """Return this rank's index among those that share its sequences."""
    shared = _sequence_parallel()
    return 0 if shared is None else shared.rank


def get_tensor_model_parallel_group() -> dist.ProcessGroup | None:
    """Return the ranks that hold the parts of this model; None if it has only one."""
    parts = _model_parallel()
    return None if parts is None else parts.group


def get_tensor_model_parallel_world_size() -> int:
    """Return the number of ranks that hold the parts of this model."""
    parts = _model_parallel()
    return 1 if parts is None else parts.size


def get_tensor_model_parallel_rank() -> int:
    """Return this rank's index among those that hold the parts of this model."""
    parts = _model_parallel()
    return 0 if parts is None else parts.rank


def get_tensor_model_parallel_src_rank() -> int:
    """Return the global rank of the group's first member."""
    parts = _model_parallel()
    if parts is None:
        return dist.get_rank() if dist.is_initialized() else 0
    return parts.numbers[0]


# ---- ranks around distributed experts, by the name of their groups -------------------------------


def create_expert_groups(
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


def expert_group_ranks(
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


def _of_experts(kind: str) -> dict[str, Callable[..., Any]]:
    """Return the functions of the ranks that share experts, or of those with the same ones."""

    def found(group_name: str) -> Ranks:
        ranks: Ranks = getattr(expert_groups(group_name), kind)
        return ranks

    return {
        "group": lambda group_name: found(group_name).group,
        "group_dict": lambda: {name: found(name).group for name in expert_group_names()},
        "group_ranks": lambda group_name: list(found(group_name).numbers),
        "rank": lambda group_name: found(group_name).rank,
        "src_rank": lambda group_name: found(group_name).numbers[0],
        "world_size": lambda group_name: found(group_name).size,
    }


for _name, _function in _of_experts("parallel").items():
    globals()[f"expert_parallel_{_name}"] = _function
for _name, _function in _of_experts("data").items():
    globals()[f"expert_data_parallel_{_name}"] = _function


def expert_model_parallel_world_size() -> int:
    """Return 1: no expert is cut."""
    return 1


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
    return expert_groups(max_expert_size_name()).parallel.group
