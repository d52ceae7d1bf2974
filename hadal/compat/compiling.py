"""`deepspeed.compile.passes`: the words of `engine.compile(schedule=...)`, and AutoSP's inputs."""

from __future__ import annotations

from torch import Tensor
from torch._dynamo import mark_dynamic

from hadal.engine.graph_passes import GraphPass
from hadal.errors import UsageError

add_z1_reduce = GraphPass.REDUCE_AT_STAGE_1
add_z2_reduce = GraphPass.REDUCE_AT_STAGE_2
add_z3_gather_release = GraphPass.GATHER
schedule_prefetch = GraphPass.PREFETCH
selective_gather = GraphPass.SELECTIVE_GATHER
offload_parameter_fwd = GraphPass.OFFLOAD_PARAMETERS
move_opt_states = GraphPass.OFFLOAD_STATES
move_opt_states_sync = GraphPass.OFFLOAD_STATES_SYNC
offload_adam_states_for_init = GraphPass.OFFLOAD_STATES_FOR_INIT


def prepare_autosp_inputs(
    input_id: Tensor,
    label_id: Tensor,
    position_id: Tensor | None = None,
    attention_mask: Tensor | None = None,
    seq_dim: int = 1,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Return whole inputs for a compiled model whose sequences `sequence_parallel_size` splits.

    Their lengths may change from batch to batch: compiled graphs hold for any.

    Args:
        input_id, label_id, position_id, attention_mask: integer tensors of a rank's micro-batch.
        seq_dim: the dimension of the sequence in all of them.

    Raises:
        UsageError: a tensor has no such dimension.
    """
    given = {
        "input_id": input_id,
        "label_id": label_id,
        "position_id": position_id,
        "attention_mask": attention_mask,
    }
    for name, tensor in given.items():
        if tensor is not None and not 0 <= seq_dim < tensor.dim():
            raise UsageError(
                f"prepare_autosp_inputs(seq_dim={seq_dim}): {name} has the shape"
                f" {tuple(tensor.shape)}; pass the dimension of its sequence"
            )
    for tensor in given.values():
        if tensor is not None:
            mark_dynamic(tensor, seq_dim)
    return input_id, label_id, position_id, attention_mask
