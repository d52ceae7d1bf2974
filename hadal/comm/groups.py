"""Process groups in torch's form."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from hadal.comm import functions
from hadal.comm.comms_log import numbers_of
from hadal.comm.ranks import host_group_of
from hadal.device import current_device

Group = dist.ProcessGroup | None


def get_world_group() -> Group:
    """The group of all processes; None where none runs."""
    return dist.group.WORLD


def get_global_rank(group: Group = None, group_rank: int = 0) -> int:
    """The number in the world of a group's rank."""
    if group is None or not dist.is_initialized():
        return group_rank
    return dist.get_global_rank(group, group_rank)


def get_all_ranks_from_group(group: Group = None) -> list[int]:
    """The numbers in the world of a group's ranks; of all where none is given."""
    return list(numbers_of(group))


def new_group(
    ranks: list[int] | None = None,
    timeout: timedelta | None = None,
    backend: str | None = None,
    **rest: Any,
) -> Any:
    """Make a group of some ranks; all ranks of the world must call it, in one order."""
    return dist.new_group(ranks, timeout, backend, **rest)


def destroy_process_group(group: Group = None) -> None:
    """End a group; all of them where none is given."""
    if dist.is_initialized():
        dist.destroy_process_group(group)


def initialize_mesh_device(
    mesh_shape: tuple[int, ...], mesh_dim_names: tuple[str, ...]
) -> DeviceMesh:
    """All ranks as a grid with named axes, and the groups along each of them."""
    return init_device_mesh(current_device().type, mesh_shape, mesh_dim_names=mesh_dim_names)


def monitored_barrier(
    group: Group = None, timeout: timedelta | None = None, wait_all_ranks: bool = False
) -> None:
    """Wait until every rank of a group has come here, whatever its backend.

    Raises:
        CommunicationError: one has not come in time; on the group's first rank it says which, with
            `wait_all_ranks` all of those that have not.
    """
    if dist.is_initialized():
        group = dist.group.WORLD if group is None else group
        assert group is not None  # one runs
        functions.monitored_barrier(host_group_of(group), timeout, wait_all_ranks)


def has_all_gather_into_tensor() -> bool:
    """Whether there is such a collective: in every torch that the library runs on."""
    return True


has_reduce_scatter_tensor = has_all_reduce_coalesced = has_all_gather_into_tensor


def has_coalescing_manager() -> bool:
    """Whether several calls can be joined by a context: the `_coalesced` functions join them."""
    return False
