"""`tensor_parallel`, `expert_parallel`, `pipeline` and `hybrid_engine`: models split over ranks."""

import re
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar, Literal, TypeAlias

from annotated_types import Ge
from pydantic import BeforeValidator

from hadal.config.section import (
    NO_EFFECT,
    STAGE_3,
    TUNABLE,
    UNBUILT,
    Mark,
    Section,
    Switched,
    key,
    rule,
    section,
)
from hadal.config.values import Boolean, Integer, Number, Text, Texts, lowered
from hadal.errors import Fault

Shape: TypeAlias = tuple[int | tuple[int, ...], ...]
"""A fused weight: each dimension's number of equal parts, their sizes, or -1 for its own size."""


def shape_fault(shape: Shape | None, dim: int) -> str | None:
    """Return why a weight cannot be cut along dimension `dim` of this shape; None: it can."""
    if shape is None:
        return None
    described = f"shape {list(shape)}"
    if not 0 <= dim < len(shape):
        return f"partition_dim {dim} is no dimension of {described}; expected 0..{len(shape) - 1}"
    if len(shape) != 2:
        return f"{described} has {len(shape)} dimensions; expected the 2 of a linear layer's weight"
    for place, entry in enumerate(shape):
        sizes = entry if isinstance(entry, tuple) else (entry,)
        if isinstance(entry, tuple) and place != dim:
            return f"{described} lists parts in dimension {place}, and dimension {dim} is cut"
        least = 1 if isinstance(entry, tuple) else -1
        if not sizes or not all(isinstance(one, int) and one and one >= least for one in sizes):
            return f"{described} has an entry {entry!r}; expected lengths above 0, or one -1"
    return None


def _nested(value: Any) -> Any:
    """Return lists, and lists in them, as tuples."""
    return tuple(map(_nested, value)) if isinstance(value, list | tuple) else value


class TensorParallelDegree(Section):
    """The degree, given a second time."""

    tp_size: Integer = key(1, "Ranks that share a layer; 1, or the same as autotp_size.", ge=1)
    tp_grain_size: Integer = key(
        1,
        "Slices of layers that are not split between heads are multiples of this many rows; the "
        "last rank has the remainder.",
        ge=1,
    )
    mpu: Any = key(
        None,
        "Object with Megatron's methods; passed by programs only. Its tensor-parallel ranks are "
        "compared with those of autotp_size.",
    )
    tp_group: Any = key(
        None,
        "Process group of the ranks that share a layer; passed by programs only. Expected are "
        "consecutive ranks, as many as autotp_size.",
    )


class SplitLayer(Section):
    """Rule for the parameters that match a pattern."""

    patterns: Texts = key(
        (), "Regular expressions, matched from the start of a parameter's full name."
    )
    partition_type: Annotated[Literal["column", "row", "skip"], BeforeValidator(lowered)] = key(
        "column",
        "column splits outputs, row splits inputs and sums the ranks' results, skip does nothing.",
    )
    shape: Annotated[tuple[Any, ...] | None, BeforeValidator(_nested)] = key(
        None,
        "Parts that are fused in a weight, each of which is cut: [3, -1] for three equal ones, "
        "[[16, 4, 4], -1] for their rows.",
    )
    partition_dim: Integer | None = key(
        None, "Dimension of that shape that is cut; null is 0 for column and 1 for row.", ge=0
    )
    model_types: Texts | None = key(
        None, "Types of models (`model.config.model_type`) that the rule is for; null is all."
    )
    gather_output: Boolean = key(False, "column: every rank gets the whole output.")
    grad_allreduce: Boolean = key(
        False,
        "skip: the gradient is summed over the ranks. For parameters that each rank uses on its "
        "own slice of values, such as norms of single heads.",
    )

    @rule()
    def _cut(self) -> Iterator[Fault]:
        natural = 1 if self.partition_type == "row" else 0
        dim = natural if self.partition_dim is None else self.partition_dim
        fault = shape_fault(self.shape, dim)
        if fault is not None:
            yield Fault("shape", fault)
        for pattern in self.patterns:
            try:
                re.compile(pattern)
            except re.error as error:
                yield Fault("patterns", f"{pattern!r} is no regular expression: {error}")
        if self.gather_output and self.partition_type != "column":
            yield Fault("gather_output", 'only "column" has outputs to gather; remove it')
        if self.grad_allreduce and self.partition_type != "skip":
            yield Fault("grad_allreduce", 'only "skip" leaves a parameter whole; remove it')


