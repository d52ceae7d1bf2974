"""`expert_parallel`: distributing the experts of a mixture over ranks."""

from typing import Annotated, ClassVar, Literal, TypeAlias

from annotated_types import Ge

from hadal.config.section import AUTO_IS_A_WORD, NO_EFFECT, Mark, Section, key
from hadal.config.values import Boolean, Integer, Number, Text

_Auto: TypeAlias = Literal["auto"]
_ATTRIBUTE = "Attribute of the block: "
_SHARED = "Without effect: the model's own code computes experts that process every token. "
_WORD_WITHOUT_EFFECT = Mark(status="no effect", auto_is_a_word=True)


class ExpertParallel(Section):
    """Distributes the experts of transformers models over ranks, without changes to their code.

    Hadal finds the blocks by their structure: a router, and experts whose weights are stacked in
    three-dimensional parameters. No token is dropped. If a key of the router is set, Hadal's router
    replaces the model's; keys that are left out keep the model's own settings.
    """

    switch: ClassVar[str | None] = "enabled"

    enabled: Boolean = key(False, "Distribute experts.")
    autoep_size: Integer = key(
        1, "Ranks that share the experts; 1 keeps all of them on each rank.", ge=1
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
    score_func: Literal["auto", "softmax", "sigmoid"] = key(
        "auto", "Score function of the router.", mark=AUTO_IS_A_WORD
    )
    score_apply: Literal["auto", "pre", "post"] = key(
        "auto",
        "Apply scores to the experts' inputs (pre) or outputs (post, auto).",
        mark=AUTO_IS_A_WORD,
    )
    route_norm: Boolean | None = key(
        None, "Normalize the chosen scores to sum to 1; null follows the model."
    )
    route_scale: Number = key(
        1.0, "Factor of the weights, if neither routed_scaling_factor nor the model has one."
    )
    top_k: _Auto | Annotated[Integer, Ge(1)] = key(
        "auto", "Experts per token.", mark=AUTO_IS_A_WORD
    )
    routed_scaling_factor: _Auto | Number = key(
        "auto", "Factor of the weights; auto follows the model.", mark=AUTO_IS_A_WORD
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
        mark=_WORD_WITHOUT_EFFECT,
    )
    async_split_plan: Boolean = key(
        False, "Without effect: the host waits for the split sizes.", mark=NO_EFFECT
    )
    row_weighting_impl: Literal["auto", "eager", "fused"] = key(
        "auto", "Without effect: rows are weighted by torch.", mark=_WORD_WITHOUT_EFFECT
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
