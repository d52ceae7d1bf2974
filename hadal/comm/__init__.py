"""Communication between ranks; for users, the functions of `torch.distributed`, logged.

Words of this folder.

rank        one process of the job               world   all of them
ranks       the group of ranks that share one task (`Ranks`): here, all data-parallel ranks
collective  a call that all ranks of a group make together, in one order
pending     a collective that has been started and not yet waited for
wire        the dtype in which values travel
agreement   a small exchange on the host by which ranks learn that they do the same thing
record      one collective as the log of collectives has it, from its start to its end
"""

from torch.distributed import (
    ReduceOp,
    get_backend,
    get_process_group_ranks,
    is_available,
    is_initialized,
)

from hadal.comm.comms_log import Row, is_logging, reset_log, start_log, stop_log
from hadal.comm.functions import (
    P2POp,
    all_gather,
    all_gather_coalesced,
    all_gather_into_tensor,
    all_gather_object,
    all_reduce,
    all_reduce_coalesced,
    all_to_all,
    all_to_all_single,
    barrier,
    batch_isend_irecv,
    broadcast,
    broadcast_object_list,
    gather,
    gather_object,
    inference_all_reduce,
    irecv,
    isend,
    recv,
    reduce,
    reduce_scatter,
    reduce_scatter_tensor,
    scatter,
    scatter_object_list,
    send,
)
from hadal.comm.ranks import (
    Ranks,
    destroy_process_group,
    get_all_ranks_from_group,
    get_global_rank,
    get_world_group,
    has_all_gather_into_tensor,
    has_all_reduce_coalesced,
    has_coalescing_manager,
    has_reduce_scatter_tensor,
    initialize_mesh_device,
    monitored_barrier,
    new_group,
)
from hadal.comm.start import (
    get_local_rank,
    get_local_world_size,
    get_rank,
    get_world_size,
    init_distributed,
)
from hadal.comm.summary import log_summary

__all__ = [
    "P2POp",
    "Ranks",
    "ReduceOp",
    "Row",
    "all_gather",
    "all_gather_coalesced",
    "all_gather_into_tensor",
    "all_gather_object",
    "all_reduce",
    "all_reduce_coalesced",
    "all_to_all",
    "all_to_all_single",
    "barrier",
    "batch_isend_irecv",
    "broadcast",
    "broadcast_object_list",
    "destroy_process_group",
    "gather",
    "gather_object",
    "get_all_ranks_from_group",
    "get_backend",
    "get_global_rank",
    "get_local_rank",
    "get_local_world_size",
    "get_process_group_ranks",
    "get_rank",
    "get_world_group",
    "get_world_size",
    "has_all_gather_into_tensor",
    "has_all_reduce_coalesced",
    "has_coalescing_manager",
    "has_reduce_scatter_tensor",
    "inference_all_reduce",
    "init_distributed",
    "initialize_mesh_device",
    "irecv",
    "is_available",
    "is_initialized",
    "is_logging",
    "isend",
    "log_summary",
    "monitored_barrier",
    "new_group",
    "recv",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "reset_log",
    "scatter",
    "scatter_object_list",
    "send",
    "start_log",
    "stop_log",
]
