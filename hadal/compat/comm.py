"""The functions of `deepspeed.comm` whose arguments are not quite torch's or Hadal's."""

from __future__ import annotations

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