class PartitionConfig(Section):
    """Custom rules, which replace the plan of the model."""

    use_default_specs: Boolean = key(True, "Add the rules of preset_model after these.")
    layer_specs: tuple[SplitLayer, ...] = key((), "Rules, in order; the first match applies.")
    tp_size: Integer = key(1, "Overridden by autotp_size.", ge=1, mark=NO_EFFECT)
    embedding_partition_dim: Integer = key(1, "Dimension of embeddings.", mark=NO_EFFECT)
    lm_head_patterns: Texts = key(
        ("lm_head", "embed_out"), "Names of the output layer, which is cut by its vocabulary."
    )
    strict_mode: Boolean = key(False, "Refuse a linear layer that matches no rule.")


class TensorParallel(Section):
    """Cuts linear layers over ranks by the model's plan, a preset or custom rules."""

    switch = "autotp_size"
    off = (0, 1)
    aliases: ClassVar[Mapping[str, str]] = {
        "replace_with_kernel_inject": "kernel_inject",
        "tensor_parallel": "tp",
    }

    autotp_size: Integer = key(
        0,
        "Ranks that share a layer, consecutive ones; 0 and 1 are off. They divide the number of "
        'ranks, and read the same samples. For the autotuner a list, or "all" divisors.',
        ge=0,
        mark=TUNABLE,
    )
    preset_model: (
        Literal["llama", "bloom", "chatglm", "mixtral", "deepseek_v2", "qwen2", "phi3"] | None
    ) = key(None, "Rules made for one family of models, instead of the model's plan.")
    tp_overlap_comm: Boolean = key(
        False,
        "Sum the gradient of a column layer's input while that of its weight is computed. Without "
        "it, layers with the same input share one sum.",
    )
    dtype: Any = key(
        "torch.float16",
        'Dtype of the model ("bf16", "fp16", "fp32" or a torch.dtype). It is compared with the '
        "one in which the model computes, and changes nothing.",
    )
    tp: TensorParallelDegree = section(TensorParallelDegree, "The degree, given a second time.")
    injection_policy_tuple: tuple[Any, ...] | None = key(
        None,
        "Ends of the names of row layers; the other linear layers of blocks are columns. For "
        "models without a plan.",
    )
    keep_module_on_host: Boolean = key(
        False,
        "Keep the slices in host memory. Use `zero_optimization.offload_param`.",
        mark=NO_EFFECT,
    )
    kernel_inject: Boolean = key(False, "Replace modules with inference kernels.", mark=NO_EFFECT)
    vocab_parallel_lm_head: Boolean | None = key(
        None,
        "Split the output layer by vocabulary, and with it an embedding that shares its weight. "
        "true: in training the loss is computed from slices of the logits, so that whole logits "
        "never exist; the output's `logits` are then this rank's slice. null: follow the model's "
        "plan, with whole logits. false: a tied output layer stays whole.",
    )
    vocab_parallel_ce_backend: Literal["torch", "liger"] = key(
        "torch", "Implementation of that loss.", mark=Mark(status="not built yet", only=("liger",))
    )
    sequence_parallel: Boolean = key(
        False,
        "Split activations between the layers (norms, dropout, residuals) by the sequence: ranks "
        "send the same bytes, and each stores only its slice of these activations. Hadal's own; "
        "for decoders of transformers.",
    )
    partition_config: PartitionConfig | None = key(None, "Custom rules.")

    @rule()
    def _degrees(self) -> Iterator[Fault]:
        degree, again = self.autotp_size, self.tp.tp_size
        if again not in (1, degree):
            yield Fault(
                "tp.tp_size", f"{again} is neither 1 nor autotp_size {degree}; leave it out"
            )


class HybridEngine(Switched):
    """Texts generated between updates at stage 3, as reinforcement learning needs them."""

    enabled: Boolean = key(
        False, "Generate as the other keys say. The model must have a `generate`.", mark=STAGE_3
    )
    pin_parameters: Boolean = key(
        True,
        "Gather the whole model once for each call of `generate`, during which ranks may generate"
        " different numbers of tokens; false: gather weights as they are used.",
        mark=STAGE_3,
    )
    inference_tp_size: Integer = key(
        1, "Tensor-parallel ranks during generation.", mark=UNBUILT, ge=1
    )
    max_out_tokens: Integer = key(
        512, "Capacity of the key-value cache, which is the model's own.", mark=NO_EFFECT, gt=0
    )
    release_inference_cache: Boolean = key(
        False, "The model's own cache is freed after each call.", mark=NO_EFFECT
    )
    tp_gather_partition_size: Integer = key(8, "Layers gathered at a time.", mark=NO_EFFECT, ge=1)
    enable_cuda_graph: Boolean = key(
        False,
        "One graph for each position; models of transformers compile with their own cache.",
        mark=NO_EFFECT,
    )


