"""`deepspeed.utils.groups`: the process groups of the newest engine."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch.distributed as dist

from hadal.comm import Ranks, init_distributed
from hadal.compat.placeholders import unbuilt

if TYPE_CHECKING:
    from hadal.engine.topology import Topology

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
