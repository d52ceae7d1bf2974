"""`zero_optimization`: what is sharded over the ranks, and how it travels."""

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal, TypeAlias

from pydantic import BeforeValidator

from hadal.config.leaf_module import LeafModule
from hadal.config.offload import OffloadOptimizer, OffloadParam
from hadal.config.section import (
    NO_EFFECT,
    STAGE_3,
    TUNABLE,
    TUNABLE_AT_STAGE_3,
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
DivergentRanks: TypeAlias = Boolean | Literal["auto"]
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

    err_beta: Number = key(
        0.8,
        "How much of the average stays at each gradient; the rest is what is lost of it. 0 keeps "
        "all of the last loss alone, 1 nothing.",
        ge=0,
        le=1,
    )
    reset_T: Integer = key(1024, "Updates after which it is forgotten.", ge=1)


class ZeroOptimization(Section):
    """The ZeRO stage, its buckets and limits, and what goes with them."""

    aliases: ClassVar[Mapping[str, str]] = {name: f"stage3_{name}" for name in _UNPREFIXED}
    renamed: ClassVar[Mapping[str, str]] = {
        "stage3_gather_fp16_weights_on_model_save": "stage3_gather_16bit_weights_on_model_save"
    }
    moved: ClassVar[Mapping[str, str]] = {
        "cpu_offload": "zero_optimization.offload_optimizer",
        "cpu_offload_param": "zero_optimization.offload_param",
        "cpu_offload_params": "zero_optimization.offload_param",
    }
    leftovers: ClassVar[Mapping[str, str]] = {
        "cpu_offload_use_pin_memory": "ignored: use offload_param.pin_memory or "
        "offload_optimizer.pin_memory",
    }

    stage: Stage = key(
        0,
        "What is sharded: 0 nothing, 1 optimizer state, 2 gradients too, 3 weights too.",
        mark=TUNABLE,
    )
    contiguous_gradients: Boolean = key(
        True,
        "Lay gradients end to end as they are produced. They always are: false changes nothing.",
        mark=NO_EFFECT,
    )
    reduce_scatter: Boolean = key(
        True,
        "Send each rank its shard of the average only. Gradients always travel so, false too. As "
        "with DeepSpeed, true refuses `prescale_gradients` and `gradient_predivide_factor` at "
        "stages 2 and 3, and false refuses `zero_quantized_gradients`.",
        mark=Mark(status="no effect", tunable=True),
    )
    reduce_bucket_size: Integer = key(
        500_000_000,
        "Elements reduced at a time: parameters share a gradient buffer up to this size, and at "
        "most two such buffers are under way; a larger parameter stands alone.",
        gt=0,
        mark=TUNABLE,
    )
    use_multi_rank_bucket_allreduce: Boolean = key(
        True,
        "Without `reduce_scatter`: one reduction of all shards, or one to each rank. Each bucket "
        "takes one collective, which sends each rank its shard.",
        mark=NO_EFFECT,
    )
    allgather_partitions: Boolean = key(
        True,
        "Stages 1 and 2: gather updated weights in one collective. They always are: it moves the "
        "fewest bytes.",
        mark=NO_EFFECT,
    )
    allgather_bucket_size: Integer = key(
        500_000_000,
        "Stages 1 and 2: elements of updated weights gathered at a time, an even number; 0 sets no "
        "limit. Stage 3: a bucket, which is gathered whole, is no larger than this or "
        "`reduce_bucket_size`, unless one parameter is.",
        ge=0,
        mark=TUNABLE,
    )
    overlap_comm: Boolean | None = key(
        None,
        "Let reductions go on while the backward pass does, and on accelerators (stages 1 and 2) "
        "gathers of new weights while the next forward does; false waits for each where it starts. "
        "null is true at every stage (DeepSpeed: at stage 3), as the numbers are the same; below "
        "stage 2 with managed_gradient_accumulation false there is nothing to overlap: false.",
        mark=TUNABLE,
    )
    grad_hooks: Boolean = key(
        True,
        "Stages 0 and 1: reduce inside the backward pass of the last micro-step; false: behind it. "
        "Higher stages always reduce inside it, as they hold no whole gradient.",
        mark=Mark(stages=(0, 1)),
    )
    compute_grad_norm: Boolean = key(
        True,
        "Compute the gradients' norm. false (stages 1 and 2, with gradient_clipping 0) computes "
        "none: `get_global_grad_norm()` is None; fp16 still looks for overflow.",
    )
    load_from_fp32_weights: Boolean = key(
        True,
        "Take masters from a checkpoint's own masters, where it has them; false: from its weights.",
    )
    elastic_checkpoint: Boolean = key(
        False,
        "Let another number of ranks load the checkpoint. They always can, whatever is given.",
    )
    sub_group_size: Integer = key(
        1_000_000_000,
        "Elements that the optimizer updates at a time, if state is on the disk: with "
        "`offload_optimizer.buffer_count` it bounds the host memory of an update. In memory "
        "updates are always made in small blocks.",
        ge=0,
        mark=TUNABLE,
    )
    stage3_prefetch_bucket_size: Integer = key(
        50_000_000,
        "Elements of weights gathered ahead of their use, from the second step on; the next bucket "
        "always may be, unless this is 0.",
        ge=0,
        mark=TUNABLE_AT_STAGE_3,
    )
    stage3_param_persistence_threshold: Integer = key(
        100_000,
        "Parameters with fewer elements stay whole on every rank.",
        ge=0,
        mark=TUNABLE_AT_STAGE_3,
    )
    stage3_model_persistence_threshold: Integer = key(
        9_223_372_036_854_775_807,
        "Elements that may stay whole in the entire model.",
        ge=0,
        mark=STAGE_3,
    )
    stage3_max_live_parameters: Integer = key(
        1_000_000_000,
        "Gathered elements that one rank may hold at a time.",
        ge=0,
        mark=TUNABLE_AT_STAGE_3,
    )
    stage3_max_reuse_distance: Integer = key(
        1_000_000_000,
        "Keep what is used again within this many elements.",
        ge=0,
        mark=TUNABLE_AT_STAGE_3,
    )
    stage3_gather_16bit_weights_on_model_save: Boolean = key(
        False,
        "Let engine.save_16bit_model gather partitioned weights. Where it is false, that writes "
        "nothing at stage 3 and says so; engine.state_dict() always gathers.",
        mark=STAGE_3,
    )
    stage3_module_granularity_threshold: Integer = key(
        0,
        "A module with fewer parameters' elements than this for each module in it (itself "
        "included) is gathered at once, the outermost such; what holds a stack of repeated blocks "
        "never is. 0: none.",
        ge=0,
        mark=STAGE_3,
    )
    stage3_use_all_reduce_for_fetch_params: Boolean = key(
        False,
        "Gather weights by an all-reduce of buffers that are zero but for a rank's own shard: the "
        "same bits in twice the bytes. They are always gathered.",
        mark=NO_EFFECT,
    )
    stage3_allgather_sequential: Boolean = key(
        False,
        "Gather one bucket at a time, when it is used: as `stage3_prefetch_bucket_size` 0.",
        mark=STAGE_3,
    )
    divergent_ranks: DivergentRanks = key(
        "auto",
        "Whether ranks may take different paths through the model at stage 3 (experts, early "
        'exits). "auto": ranks compare their paths; while these are equal, gathers are planned '
        "ahead and cost no word between ranks; where they differ, each gather is announced to all "
        "ranks, about 0.1 ms each, and nothing is gathered ahead. true: announce from the "
        "beginning. false: a rank that takes another path than the rest is an error on every rank.",
        mark=Mark(stages=(3,), auto_is_a_word=True),
    )
    ignore_unused_parameters: Boolean = key(
        True,
        "Let parameters without a gradient pass: it counts as zero. false: an error at the end of "
        "an update's last backward pass (or in its step, where no pass is known to be the last) "
        "names those that got none on some rank.",
    )
    legacy_stage1: Literal[False] = key(False, "The first form of stage 1, which is gone.")
    round_robin_gradients: Boolean = key(
        False,
        "Spread gradients over ranks in turns, so that all copy to the host in parallel. Every "
        "bucket is cut evenly over all ranks, so they always do.",
        mark=NO_EFFECT,
    )
    parameter_alignment: Boolean = key(
        False,
        "Start each parameter on a 16-byte border. They always do: it asks for what is there.",
    )
    zero_hpz_partition_size: Integer = key(
        1,
        "Stage 3: consecutive ranks (those of a node) that keep a second copy of the weights "
        "between them (ZeRO++ hpZ). A gather over all ranks leaves it behind; until weights change "
        "again (in backward, further micro-steps, recomputation, evaluation) they are gathered "
        "from these ranks alone. Costs the memory of the weights, divided by this number. Divides "
        "the number of ranks. 0 and 1: none.",
        ge=0,
        mark=Mark(stages=(3,), off=(0,)),
    )
    zero_quantized_weights: Boolean = key(
        False,
        "Stage 3: weights travel as int8 to where forward and backward use them (ZeRO++ qwZ), with "
        "a scale for each 256: 0.508 of bf16's bytes. All ranks compute with the same rounded "
        "values; masters, shards, checkpoints, `engine.state_dict()` and `GatheredParameters` "
        "outside of forward stay exact. Parameters that stay whole are not rounded, nor is what "
        "ranks of a second copy (`zero_hpz_partition_size`) give each other once more.",
        mark=STAGE_3,
    )
    zero_quantized_nontrainable_weights: Boolean = key(
        False,
        "Stage 3: weights that are not trained (under adapters) are stored as int8 and travel so: "
        "0.508 of bf16's memory and bytes. They are rounded once, by `initialize` or a load, and "
        "that is what checkpoints save. Parameters that stay whole are not rounded, nor are "
        "weights on a disk.",
        mark=STAGE_3,
    )
    zero_quantized_gradients: Boolean = key(
        False,
        "Stages 2 and 3: gradients travel as int4 (ZeRO++ qgZ), with a scale for each 128: 0.266 "
        "of bf16's bytes. They are added up inside each node first and then between nodes, so that "
        "with R ranks on a node 1/R of that crosses (LOCAL_WORLD_SIZE, what the launcher says; "
        "without it there is one hop). Sums are made in fp32; `communication_data_type` does not "
        "act on them. What is not finite makes its whole block so, and fp16 finds it. Rows of "
        "`sparse_gradients`, and what blocks of `mics_shard_size` tell each other, travel as they "
        "are. Needs `reduce_scatter`.",
        mark=Mark(stages=(2, 3)),
    )
    zeropp_loco_param: LocoParam | None = key(
        None,
        "Error feedback for `zero_quantized_gradients` (LoCo): a moving average of what is lost of "
        "a gradient is added to the next one. Costs the memory of the gradients that a rank sends, "
        "whole. It is forgotten at each checkpoint, saved or loaded, so that a resumed run gives "
        "the same numbers.",
        mark=Mark(stages=(2, 3)),
    )
    mics_shard_size: Integer = key(
        -1,
        "Stage 3: consecutive ranks that share one copy of weights, gradients and optimizer state "
        "(MiCS); other blocks of as many hold copies. Weights are gathered inside the block. "
        "Gradients are reduced inside it, and between the blocks once an update, shard by shard. "
        "Divides the number of ranks; 1 shards nothing. -1 and 0: all ranks.",
        ge=-1,
        mark=Mark(stages=(3,), off=(0,)),
    )
    mics_hierarchical_params_gather: Boolean = key(
        False,
        "Stage 3: gather weights in two hops where ranks that share a copy stand on several nodes: "
        "first between nodes, then inside each, so that every byte comes to a node once. Acts "
        "without `mics_shard_size` too. How many ranks a node has is what the launcher says "
        "(LOCAL_WORLD_SIZE).",
        mark=STAGE_3,
    )
    memory_efficient_linear: Boolean = key(
        True,
        "Let linear layers hold no gathered weight for the backward pass. No layer does: what is "
        "saved of a weight is a view into its bucket, which is freed and gathered again.",
        mark=NO_EFFECT,
    )
    pipeline_loading_checkpoint: Boolean = key(
        False, "Load rank after rank, to save host memory.", mark=UNBUILT_AT_STAGE_3
    )
    override_module_apply: Boolean = key(
        True,
        "At stage 3 and in `zero.Init`, gather what functions given to `Module.apply` touch, and "
        "keep rank 0's changes; false leaves them NaN.",
    )
    log_trace_cache_warnings: Boolean = key(
        False,
        "Tell each time that the recorded order of modules no longer holds, not only the first.",
        mark=STAGE_3,
    )
    enable_sanity_checks: Boolean = key(
        False,
        "Check more, at every stage, and change no number. Before each update the ranks compare "
        "digests of the weights they hold whole and of those they gathered; a weight, or (but for "
        "fp16) a gradient of any micro-step, that is not finite is an error with its name and "
        "ranks; unequally many gradients are a warning. It reads each gather, each gradient and "
        "all weights once more: expect a third more time on a CPU, and on an accelerator a wait "
        "at each.",
    )
    save_muon_momentum_buffer_in_memory: Boolean = key(
        False, "Keep Muon's momentum off the disk.", mark=UNBUILT_AT_STAGE_3
    )
    offload_param: OffloadParam | None = key(
        None, "Where weights are stored between uses.", mark=TUNABLE_AT_STAGE_3
    )
    offload_optimizer: OffloadOptimizer | None = key(
        None, "Where the optimizer's state is stored.", mark=TUNABLE
    )
    zenflow: ZenFlow | None = key(None, "Selective updates.", mark=UNBUILT)
    leaf_module: LeafModule = section(LeafModule, "Modules gathered whole.", mark=STAGE_3)
