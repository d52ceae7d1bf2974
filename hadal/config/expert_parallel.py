"""`expert_parallel`: spreading the experts of a mixture over ranks."""

from typing import Annotated, ClassVar, Literal, TypeAlias

from annotated_types import Ge

from hadal.config.section import AUTO_IS_A_WORD, UNBUILT, Section, key
from hadal.config.values import Boolean, Integer, Number, Text

_Auto: TypeAlias = Literal["auto"]
_ATTRIBUTE = "Attribute of the block: "


class ExpertParallel(Section):
    """Finds blocks of experts in the model and spreads the experts over ranks."""

    switch: ClassVar[str | None] = "enabled"

    enabled: Boolean = key(False, "Spread experts.", mark=UNBUILT)
    autoep_size: Integer = key(1, "Ranks that share the experts; 1 keeps all on each.", ge=1)
    expert_tensor_parallel_size: Integer = key(1, "Reserved; must be 1.", ge=1, le=1)
    preset_model: (
        Literal["mixtral", "qwen3_moe", "qwen3_5_moe", "deepseek_v2", "deepseek_v3", "minimax_m3"]
        | None
    ) = key(None, "Names made for one family of models.")
    use_grouped_mm: Boolean = key(True, "Multiply all experts at once; false loops.")
    disable_triton_grouped_mm: Boolean = key(False, "Multiply by torch only.")
    moe_layer_pattern: Text | None = key(None, "Regular expression for names of blocks.")
    router_pattern: Text | None = key(None, _ATTRIBUTE + "the router.")
    expert_pattern: Text | None = key(None, _ATTRIBUTE + "the experts.")
    score_func: Literal["auto", "softmax", "sigmoid"] = key(
        "auto", "How the router scores.", mark=AUTO_IS_A_WORD
    )
    score_apply: Literal["auto", "pre", "post"] = key(
        "auto", "Whether scores weigh what goes in or what comes out.", mark=AUTO_IS_A_WORD
    )
    route_norm: Boolean | None = key(None, "Scale the chosen scores to 1; null asks the model.")
    route_scale: Number = key(1.0, "Multiplies the scores.")
    top_k: _Auto | Annotated[Integer, Ge(1)] = key(
        "auto", "Experts per token.", mark=AUTO_IS_A_WORD
    )
    routed_scaling_factor: _Auto | Number = key(
        "auto", "Multiplies the experts' output.", mark=AUTO_IS_A_WORD
    )
    num_expert_groups: Integer | None = key(None, "Groups of experts; divides them.", ge=1)
    num_limited_groups: Integer | None = key(None, "Groups that a token may use.", ge=1)
    load_balance_coeff: None = key(None, "Must be null.")
    expert_w1: Text | None = key(None, _ATTRIBUTE + "the gate's weight.")
    expert_w2: Text | None = key(None, _ATTRIBUTE + "the down weight.")
    expert_w3: Text | None = key(None, _ATTRIBUTE + "the up weight; null if fused with the gate.")
    num_experts_attr: Text | None = key(None, "Key of the model's config: number of experts.")
    top_k_attr: Text | None = key(None, "Key of the model's config: experts per token.")
    has_shared_experts: Boolean | None = key(None, "Some experts see every token.")
    shared_experts_pattern: Text | None = key(None, _ATTRIBUTE + "those experts.")
    shared_experts_gate_pattern: Text | None = key(None, _ATTRIBUTE + "their gate.")
    validate_folding_routing: Boolean = key(False, "Check more while running.")
    combine_impl: Literal["auto", "weighted_sum", "legacy_bmm", "fused_weighted_sum"] = key(
        "auto", "How outputs are put together.", mark=AUTO_IS_A_WORD
    )
    async_split_plan: Boolean = key(False, "Copy the split's lengths beside other work.")
    row_weighting_impl: Literal["auto", "eager", "fused"] = key(
        "auto", "How rows are weighed.", mark=AUTO_IS_A_WORD
    )
    gate_up_impl: Literal["separate", "fused"] = key("separate", "Gate and up as one product.")
    comm_backend: Literal["comm", "deepep"] = key("comm", "Library that carries tokens.")
    comm_num_sm: Integer = key(12, "Multiprocessors given to that library.", ge=1)
    comm_qp_margin: Integer = key(4, "Extra queue pairs for it.", ge=0)
    comm_max_tokens_per_rank: Integer = key(0, "Tokens of a micro-batch; deepep needs it.", ge=0)
    expert_activation: Literal["swiglu", "geglu_tanh", "swiglu_clamped", "swiglu_oai"] | None = key(
        None, "Form of an expert; null is the preset's."
    )
