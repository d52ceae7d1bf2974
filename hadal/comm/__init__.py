"""Ranks and what they say to each other.

Words of this folder.

rank        one process of the job               world   all of them
ranks       the group of ranks that share one job of work (`Ranks`): here, all data-parallel ranks
collective  a call that all ranks of a group make together, in one order
pending     a collective that has been started and not yet waited for
wire        the dtype in which values travel
agreement   a small exchange on the host by which ranks learn that they do the same thing
"""

from hadal.comm.collectives import barrier
from hadal.comm.ranks import (
    Ranks,
    get_local_rank,
    get_local_world_size,
    get_rank,
    get_world_size,
    is_initialized,
)
from hadal.comm.start import init_distributed

__all__ = [
    "Ranks",
    "barrier",
    "get_local_rank",
    "get_local_world_size",
    "get_rank",
    "get_world_size",
    "init_distributed",
    "is_initialized",
]
