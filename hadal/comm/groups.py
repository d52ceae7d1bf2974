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
    """Return the group of all processes; None if none runs."""
    return dist.group.WORLD


def get_global_rank(group: Group = None, group_rank: int = 0) -> int:
    """Return the rank in the world of a group's rank."""
    if group is None or not dist.is_initialized():
        return group_rank
    return dist.get_global_rank(group, group_rank)


def get_all_ranks_from_group(group: Group = None) -> list[int]:
    """Return the ranks of the world that are in a group; by default all."""
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
    """Destroy a group; by default all of them."""
    if dist.is_initialized():
        dist.destroy_process_group(group)


def initialize_mesh_device(
    mesh_shape: tuple[int, ...], mesh_dim_names: tuple[str, ...]
) -> DeviceMesh:
    """Return all ranks as a grid with named axes, with a group along each of them."""
    return init_device_mesh(current_device().type, mesh_shape, mesh_dim_names=mesh_dim_names)


def monitored_barrier(
    group: Group = None, timeout: timedelta | None = None, wait_all_ranks: bool = False
) -> None:
    """Wait until every rank of a group has arrived, with any backend.

    Raises:
        CommunicationError: a rank did not arrive in time; the group's first rank names it, or with
            `wait_all_ranks` every missing rank.
    """
    if dist.is_initialized():
        group = dist.group.WORLD if group is None else group
        assert group is not None  # one runs
        functions.monitored_barrier(host_group_of(group), timeout, wait_all_ranks)


def has_all_gather_into_tensor() -> bool:
    """Return True: every torch that the library supports has this collective."""
    return True


has_reduce_scatter_tensor = has_all_reduce_coalesced = has_all_gather_into_tensor


def has_coalescing_manager() -> bool:
    """Return False: no context joins several calls; the `_coalesced` functions do."""
    return False
