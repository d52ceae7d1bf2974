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
    ReduceOp as ReduceOp,
    get_backend as get_backend,
    get_process_group_ranks as get_process_group_ranks,
    is_available as is_available,
    is_initialized as is_initialized,
)

from hadal.comm.comms_log import (
    Row as Row,
    is_logging as is_logging,
    reset_log as reset_log,
    start_log as start_log,
    stop_log as stop_log,
)
from hadal.comm.functions import (
    P2POp as P2POp,
    all_gather as all_gather,
    all_gather_coalesced as all_gather_coalesced,
    all_gather_into_tensor as all_gather_into_tensor,
    all_gather_object as all_gather_object,
    all_reduce as all_reduce,
    all_reduce_coalesced as all_reduce_coalesced,
    all_to_all as all_to_all,
    all_to_all_single as all_to_all_single,
    barrier as barrier,
    batch_isend_irecv as batch_isend_irecv,
    broadcast as broadcast,
    broadcast_object_list as broadcast_object_list,
    gather as gather,
    gather_object as gather_object,
    inference_all_reduce as inference_all_reduce,
    irecv as irecv,
    isend as isend,
    recv as recv,
    reduce as reduce,
    reduce_scatter as reduce_scatter,
    reduce_scatter_tensor as reduce_scatter_tensor,
    scatter as scatter,
    scatter_object_list as scatter_object_list,
    send as send,
)
from hadal.comm.ranks import (
    Ranks as Ranks,
    destroy_process_group as destroy_process_group,
    get_all_ranks_from_group as get_all_ranks_from_group,
    get_global_rank as get_global_rank,
    get_world_group as get_world_group,
    has_all_gather_into_tensor as has_all_gather_into_tensor,
    has_all_reduce_coalesced as has_all_reduce_coalesced,
    has_coalescing_manager as has_coalescing_manager,
    has_reduce_scatter_tensor as has_reduce_scatter_tensor,
    initialize_mesh_device as initialize_mesh_device,
    monitored_barrier as monitored_barrier,
    new_group as new_group,
)
from hadal.comm.start import (
    get_local_rank as get_local_rank,
    get_local_world_size as get_local_world_size,
    get_rank as get_rank,
    get_world_size as get_world_size,
    init_distributed as init_distributed,
)
from hadal.comm.summary import log_summary as log_summary
from hadal.lazy import public_names

__all__ = public_names(globals())
