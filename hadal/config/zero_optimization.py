"""`zero_optimization`: the states that are sharded over ranks, and their communication."""

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, TypeAlias

from pydantic import BeforeValidator

from hadal.config.not_built import ZenFlow
from hadal.config.offload import OffloadOptimizer, OffloadParam
from hadal.config.section import (
    NO_EFFECT,
    STAGE_3,
    TUNABLE,
    TUNABLE_AT_STAGE_3,
    UNBUILT,
    UNBUILT_AT_STAGE_3,
    Mark,
    Moved,
    Section,
    key,
    rule,
    section,
)
from hadal.config.values import Boolean, Integer, Number, TextOrTexts, whole
from hadal.errors import Fault

_SPARSE_BLOCKS = [
    "transformers.models.mixtral.modeling_mixtral.MixtralSparseMoeBlock",
    "transformers.models.qwen2_moe.modeling_qwen2_moe.Qwen2MoeSparseMoeBlock",
    "transformers.models.qwen3_moe.modeling_qwen3_moe.Qwen3MoeSparseMoeBlock",
]


class LeafModule(Section):
    """Modules that stage 3 gathers as a whole, ignoring the modules inside them."""

    classes: TextOrTexts = key(_SPARSE_BLOCKS, "Class names, with or without their module.")
    names: TextOrTexts = key([], "Full names of modules in the model.")
    name_suffixes: TextOrTexts = key([], "Suffixes of such names.")


_STAGE = "zero_optimization.stage"
Stage: TypeAlias = Annotated[Literal[0, 1, 2, 3], BeforeValidator(whole)]
DivergentRanks: TypeAlias = Boolean | Literal["auto"]


class LocoParam(Section):
    """Error feedback for quantized gradients."""

    err_beta: Number = key(
        0.8,
        "Weight of the running average at each gradient; 1 minus it is the weight of the new "
        "quantization error. 0 keeps only the last error, 1 keeps none.",
        ge=0,
        le=1,
    )
    reset_T: Integer = key(1024, "Updates after which the average is reset.", ge=1)


class StageGroup(Section):
    """Modules at a lower ZeRO stage than the model's other modules."""

    modules: TextOrTexts = key(
        [],
        'Class names ("MixtralExperts"), or patterns of the end of full names ("mlp.experts.*"; * '
        "is any part between two dots). All parameters below these modules are meant.",
    )
    stage: Stage = key(0, "Their ZeRO stage; at most `zero_optimization.stage`.")


