"""Policies of a configuration, as the frozen values that `assemble` passes to lower layers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from hadal.checkpoint.keep import Keep
from hadal.checkpoint.live import Rules, StagingRules
from hadal.checkpoint.shards import Writing
from hadal.comm.codecs import Blockwise
from hadal.config import Config
from hadal.config.idle import saves_behind
from hadal.device import total_memory
from hadal.engine.batches import BatchSizes
from hadal.engine.tiers import keeps_weights_off, lands_gradients
from hadal.engine.topology import Topology
from hadal.zero.grouping import LeafModules
from hadal.zero.policy import (
    STAGES,
    Divergence,
    Feedback,
    Limits,
    Partition,
    Reduction,
    Transport,
)

_DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}

# On the wire a weight takes 0.508 of its bf16 bytes, and a gradient 0.266.
_CODED_WEIGHTS = Blockwise(8, 256)
_CODED_GRADIENTS = Blockwise(4, 128)


def dtype_named(name: str | None) -> torch.dtype | None:
    """Return the dtype of this name; None for None."""
    return None if name is None else _DTYPES[name]


def wire_dtype(config: Config, sequence_parallel_size: int = 1) -> torch.dtype | None:
    """Return the dtype of gradients on the wire; None is the dtype of their accumulation."""
    chosen = config.communication_data_type
    if sequence_parallel_size > 1:
        chosen = config.seq_parallel_communication_data_type
    return dtype_named(chosen)


def partition_of(config: Config, ranks: int, stage: int | None, device: torch.device) -> Partition:
    """Return which states are sharded over the ranks, at the configured stage or at another one.

    A shard over one rank is whole: on one rank, every stage is stage 0, without its copies. But
    offloaded weights are still fetched and released, and gradients that leave the device need
    no memory there.
    """
    zero = config.zero_optimization
    row = STAGES[zero.stage if stage is None else stage]
    is_alone = ranks == 1 or (row.weights and zero.mics_shard_size == 1)
    if not is_alone or (row.weights and keeps_weights_off(config, device)):
        return row
    if row.gradients and lands_gradients(config, device):
        return replace(row, weights=False)
    return Partition()


def reduction_of(config: Config, sequence_parallel_size: int = 1) -> Reduction:
    """Return how the gradients of all ranks are reduced."""
    zero = config.zero_optimization
    return Reduction(
        adds_up=config.gradient_allreduce_op == "sum",
        prescales=config.prescale_gradients,
        predivides_by=config.gradient_predivide_factor,
        sequence_parallel_size=sequence_parallel_size,
        inside_backward=zero.grad_hooks,
        refuses_unused=not zero.ignore_unused_parameters,
    )


def transport_of(config: Config, shards: int) -> Transport:
    """Return how weights and gradients in `shards` shards are sent."""
    zero = config.zero_optimization
    at_a_time = zero.allgather_bucket_size or Transport().refresh_numel
    if shards == 1:
        return Transport(refresh_numel=at_a_time)
    loco = zero.zeropp_loco_param
    return Transport(
        gather=_CODED_WEIGHTS if zero.zero_quantized_weights else None,
        frozen=_CODED_WEIGHTS if zero.zero_quantized_nontrainable_weights else None,
        refresh_numel=at_a_time,
        refreshes_late=bool(zero.overlap_comm),
        reduce=_CODED_GRADIENTS if zero.zero_quantized_gradients else None,
        feedback=None if loco is None else Feedback(loco.err_beta, loco.reset_T),
    )


def batch_sizes_of(config: Config, topology: Topology) -> BatchSizes:
    """Return the samples of one update."""
    return BatchSizes(
        micro=config.train_micro_batch_size_per_gpu,
        accumulation=config.gradient_accumulation_steps,
        data_parallel_size=topology.data_parallel.size,
        managed=config.managed_gradient_accumulation,
    )


def saving_of(config: Config) -> Rules:
    """Return how checkpoints are written and read, and which ones a save keeps."""
    section, zero, writer = config.checkpoint, config.zero_optimization, config.checkpoint.writer
    return Rules(
        verifies=section.verify_checksums,
        keep=Keep(section.keep_last, section.keep_hours),
        tag_validation=section.tag_validation,
        prefers_universal=section.load_universal,
        is_node_local=section.use_node_local_storage,
        is_async=saves_behind(config),
        staging=StagingRules(
            None if section.staging.folder is None else Path(section.staging.folder),
            section.staging.size,
        ),
        writing=Writing()
        if writer is None
        else Writing(writer.io_buffer_size, writer.io_buffer_double, writer.show_statistics),
        uses_masters=zero.load_from_fp32_weights,
        stage=zero.stage,
        cuts_weights=STAGES[zero.stage].weights,
        gathers_weights=zero.stage3_gather_16bit_weights_on_model_save,
    )


def limits_of(config: Config, shards: int = 1) -> Limits:
    """Return the limits of bucket size, persistence, prefetch and reuse.

    `shards`: the ranks over which a bucket is sharded.
    """
    zero = config.zero_optimization
    largest = zero.reduce_bucket_size
    if STAGES[zero.stage].weights:
        # Each use gathers a whole bucket.
        largest = min(largest, zero.allgather_bucket_size or largest)
        offload = zero.offload_param
        if offload is not None and offload.device == "nvme":
            # A buffer for the disk holds a rank's shard of a bucket.
            largest = max(1, min(largest, offload.buffer_size * shards))
    return Limits(
        bucket_numel=largest,
        persistence_numel=zero.stage3_param_persistence_threshold,
        persistent_total_numel=zero.stage3_model_persistence_threshold,
        live_numel=zero.stage3_max_live_parameters,
        reuse_numel=zero.stage3_max_reuse_distance,
        prefetch_numel=0 if zero.stage3_allgather_sequential else zero.stage3_prefetch_bucket_size,
        overlap=bool(zero.overlap_comm),
    )


def leaves_of(config: Config) -> LeafModules:
    """Return which modules are gathered as a whole."""
    leaf = config.zero_optimization.leaf_module
    return LeafModules(
        classes=tuple(leaf.classes),
        names=tuple(leaf.names),
        name_suffixes=tuple(leaf.name_suffixes),
        granularity_numel=config.zero_optimization.stage3_module_granularity_threshold,
    )


def divergence_of(config: Config) -> Divergence:
    """Return the policy for ranks and updates that take different paths through the model."""
    zero = config.zero_optimization
    return Divergence(
        is_expected=zero.divergent_ranks is True,
        is_tolerated=zero.divergent_ranks is not False,
        reports_each=zero.log_trace_cache_warnings,
    )


def budget_of(config: Config, device: torch.device) -> int | None:
    """Return the bytes that may be in use on a device; None if nothing limits them."""
    budget = config.activation_checkpointing.memory_budget
    if budget is None:
        return None
    return int(budget * total_memory(device).total) if budget <= 1 else int(budget)
