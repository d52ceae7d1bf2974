"""`deepspeed.utils.groups`: the process groups of the newest engine and of experts."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from hadal.comm import Ranks, get_rank, init_distributed, ranks
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


def _sharding() -> Ranks:
    """Return the ranks that average gradients."""
    topology = _topology()
    return _data_parallel() if topology is None else topology.sharding


def _sequence_parallel() -> Ranks | None:
    topology = _topology()
    return None if topology is None else topology.sequence_parallel


def _model_parallel() -> Ranks | None:
    topology = _topology()
    return None if topology is None else topology.model_parallel


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
    among = _sharding()
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


# ---- functions about each kind of ranks: `get_data_parallel_rank()`, ... -------------------------

_FINDERS: dict[str, Callable[..., Ranks | None]] = {
    "get_data_parallel": _data_parallel,
    "get_sequence_data_parallel": _sharding,
    "get_sequence_parallel": _sequence_parallel,
    "get_tensor_model_parallel": _model_parallel,
    "expert_parallel": lambda group_name: expert_groups(group_name).parallel,
    "expert_data_parallel": lambda group_name: expert_groups(group_name).data,
}
_ANSWERS: dict[str, tuple[Callable[[Ranks], Any], Callable[[], Any]]] = {
    "group": (lambda ranks: ranks.group, lambda: None),
    "group_ranks": (lambda ranks: list(ranks.numbers), lambda: [get_rank()]),
    "rank": (lambda ranks: ranks.rank, lambda: 0),
    "src_rank": (lambda ranks: ranks.numbers[0], get_rank),
    "world_size": (lambda ranks: ranks.size, lambda: 1),
}
"""Questions asked of some ranks, and the answers about this one if there are none."""


def _function(finder: str, answer: str) -> Callable[..., Any]:
    def tell(*group_name: str) -> Any:
        ranks, (of, alone) = _FINDERS[finder](*group_name), _ANSWERS[answer]
        return alone() if ranks is None else of(ranks)

    return tell


for _finder in _FINDERS:
    for _answer in _ANSWERS:
        globals()[f"{_finder}_{_answer}"] = _function(_finder, _answer)


def expert_parallel_group_dict() -> dict[str, dist.ProcessGroup]:
    """Return the group of this rank's experts in each layout, by name."""
    return {name: expert_groups(name).parallel.group for name in expert_group_names()}


def expert_data_parallel_group_dict() -> dict[str, dist.ProcessGroup]:
    """Return the group of ranks with the same experts in each layout, by name."""
    return {name: expert_groups(name).data.group for name in expert_group_names()}


if TYPE_CHECKING:

    def __getattr__(name: str) -> Any: ...
