"""The functions of `deepspeed.comm` whose arguments are not quite torch's or Hadal's."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from hadal import comm
from hadal.comm.start import DEFAULT_PORT


def init_distributed(  # noqa: PLR0913 - the signature is DeepSpeed's
    dist_backend: str | None = None,
    auto_mpi_discovery: bool = True,
    distributed_port: int = DEFAULT_PORT,
    verbose: bool = True,
    timeout: timedelta | None = None,
    init_method: str | None = None,
    dist_init_required: bool | None = None,
    config: Any = None,
    rank: int = -1,
    world_size: int = -1,
) -> None:
    """Start the process group, unless one runs: see `hadal.init_distributed`.

    MPI's variables are read wherever there are some, and `config` says nothing that matters here.
    """
    if dist_init_required is False:
        return
    given = {} if timeout is None else {"timeout": timeout}
    comm.init_distributed(
        dist_backend,
        distributed_port,
        init_method=init_method,
        rank=rank,
        world_size=world_size,
        **given,
    )


def get_rank(group: Any = None) -> int:
    """This process's number in a group; 0 where none runs."""
    return dist.get_rank(group) if dist.is_initialized() else 0


def get_world_size(group: Any = None) -> int:
    """How many processes a group has; 1 where none runs."""
    return dist.get_world_size(group) if dist.is_initialized() else 1


def get_world_group() -> dist.ProcessGroup | None:
    """The group of all processes; None where none runs."""
    return dist.group.WORLD


def has_all_gather_into_tensor() -> bool:
    """Whether torch gathers into one tensor; every release that Hadal runs on does."""
    return True


class TorchBackend:
    """torch's process group, as programs ask which of its calls there are."""

    def __init__(
        self,
        backend: str | None,
        timeout: timedelta | None,
        init_method: str | None,
        rank: int = -1,
        world_size: int = -1,
        name: str = "torch",
    ) -> None:
        self.name = name
        init_distributed(
            backend, timeout=timeout, init_method=init_method, rank=rank, world_size=world_size
        )

    def is_initialized(self) -> bool:
        """Whether a process group runs."""
        return dist.is_initialized()

    def has_all_gather_into_tensor(self) -> bool:
        """See the function of this name."""
        return has_all_gather_into_tensor()

    def has_reduce_scatter_tensor(self) -> bool:
        """The same of the other direction."""
        return True

    def get_all_gather_function(self) -> Callable[..., Any]:
        """torch's gather into one tensor."""
        return dist.all_gather_into_tensor  # noqa: TID251 - handed on

    def get_reduce_scatter_function(self) -> Callable[..., Any]:
        """torch's reduction from one tensor into shards of it."""
        return dist.reduce_scatter_tensor  # noqa: TID251 - handed on