_Auto: TypeAlias = Literal["auto"]
_ATTRIBUTE = "Attribute of the block: "
_SHARED = "Without effect: the model's own code computes experts that process every token. "


class ExpertParallel(Switched):
    """Distributes the experts of transformers models over ranks, without changes to their code.

    Hadal finds the blocks by their structure: a router, and experts whose weights are stacked in
    three-dimensional parameters. No token is dropped. If a key of the router is set, Hadal's router
    replaces the model's; keys that are left out keep the model's own settings.
    """

    enabled: Boolean = key(False, "Distribute experts.")
    autoep_size: Integer = key(
        1,
        "Ranks that share the experts; 1 keeps all of them on each rank. For the autotuner a list, "
        'or "all" divisors of the ranks.',
        ge=1,
        mark=TUNABLE,
    )
    expert_tensor_parallel_size: Integer = key(1, "Reserved; must be 1.", ge=1, le=1)
    preset_model: (
        Literal["mixtral", "qwen3_moe", "qwen3_5_moe", "deepseek_v2", "deepseek_v3", "minimax_m3"]
        | None
    ) = key(None, "Family that the model must be of; null accepts any with such blocks.")
    use_grouped_mm: Boolean = key(True, "Multiply all experts in one grouped product; false loops.")
    disable_triton_grouped_mm: Boolean = key(
        False, "Without effect: only torch's products are used.", mark=NO_EFFECT
    )
    moe_layer_pattern: Text | None = key(
        None, "Regular expression for the end of the names of blocks; null takes all."
    )
    router_pattern: Text | None = key(None, _ATTRIBUTE + "the router; null is gate.")
    expert_pattern: Text | None = key(None, _ATTRIBUTE + "the experts; null is experts.")
    score_func: Literal["auto", "softmax", "sigmoid"] = key("auto", "Score function of the router.")
    score_apply: Literal["auto", "pre", "post"] = key(
        "auto", "Apply scores to the experts' inputs (pre) or outputs (post, auto)."
    )
    route_norm: Boolean | None = key(
        None, "Normalize the chosen scores to sum to 1; null follows the model."
    )
    route_scale: Number = key(
        1.0, "Factor of the weights, if neither routed_scaling_factor nor the model has one."
    )
    top_k: _Auto | Annotated[Integer, Ge(1)] = key("auto", "Experts per token.")
    routed_scaling_factor: _Auto | Number = key(
        "auto", "Factor of the weights; auto follows the model."
    )
    num_expert_groups: Integer | None = key(
        None, "Number of expert groups; it must divide the number of experts.", ge=1
    )
    num_limited_groups: Integer | None = key(None, "Number of groups that a token may use.", ge=1)
    load_balance_coeff: None = key(None, "Must be null.")
    expert_w1: Text | None = key(
        None, "Attribute of the experts: the gate's weight, or gate and up; null is gate_up_proj."
    )
    expert_w2: Text | None = key(
        None, "Attribute of the experts: the down weight; null is down_proj."
    )
    expert_w3: Text | None = key(
        None, "Attribute of the experts: the up weight; null if fused with the gate."
    )
    num_experts_attr: Text | None = key(
        None, "Attribute of the model's config that must have the number of experts."
    )
    top_k_attr: Text | None = key(
        None, "Attribute of the model's config for experts per token, if top_k is auto."
    )
    has_shared_experts: Boolean | None = key(
        None, _SHARED + "Some experts process every token.", mark=NO_EFFECT
    )
    shared_experts_pattern: Text | None = key(
        None, _SHARED + _ATTRIBUTE + "those experts.", mark=NO_EFFECT
    )
    shared_experts_gate_pattern: Text | None = key(
        None, _SHARED + _ATTRIBUTE + "their gate.", mark=NO_EFFECT
    )
    validate_folding_routing: Boolean = key(
        False, "Without effect: no ranks are shared with tensor parallelism.", mark=NO_EFFECT
    )
    combine_impl: Literal["auto", "weighted_sum", "legacy_bmm", "fused_weighted_sum"] = key(
        "auto",
        "Without effect: outputs are summed in fp32, in the order of a token's choices.",
        mark=NO_EFFECT,
    )
    async_split_plan: Boolean = key(
        False, "Without effect: the host waits for the split sizes.", mark=NO_EFFECT
    )
    row_weighting_impl: Literal["auto", "eager", "fused"] = key(
        "auto", "Without effect: rows are weighted by torch.", mark=NO_EFFECT
    )
    gate_up_impl: Literal["separate", "fused"] = key(
        "separate",
        "Without effect: gate and up are one product if the model has them in one weight.",
        mark=NO_EFFECT,
    )
    comm_backend: Literal["comm", "deepep"] = key(
        "comm", "Without effect: the process group exchanges tokens.", mark=NO_EFFECT
    )
    comm_num_sm: Integer = key(
        12, "Without effect, as comm_backend: multiprocessors.", ge=1, mark=NO_EFFECT
    )
    comm_qp_margin: Integer = key(
        4, "Without effect, as comm_backend: queue pairs.", ge=0, mark=NO_EFFECT
    )
    comm_max_tokens_per_rank: Integer = key(
        0, "Without effect, as comm_backend: tokens in a micro-batch.", ge=0, mark=NO_EFFECT
    )
    expert_activation: Literal["swiglu", "geglu_tanh", "swiglu_clamped", "swiglu_oai"] | None = key(
        None, "Activation of an expert; null is the model's."
    )

    @rule()
    def _groups(self) -> Iterator[Fault]:
        groups, limited = self.num_expert_groups, self.num_limited_groups
        if self.enabled and (groups is None) != (limited is None):
            other = "num_expert_groups" if groups is None else "num_limited_groups"
            yield Fault(other, "required together with the other key; add it")
        elif self.enabled and groups is not None and limited is not None and limited > groups:
            yield Fault(
                "num_limited_groups", f"{limited} is more than num_expert_groups {groups}; lower it"
            )