class ZeroOptimization(Section):
    """The ZeRO stage, its bucket sizes and limits, and related options."""

    renamed: ClassVar[Mapping[str, str]] = {
        "stage3_gather_fp16_weights_on_model_save": "stage3_gather_16bit_weights_on_model_save"
    }
    moved: ClassVar[Mapping[str, Moved]] = {
        "cpu_offload": Moved("zero_optimization.offload_optimizer", {"device": "cpu"}),
        "cpu_offload_param": Moved("zero_optimization.offload_param", {"device": "cpu"}),
        "cpu_offload_params": Moved("zero_optimization.offload_param", {"device": "cpu"}),
    }
    leftovers: ClassVar[Mapping[str, str]] = {
        "cpu_offload_use_pin_memory": "ignored: use offload_param.pin_memory or "
        "offload_optimizer.pin_memory"
    }

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """Return a key of stage 3 by its name without `stage3_`, as DeepSpeed names it."""
            full = f"stage3_{name}"
            known = full in type(self).model_fields
            return getattr(self, full) if known else super().__getattr__(name)

    stage: Stage = key(
        0,
        "The states to shard: 0 none, 1 optimizer state, 2 also gradients, 3 also weights.",
        mark=TUNABLE,
    )
    contiguous_gradients: Boolean = key(
        True,
        "Store gradients contiguously as they are produced. They always are: false changes "
        "nothing.",
        mark=NO_EFFECT,
    )
    reduce_scatter: Boolean = key(
        True,
        "Send each rank only its shard of the average. Gradients are always sent so, even if "
        "false. As with DeepSpeed, true refuses `prescale_gradients` and "
        "`gradient_predivide_factor` at stages 2 and 3, and false refuses "
        "`zero_quantized_gradients`.",
        mark=Mark(status="no effect", tunable=True),
    )
    reduce_bucket_size: Integer = key(
        500_000_000,
        "Elements reduced at a time: at most two gradient buffers are in flight, each up to this "
        "size. Neighbouring modules share a buffer up to 1,000,000 elements, or those of the "
        "largest module if it has more; modules whose weights are sharded (stage 3) share none. "
        "A larger parameter has its own buffer.",
        gt=0,
        mark=TUNABLE,
    )
    use_multi_rank_bucket_allreduce: Boolean = key(
        True,
        "Without `reduce_scatter`: one reduction of all shards, or one to each rank. Each "
        "bucket uses one collective, which sends each rank its shard.",
        mark=NO_EFFECT,
    )
    allgather_partitions: Boolean = key(
        True,
        "Stages 1 and 2: gather updated weights in one collective. This is always done, since "
        "it moves the fewest bytes.",
        mark=NO_EFFECT,
    )
    allgather_bucket_size: Integer = key(
        500_000_000,
        "Stages 1 and 2: most elements of updated weights gathered at a time; 0 sets no limit. A "
        "gather is at most a buffer of `reduce_bucket_size`. Stage 3: a bucket, which is gathered "
        "as a whole, is no larger than this or `reduce_bucket_size`, unless a single parameter is.",
        ge=0,
        mark=TUNABLE,
    )
    overlap_comm: Boolean | None = key(
        None,
        "Overlap reductions with the backward pass and, on accelerators (stages 1 and 2), "
        "gathers of new weights with the next forward; false waits for each one at once. "
        "null is true at every stage (DeepSpeed: at stage 3), since the results are the same; "
        "below stage 2 with managed_gradient_accumulation false there is nothing to overlap, "
        "and null is false.",
        mark=TUNABLE,
    )
    grad_hooks: Boolean = key(
        True,
        "Stages 0 and 1: reduce during the backward pass of the last micro-step; false reduces "
        "after it. Higher stages always reduce during backward, because they hold no whole "
        "gradient.",
        mark=Mark(stages=(0, 1)),
    )
    compute_grad_norm: Boolean = key(
        True,
        "Compute the gradient norm. false (stages 1 and 2, with gradient_clipping 0) does not: "
        "`get_global_grad_norm()` is None; fp16 still checks for overflow.",
    )
    detect_data_writes: Boolean = key(
        True,
        "Accelerators: raise an error after a write to a weight through `parameter.data`, which "
        "torch does not count and the next update would undo. The weights are read twice an "
        "update for it; false does not look. CPUs always take such writes over. Hadal's own key.",
    )
    load_from_fp32_weights: Boolean = key(
        True,
        "Load masters from a checkpoint's own masters if it has them; false loads them from its "
        "weights.",
    )
    elastic_checkpoint: Boolean = key(
        False,
        "Allow loading with another number of ranks. That is always possible, also with false.",
    )
    sub_group_size: Integer = key(
        1_000_000_000,
        "Elements that the optimizer updates at a time if state is on the disk: with "
        "`offload_optimizer.buffer_count` it bounds the host memory of an update. State in "
        "memory is always updated in small blocks.",
        ge=0,
        mark=TUNABLE,
    )
    stage3_prefetch_bucket_size: Integer = key(
        50_000_000,
        "Elements of weights gathered ahead of their use, from the second step on. The next "
        "bucket may always be gathered ahead, unless this is 0.",
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
        "Maximum number of elements that stay whole in the entire model.",
        ge=0,
        mark=STAGE_3,
    )
    stage3_max_live_parameters: Integer = key(
        1_000_000_000,
        "Maximum number of gathered elements on one rank. The unit in use is always gathered, and "
        "the next one ahead of its use, even if they have more; 0 gathers nothing ahead.",
        ge=0,
        mark=TUNABLE_AT_STAGE_3,
    )
    stage3_max_reuse_distance: Integer = key(
        1_000_000_000,
        "Do not free weights that are used again within this many elements.",
        ge=0,
        mark=TUNABLE_AT_STAGE_3,
    )
    stage3_gather_16bit_weights_on_model_save: Boolean = key(
        False,
        "Let engine.save_16bit_model gather sharded weights. If false, it saves nothing at "
        "stage 3 and logs that; engine.state_dict() always gathers.",
        mark=STAGE_3,
    )
    stage3_module_granularity_threshold: Integer = key(
        0,
        "Gather a module as a whole if it has fewer parameter elements than this per module in "
        "it (itself included); the outermost such module counts. A module that holds a stack of "
        "repeated blocks is never gathered as a whole. 0: none.",
        ge=0,
        mark=STAGE_3,
    )
    stage3_use_all_reduce_for_fetch_params: Boolean = key(
        False,
        "Gather weights with an all-reduce of buffers that are zero except for a rank's own "
        "shard: the same bits in twice the bytes. Hadal always uses all-gather.",
        mark=NO_EFFECT,
    )
    stage3_allgather_sequential: Boolean = key(
        False,
        "Gather one bucket at a time, when it is used, as with `stage3_prefetch_bucket_size` 0.",
        mark=STAGE_3,
    )
    divergent_ranks: DivergentRanks = key(
        "auto",
        "Whether ranks may take different paths through the model at stage 3 (experts, early "
        'exits). "auto": once their paths are equal, gathers are planned ahead. A rank that skips '
        "some takes part in them all the same; gathers that the plan lacks are announced to all "
        "ranks, about 0.1 ms each. true: announce all of them, and plan none. false: a rank that "
        "leaves the common path raises an error on every rank.",
        mark=STAGE_3,
    )
    ignore_unused_parameters: Boolean = key(
        True,
        "Accept parameters without a gradient, which counts as zero. false: an error at the end "
        "of an update's last backward pass (or in its step, if no pass is known to be the last) "
        "names the parameters that got none on some rank.",
    )
    legacy_stage1: Literal[False] = key(
        False, "The first implementation of stage 1, which is gone."
    )
    round_robin_gradients: Boolean = key(
        False,
        "Distribute gradients over ranks in turn, so that all copy to the host in parallel. "
        "Every bucket is sharded evenly over all ranks, so they always do.",
        mark=NO_EFFECT,
    )
    parameter_alignment: Boolean = key(False, "Align each parameter to 16 bytes. They always are.")
    zero_hpz_partition_size: Integer = key(
        1,
        "Stage 3: number of consecutive ranks (those of a node) that keep a secondary copy of "
        "the weights among them (ZeRO++ hpZ). A gather over all ranks leaves the copy behind; "
        "until the weights change (in backward, further micro-steps, recomputation, evaluation) "
        "they are gathered from these ranks only. Costs the memory of the weights divided by "
        "this number. Must divide the number of ranks. 0 and 1: none.",
        ge=0,
        mark=Mark(stages=(3,), off=(0,)),
    )
    zero_quantized_weights: Boolean = key(
        False,
        "Stage 3: send weights as int8 for forward and backward (ZeRO++ qwZ), with one scale "
        "per 256 elements: 0.508 of bf16's bytes. All ranks compute with the same rounded "
        "values; masters, shards, checkpoints, `engine.state_dict()` and `GatheredParameters` "
        "outside forward stay exact. Parameters that stay whole are not rounded, and the ranks "
        "of a secondary copy (`zero_hpz_partition_size`) do not round again.",
        mark=STAGE_3,
    )
    zero_quantized_nontrainable_weights: Boolean = key(
        False,
        "Stage 3: store frozen weights (under adapters) as int8 and send them so: 0.508 of "
        "bf16's memory and bytes. They are rounded once, by `initialize` or a load, and "
        "checkpoints save the rounded values. Parameters that stay whole are not rounded, nor "
        "are weights on a disk.",
        mark=STAGE_3,
    )
    zero_quantized_gradients: Boolean = key(
        False,
        "Stages 2 and 3: send gradients as int4 (ZeRO++ qgZ), with one scale per 128 elements: "
        "0.266 of bf16's bytes. They are summed inside each node first and then between nodes, "
        "so that with R ranks on a node 1/R of that crosses nodes (the launcher sets R in "
        "LOCAL_WORLD_SIZE; without it there is one hop). Sums are computed in fp32; "
        "`communication_data_type` does not apply. A non-finite value makes its whole block "
        "non-finite, and fp16 detects it. Rows of `sparse_gradients`, and exchanges between "
        "blocks of `mics_shard_size`, are sent unquantized. Requires `reduce_scatter`.",
        mark=Mark(stages=(2, 3)),
    )
    zeropp_loco_param: LocoParam | None = key(
        None,
        "Error feedback for `zero_quantized_gradients` (LoCo): a running average of the "
        "quantization error is added to the next gradient. Costs as much memory as all the "
        "gradients that a rank sends. It is reset at each checkpoint, saved or loaded, so that "
        "a resumed run computes the same numbers.",
        mark=Mark(stages=(2, 3)),
    )
    mics_shard_size: Integer = key(
        -1,
        "Stage 3: number of consecutive ranks that share one copy of weights, gradients and "
        "optimizer state (MiCS); other blocks of as many ranks hold replicas. Weights are "
        "gathered inside the block. Gradients are reduced inside it, and between the blocks "
        "once per update, shard by shard. Must divide the number of ranks; 1 shards nothing. -1 "
        "and 0: all ranks.",
        ge=-1,
        mark=Mark(stages=(3,), off=(0,)),
    )
    mics_hierarchical_params_gather: Boolean = key(
        False,
        "Stage 3: gather weights in two hops if the ranks that share a copy are on several "
        "nodes: first between nodes, then inside each, so that every byte reaches a node once. "
        "Applies without `mics_shard_size` too. The launcher sets the number of ranks per node "
        "in LOCAL_WORLD_SIZE.",
        mark=STAGE_3,
    )
    memory_efficient_linear: Boolean = key(
        True,
        "Let linear layers keep no gathered weight for the backward pass. No layer keeps one: a "
        "saved weight is a view into its bucket, which is freed and gathered again.",
        mark=NO_EFFECT,
    )
    pipeline_loading_checkpoint: Boolean = key(
        False,
        "Load one rank after another, to save host memory. Each rank reads its slices into their "
        "place, which needs no memory to save.",
        mark=NO_EFFECT,
    )
    override_module_apply: Boolean = key(
        True,
        "At stage 3 and in `zero.Init`, gather the parameters that functions passed to "
        "`Module.apply` touch, and keep rank 0's changes; false leaves them sharded, so that"
        " reading them is an error.",
    )
    log_trace_cache_warnings: Boolean = key(
        False,
        "Log each time that the recorded order of modules no longer holds, not only the first.",
        mark=STAGE_3,
    )
    enable_sanity_checks: Boolean = key(
        False,
        "Enable additional checks, at every stage, without changing any result. Before each "
        "update the ranks compare digests of the weights they hold whole and of those they "
        "gathered; a non-finite weight or (except with fp16) gradient of any micro-step raises "
        "an error with its name and ranks; unequal numbers of gradients are a warning. Each "
        "gather, each gradient and all weights are read once more: expect a third more time on "
        "a CPU, and a synchronization at each on an accelerator.",
    )
    save_muon_momentum_buffer_in_memory: Boolean = key(
        False, "Keep Muon's momentum off the disk.", mark=UNBUILT_AT_STAGE_3
    )
    offload_param: OffloadParam | None = key(
        None, "Tier that stores the weights.", mark=TUNABLE_AT_STAGE_3
    )
    offload_optimizer: OffloadOptimizer | None = key(
        None, "Tier that stores the optimizer's state.", mark=TUNABLE
    )
    zenflow: ZenFlow | None = key(None, "Selective updates.", mark=UNBUILT)
    groups: tuple[StageGroup, ...] = key(
        (),
        "Modules with a ZeRO stage of their own; the first group that matches applies. "
        '[{"modules": "mlp.experts.*", "stage": 1}] does not shard the weights and gradients of '
        "experts, so that they are never gathered. Hadal's own.",
    )
    leaf_module: LeafModule = section(
        LeafModule, "Modules that are gathered as a whole.", mark=STAGE_3
    )

    @property
    def offloads_optimizer(self) -> bool:
        """True if the optimizer's state is offloaded."""
        return self.offload_optimizer is not None and self.offload_optimizer.device != "none"

    @rule("stage", "offload_optimizer.ratio")
    def _partial_offload(self) -> Iterator[Fault]:
        offload = self.offload_optimizer
        if offload is not None and offload.ratio < 1 and self.stage != 3:
            yield Fault(
                "offload_optimizer.ratio",
                f"{offload.ratio} needs {_STAGE} 3, got {self.stage}; set 1 or raise the stage",
            )

    @rule("stage", "offload_optimizer.device")
    def _disk_at_stage_0(self) -> Iterator[Fault]:
        offload = self.offload_optimizer
        if offload is not None and offload.device == "nvme" and self.stage == 0:
            yield Fault(
                "offload_optimizer.device",
                f'"nvme" needs {_STAGE} 1, 2 or 3: at 0 every rank would write all of the state;'
                ' raise the stage, or set "cpu"',
            )

    @rule("stage", "offload_param", "offload_optimizer")
    def _disk_without_path(self) -> Iterator[Fault]:
        sections = (
            ("offload_param", self.offload_param, self.stage == 3),
            ("offload_optimizer", self.offload_optimizer, self.stage > 0),
        )
        for name, offload, acts in sections:
            if acts and offload and offload.device == "nvme" and not offload.nvme_path:
                yield Fault(f"{name}.nvme_path", 'required for device "nvme"; add it')

    @rule("stage", "reduce_scatter", "zero_quantized_gradients")
    def _quantized_gradients(self) -> Iterator[Fault]:
        if self.stage >= 2 and self.zero_quantized_gradients and not self.reduce_scatter:
            yield Fault(
                "zero_quantized_gradients", "needs zero_optimization.reduce_scatter; enable that"
            )

    @rule("stage", "zero_quantized_gradients", "zeropp_loco_param")
    def _feedback(self) -> Iterator[Fault]:
        is_asked = self.stage >= 2 and self.zeropp_loco_param is not None
        if is_asked and not self.zero_quantized_gradients:
            yield Fault(
                "zeropp_loco_param",
                "needs zero_optimization.zero_quantized_gradients: otherwise there is no error to"
                " feed back; enable it or remove this",
            )

    @rule("offload_optimizer.device", "zenflow")
    def _zenflow_without_offload(self) -> Iterator[Fault]:
        if self.zenflow is not None and not self.offloads_optimizer:
            yield Fault(
                "zenflow",
                'needs zero_optimization.offload_optimizer.device "cpu"; add it or leave zenflow'
                " out",
            )

    @rule("stage", "zero_hpz_partition_size", "mics_shard_size")
    def _secondary_copy(self) -> Iterator[Fault]:
        second, block = self.zero_hpz_partition_size, self.mics_shard_size
        if self.stage != 3 or second <= 1 or block <= 0:
            return
        if second >= block:
            yield Fault(
                "zero_hpz_partition_size",
                f"{second} saves nothing when weights are gathered over the {block} ranks of"
                f" zero_optimization.mics_shard_size; remove it, or use a smaller divisor of"
                f" {block}",
            )
        elif block % second:
            yield Fault(
                "zero_hpz_partition_size",
                f"{second} does not divide zero_optimization.mics_shard_size, {block}; use a"
                " divisor or remove one of them",
            )

    @rule("stage", "groups", "mics_shard_size")
    def _stages_of_groups(self) -> Iterator[Fault]:
        for number, group in enumerate(self.groups):
            path = f"groups[{number}]"
            if group.stage > self.stage:
                yield Fault(
                    f"{path}.stage",
                    f"{group.stage} is above {_STAGE}, {self.stage}: groups lower the stage of some"
                    f" modules; raise {_STAGE}, and lower it for the other modules",
                )
            if not group.modules:
                message = "names no modules; set patterns, or remove the group"
                yield Fault(f"{path}.modules", message)
            if self.stage == 3 and group.stage < 2 and self.mics_shard_size > 0:
                yield Fault(
                    f"{path}.stage",
                    f"{group.stage} is not built yet with zero_optimization.mics_shard_size; use 2,"
                    " or remove zero_optimization.mics_shard_size",
                )

    def undivided(self, ranks: int) -> Iterator[Fault]:
        """Yield a fault for each block size that does not divide the ranks that share states."""
        for name in ("zero_hpz_partition_size", "mics_shard_size"):
            size = getattr(self, name)
            if self.stage == 3 and size > 1 and ranks % size:
                yield Fault(
                    f"zero_optimization.{name}",
                    f"{size} does not divide the {ranks} ranks that share the weights; use a"
                    " divisor or remove it",
                )


ZeroOptimization.aliases = {
    name.removeprefix("stage3_"): name
    for name in ZeroOptimization.model_fields
    if name.startswith("stage3_")
}
