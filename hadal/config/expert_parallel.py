"""`expert_parallel`: distributing the experts of a mixture over ranks.

Tests: tests/config/test_every_key.py
"""

from typing import Annotated, ClassVar, Literal, TypeAlias

from annotated_types import Ge

from hadal.config.section import AUTO_IS_A_WORD, UNBUILT, Section, key
from hadal.config.values import Boolean, Integer, Number, Text

_Auto: TypeAlias = Literal["auto"]
_ATTRIBUTE = "Attribute of the block: "


class ExpertParallel(Section):
    """Finds expert blocks in the model and distributes the experts over ranks."""

    switch: ClassVar[str | None] = "enabled"

    enabled: Boolean = key(False, "Distribute experts.", mark=UNBUILT)
    autoep_size: Integer = key(
        1, "Ranks that share the experts; 1 keeps all of them on each rank.", ge=1
    )
    expert_tensor_parallel_size: Integer = key(1, "Reserved; must be 1.", ge=1, le=1)
    preset_model: (
        Literal["mixtral", "qwen3_moe", "qwen3_5_moe", "deepseek_v2", "deepseek_v3", "minimax_m3"]
        | None
    ) = key(None, "Preset of names for one family of models.")
    use_grouped_mm: Boolean = key(True, "Multiply all experts in one grouped product; false loops.")
    disable_triton_grouped_mm: Boolean = key(False, "Use only torch's products.")
    moe_layer_pattern: Text | None = key(None, "Regular expression for the names of blocks.")
    router_pattern: Text | None = key(None, _ATTRIBUTE + "the router.")
    expert_pattern: Text | None = key(None, _ATTRIBUTE + "the experts.")
    score_func: Literal["auto", "softmax", "sigmoid"] = key(
        "auto", "Score function of the router.", mark=AUTO_IS_A_WORD
    )
    score_apply: Literal["auto", "pre", "post"] = key(
        "auto", "Apply scores to the experts' inputs (pre) or outputs (post).", mark=AUTO_IS_A_WORD
    )
    route_norm: Boolean | None = key(
        None, "Normalize the chosen scores to sum to 1; null follows the model."
    )
    route_scale: Number = key(1.0, "Factor applied to the scores.")
    top_k: _Auto | Annotated[Integer, Ge(1)] = key(
        "auto", "Experts per token.", mark=AUTO_IS_A_WORD
    )
    routed_scaling_factor: _Auto | Number = key(
        "auto", "Factor applied to the experts' output.", mark=AUTO_IS_A_WORD
    )
    num_expert_groups: Integer | None = key(
        None, "Number of expert groups; it must divide the number of experts.", ge=1
    )
    num_limited_groups: Integer | None = key(None, "Number of groups that a token may use.", ge=1)
    load_balance_coeff: None = key(None, "Must be null.")
    expert_w1: Text | None = key(None, _ATTRIBUTE + "the gate's weight.")
    expert_w2: Text | None = key(None, _ATTRIBUTE + "the down weight.")
    expert_w3: Text | None = key(None, _ATTRIBUTE + "the up weight; null if fused with the gate.")
    num_experts_attr: Text | None = key(
        None, "Key of the model's config for the number of experts."
    )
    top_k_attr: Text | None = key(None, "Key of the model's config for experts per token.")
    has_shared_experts: Boolean | None = key(None, "Some experts process every token.")
    shared_experts_pattern: Text | None = key(None, _ATTRIBUTE + "those experts.")
    shared_experts_gate_pattern: Text | None = key(None, _ATTRIBUTE + "their gate.")
    validate_folding_routing: Boolean = key(False, "Enable additional runtime checks.")
    combine_impl: Literal["auto", "weighted_sum", "legacy_bmm", "fused_weighted_sum"] = key(
        "auto", "Implementation that combines the experts' outputs.", mark=AUTO_IS_A_WORD
    )
    async_split_plan: Boolean = key(False, "Copy the split sizes asynchronously.")
    row_weighting_impl: Literal["auto", "eager", "fused"] = key(
        "auto", "Implementation that weights rows.", mark=AUTO_IS_A_WORD
    )
    gate_up_impl: Literal["separate", "fused"] = key(
        "separate", "Compute gate and up as one product (fused) or two."
    )
    comm_backend: Literal["comm", "deepep"] = key("comm", "Library that exchanges tokens.")
    comm_num_sm: Integer = key(12, "Multiprocessors given to that library.", ge=1)
    comm_qp_margin: Integer = key(4, "Additional queue pairs for it.", ge=0)
    comm_max_tokens_per_rank: Integer = key(0, "Tokens in a micro-batch; required by deepep.", ge=0)
    expert_activation: Literal["swiglu", "geglu_tanh", "swiglu_clamped", "swiglu_oai"] | None = key(
        None, "Activation of an expert; null is the preset's."
    )
