"""`zero_optimization`: what is sharded over the ranks, and how it travels."""

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal, TypeAlias

from pydantic import BeforeValidator

from hadal.config.leaf_module import LeafModule
from hadal.config.offload import OffloadOptimizer, OffloadParam
from hadal.config.section import (
    NO_EFFECT,
    TUNABLE,
    UNBUILT,
    UNBUILT_AT_STAGE_3,
    Mark,
    Section,
    key,
    section,
)
from hadal.config.values import Boolean, Integer, Number, whole
from hadal.config.zenflow import ZenFlow

Stage: TypeAlias = Annotated[Literal[0, 1, 2, 3], BeforeValidator(whole)]
_UNPREFIXED = (
    "prefetch_bucket_size",
    "param_persistence_threshold",
    "model_persistence_threshold",
    "max_live_parameters",
    "max_reuse_distance",
    "gather_16bit_weights_on_model_save",
    "module_granularity_threshold",
    "use_all_reduce_for_fetch_params",
    "allgather_sequential",
)


class LocoParam(Section):
    """Error feedback for quantised gradients."""

    err_beta: Number = key(0.8, "Decay of the average compression error.", ge=0, le=1)
    reset_T: Integer = key(1024, "Updates after which the error is forgotten.", ge=1)


class ZeroOptimization(Section):
    """The ZeRO stage, its buckets and limits, and what goes with them."""

    aliases: ClassVar[Mapping[str, str]] = {name: f"stage3_{name}" for name in _UNPREFIXED}
    renamed: ClassVar[Mapping[str, str]] = {
        "stage3_gather_fp16_weights_on_model_save": "stage3_gather_16bit_weights_on_model_save"
    }
    moved: ClassVar[Mapping[str, str]] = {
        "cpu_offload": "zero_optimization.offload_optimizer",
        "cpu_offload_param": "zero_optimization.offload_param",
    }
    leftovers: ClassVar[Mapping[str, str]] = {
        "grad_hooks": "ignored: gradients are always reduced by hooks during the backward pass",
        "cpu_offload_use_pin_memory": "ignored: use offload_param.pin_memory or "
        "offload_optimizer.pin_memory",
    }

    stage: Stage = key(
        0,
        "What is sharded: 0 nothing, 1 optimizer state, 2 gradients too, 3 weights too.",
        mark=TUNABLE,
    )
    contiguous_gradients: Boolean = key(
        True, "Lay gradients end to end as they are produced. They always are.", mark=NO_EFFECT
    )
    reduce_scatter: Boolean = key(
        True,
        "Send each rank its shard of the average only. Always, where gradients are sharded.",
        mark=NO_EFFECT,
    )
    reduce_bucket_size: Integer = key(
        500_000_000, "Elements reduced at a time.", gt=0, mark=TUNABLE
    )
    use_multi_rank_bucket_allreduce: Boolean = key(
        True, "Without `reduce_scatter`, reduce the shards of several ranks at once.", mark=UNBUILT
    )
    allgather_partitions: Boolean = key(
        True, "Gather updated weights, rather than broadcast them.", mark=NO_EFFECT
    )
    allgather_bucket_size: Integer = key(
        500_000_000,
        "Elements of weights gathered at a time; an even number. A bucket is no larger than this "
        "and `reduce_bucket_size`, unless one parameter is; 0 leaves it to the latter.",
        ge=0,
        mark=TUNABLE,
    )
    overlap_comm: Boolean | None = key(
        None, "Reduce while the backward pass goes on; null means at stage 3 only."
    )
    compute_grad_norm: Boolean = key(
        True, "Compute the gradients' norm; false needs gradient_clipping 0.", mark=UNBUILT
    )
    load_from_fp32_weights: Boolean = key(
        True, "Take masters from a checkpoint's fp32 copies, not its 16-bit ones.", mark=UNBUILT
    )
    elastic_checkpoint: Boolean = key(
        False,
        "Let another number of ranks load the checkpoint.",
        mark=UNBUILT,
    )
    sub_group_size: Integer = key(
        1_000_000_000,
        "Elements that the optimizer updates at a time. Updates are always made in small blocks.",
        ge=0,
        mark=NO_EFFECT,
    )
    stage3_prefetch_bucket_size: Integer = key(
        50_000_000,
        "The most elements gathered ahead of their use. Nothing is gathered ahead yet.",
        ge=0,
        mark=NO_EFFECT,
    )
    stage3_param_persistence_threshold: Integer = key(
        100_000, "Parameters with fewer elements stay whole on every rank.", ge=0
    )
    stage3_model_persistence_threshold: Integer = key(
        9_223_372_036_854_775_807, "Elements that may stay whole in the entire model.", ge=0
    )
    stage3_max_live_parameters: Integer = key(
        1_000_000_000, "Gathered elements that one rank may hold at a time.", ge=0
    )
    stage3_max_reuse_distance: Integer = key(
        1_000_000_000, "Keep what is used again within this many elements.", ge=0
    )
    stage3_gather_16bit_weights_on_model_save: Boolean = key(
        False,
        "Gather the whole model to save it in 16 bits. engine.state_dict() does so when called.",
        mark=NO_EFFECT,
    )
    stage3_module_granularity_threshold: Integer = key(
        0, "Gather modules of finer grain than this at once; 0 never.", mark=UNBUILT_AT_STAGE_3
    )
    stage3_use_all_reduce_for_fetch_params: Boolean = key(
        False, "Gather weights by summing buffers of zeros.", mark=UNBUILT_AT_STAGE_3
    )
    stage3_allgather_sequential: Boolean = key(
        False, "Gather parameters one at a time.", mark=UNBUILT_AT_STAGE_3
    )
    ignore_unused_parameters: Boolean = key(
        True, "Let parameters without a gradient pass; false is an error at them.", mark=UNBUILT
    )
    legacy_stage1: Literal[False] = key(False, "The first form of stage 1, which is gone.")
    round_robin_gradients: Boolean = key(
        False,
        "Spread gradients over ranks in turns, to copy them in parallel. Even shards do so always.",
        mark=NO_EFFECT,
    )
    parameter_alignment: Boolean = key(
        False, "Start each parameter on a 16-byte border in checkpoints.", mark=UNBUILT
    )
    zero_hpz_partition_size: Integer = key(
        1,
        "Ranks (of a node) that hold a second copy of the weights between them; 1 is off.",
        ge=0,
        mark=Mark(status="not built yet", off=(0,), stages=(3,)),
    )
    zero_quantized_weights: Boolean = key(False, "Gather weights as int8.", mark=UNBUILT_AT_STAGE_3)
    zero_quantized_nontrainable_weights: Boolean = key(
        False, "Hold frozen weights quantised.", mark=UNBUILT_AT_STAGE_3
    )
    zero_quantized_gradients: Boolean = key(
        False, "Reduce gradients as int4, within and between nodes.", mark=UNBUILT_AT_STAGE_3
    )
    zeropp_loco_param: LocoParam | None = key(
        None, "Error feedback for quantised gradients.", mark=UNBUILT_AT_STAGE_3
    )
    mics_shard_size: Integer = key(
        -1,
        "Ranks that shard the weights between them; -1 is all.",
        ge=-1,
        mark=Mark(status="not built yet", off=(0,), stages=(3,)),
    )
    mics_hierarchical_params_gather: Boolean = key(
        False, "Gather those shards in two steps.", mark=UNBUILT_AT_STAGE_3
    )
    memory_efficient_linear: Boolean = key(
        True, "Swap in a linear layer that holds its weight once.", mark=NO_EFFECT
    )
    pipeline_loading_checkpoint: Boolean = key(
        False, "Load rank after rank, to save host memory.", mark=UNBUILT_AT_STAGE_3
    )
    override_module_apply: Boolean = key(
        True, "Gather around functions given to `Module.apply`.", mark=UNBUILT_AT_STAGE_3
    )
    log_trace_cache_warnings: Boolean = key(
        False, "Tell when the recorded order of modules no longer holds.", mark=UNBUILT_AT_STAGE_3
    )
    enable_sanity_checks: Boolean = key(False, "Check more while running.", mark=UNBUILT)
    save_muon_momentum_buffer_in_memory: Boolean = key(
        False, "Keep Muon's momentum off the disk.", mark=UNBUILT_AT_STAGE_3
    )
    offload_param: OffloadParam | None = key(None, "Where weights rest.", mark=Mark(stages=(3,)))
    offload_optimizer: OffloadOptimizer | None = key(
        None, "Where the optimizer's state rests.", mark=Mark(stages=(1, 2, 3))
    )
    zenflow: ZenFlow | None = key(None, "Selective updates.", mark=UNBUILT)
    leaf_module: LeafModule = section(LeafModule, "Modules gathered whole.")
