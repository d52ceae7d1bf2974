"""`deepspeed.utils.groups`: which ranks share what, as the newest engine has it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch.distributed as dist

from hadal.comm import Ranks, init_distributed
from hadal.compat.placeholders import unbuilt

if TYPE_CHECKING:
    from hadal.engine.topology import Topology

_newest: list[tuple[Topology, dist.ProcessGroup | None]] = []


def remember_groups(topology: Topology) -> None:
    """Answer with these ranks from now on, as a program has one grouping of its ranks."""
    _newest[:] = [(topology, dist.group.WORLD)]


def _topology() -> Topology | None:
    """The newest engine's, while the process group lives that it was made in."""
    lives = bool(_newest) and dist.is_initialized() and _newest[0][1] is dist.group.WORLD
    return _newest[0][0] if lives else None


def initialize(ep_size: int = 1, mpu: object = None) -> None:
    """Nothing is prepared: groups are made by `initialize` of an engine.

    Raises:
        NotBuiltYetError: experts are to be spread over ranks.
    """
    if ep_size > 1:
        raise unbuilt(f"deepspeed.utils.groups.initialize(ep_size={ep_size})")


def _data_parallel() -> Ranks:
    """The ranks that see different samples; all of them while there is no engine."""
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
    """The ranks that see different samples."""
    return _data_parallel().group


def get_data_parallel_world_size() -> int:
    """How many they are."""
    return _data_parallel().size


def get_data_parallel_rank() -> int:
    """My number among them."""
    return _data_parallel().rank


def get_data_parallel_group_ranks() -> list[int]:
    """Their numbers in the world."""
    return list(_data_parallel().numbers)


def get_broadcast_src_rank() -> int:
    """The number in the world of the first of them."""
    return _data_parallel().numbers[0]


def get_sequence_data_parallel_group() -> dist.ProcessGroup:
    """The ranks that average gradients."""
    topology = _topology()
    return (_data_parallel() if topology is None else topology.sharding).group


def get_sequence_data_parallel_world_size() -> int:
    """How many they are."""
    return get_sequence_data_parallel_group().size()


def get_sequence_data_parallel_rank() -> int:
    """My number among them."""
    return get_sequence_data_parallel_group().rank()


def get_sequence_parallel_group() -> dist.ProcessGroup | None:
    """The ranks that share my sequences; None where each rank has its own."""
    shared = _sequence_parallel()
    return None if shared is None else shared.group


def get_sequence_parallel_world_size() -> int:
    """How many they are."""
    shared = _sequence_parallel()
    return 1 if shared is None else shared.size


def get_sequence_parallel_rank() -> int:
    """My number among them."""
    shared = _sequence_parallel()
    return 0 if shared is None else shared.rank


def get_tensor_model_parallel_group() -> dist.ProcessGroup | None:
    """The ranks that hold the other parts of my model; None where each rank holds it all."""
    parts = _model_parallel()
    return None if parts is None else parts.group


def get_tensor_model_parallel_world_size() -> int:
    """How many they are."""
    parts = _model_parallel()
    return 1 if parts is None else parts.size


def get_tensor_model_parallel_rank() -> int:
    """My number among them."""
    parts = _model_parallel()
    return 0 if parts is None else parts.rank


def get_tensor_model_parallel_src_rank() -> int:
    """The number in the world of the first of them."""
    parts = _model_parallel()
    if parts is None:
        return dist.get_rank() if dist.is_initialized() else 0
    return parts.numbers[0]