class Pipeline(Section):
    """Options of a model that is split into pipeline stages."""

    auto: Boolean = key(
        False,
        "Split an unmodified causal language model of transformers into `stages`, between blocks.",
    )
    stages: Literal["auto"] | Integer = key(
        "auto",
        "The number of stages, with `auto`. A PipelineModule has its own number: `auto` or the same"
        ' here. For the autotuner a list, or "all" divisors of the ranks.',
        mark=TUNABLE,
    )
    chunks: Integer = key(
        1,
        "Parts of the model on each stage, with `auto`, for the schedule `interleaved`. A"
        " PipelineModule has its own `chunks`.",
        ge=1,
    )
    partition: Text = key(
        "best",
        "How layers are split into stages, with `auto`: `parameters` (or `best`: equally many"
        " elements), `uniform` (equally many layers) or `type:` and a regular expression of"
        " classes. A PipelineModule has its `partition_method`.",
    )
    seed_layers: Boolean = key(
        False, "Not read, as by DeepSpeed: it is an argument of PipelineModule.", mark=NO_EFFECT
    )
    activation_checkpoint_interval: Integer = key(
        0,
        "Layers that are recomputed together in backward, by the pipeline module's function or else"
        " with the options of `activation_checkpointing`; 0 leaves it to the module.",
        ge=0,
    )
    schedule: Literal["1f1b", "gpipe", "interleaved", "zero_bubble"] = key(
        "1f1b",
        "The order of forwards and backwards. `1f1b`: they alternate. `gpipe`: all forwards come"
        " first, which needs the memory of all micro-batches. `interleaved`: each stage has several"
        " parts of the model (`PipelineModule(chunks=)`), so stages wait for each other as many"
        " times less. `zero_bubble`: linear layers compute their weights' gradients while their"
        " stage would wait (ZB-H1), for a third of the waiting; every stage needs the memory of"
        " the first one. Losses and weights are the same.",
    )
    pipe_partitioned: Boolean = key(
        True,
        "Send the first tensor between stages in slices, one for each rank of the topology's axis"
        " `model`; these must all have the same activations.",
    )
    grad_partitioned: Boolean = key(True, "Send the gradient of that tensor in the same way.")
    use_reentrant: Boolean = key(
        True,
        "Recompute by a second backward inside the first. Recomputation here never does, and its"
        " results are the same.",
        mark=NO_EFFECT,
    )
