"""Expert blocks of transformers models, distributed over ranks.

A block keeps its own code. Its experts module keeps its name and parameters, each rank has a slice
of them, and the ranks exchange tokens. Its router is replaced only if the configuration sets it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from inspect import signature
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hadal.comm.ranks import expert_groups, group_name
from hadal.config.parallelism import ExpertParallel
from hadal.errors import ModelError
from hadal.plugins.moe.experts import (
    counts_of,
    grouped_linear,
    looped_linear,
    mark_expert,
    plan_dispatch,
)
from hadal.plugins.moe.layer import Load, MoE

_SIGMOID_PRESETS = ("deepseek_v3", "minimax_m3")
_MODELS = {
    "mixtral": ("mixtral",),
    "qwen3_moe": ("qwen3_moe", "qwen2_moe"),
    "qwen3_5_moe": ("qwen3_5_moe", "qwen3_5_moe_text"),
    "deepseek_v2": ("deepseek_v2",),
    "deepseek_v3": ("deepseek_v3",),
    "minimax_m3": ("minimax_m3", "minimax_m3_vl", "minimax_m3_vl_text", "minimax_m2"),
}
_ALPHA, _LIMIT = 1.702, 7.0
_CALLED_WITH = 4  # self, tokens, choices, weights


class ExpertPlace(NamedTuple):
    """This rank's experts."""

    size: int
    """Ranks that share the experts."""
    rank: int
    """This rank's index among them."""


class ExpertBlock(NamedTuple):
    """One block of a model."""

    name: str
    router: nn.Module
    experts: nn.Module


@dataclass(frozen=True)
class _Setting:
    """The settings of one block, for its modules."""

    group: str
    num_experts: int
    names: tuple[str, str, str | None]
    """Attributes: gate or gate and up, down, up."""
    activation: str | None
    is_grouped: bool
    weights_inputs: bool


class BlockPlan(NamedTuple):
    """The changes of one block."""

    block: ExpertBlock
    setting: _Setting | None
    """None: its experts are distributed already."""
    rule: RouterRule | None
    """None: its router stays."""


class ExpertsPlan(NamedTuple):
    """The changes of a model's blocks."""

    place: ExpertPlace
    blocks: list[BlockPlan]


class DistributedExperts(nn.Module):
    """A rank's slice of an experts module: a mixin that is added to the module's class."""

    _hadal_setting: _Setting
    load: Load

    def __setstate__(self, state: Any) -> None:
        """Mark the parameters of a copy too: torch copies a parameter without its attributes."""
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        for parameter in self.parameters():
            mark_expert(parameter, self._hadal_setting.group)

    @property
    def expert_group_name(self) -> str:
        """The name of the groups of ranks that share the experts."""
        return self._hadal_setting.group

    @property
    def total_experts(self) -> int:
        """The number of experts on all ranks together."""
        return self._hadal_setting.num_experts

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Return [s, m]: the weighted sum of the experts' outputs for each token of this rank."""
        setting = self._hadal_setting
        kept = top_k_index < setting.num_experts
        dispatch = plan_dispatch(
            top_k_index, kept, setting.num_experts, expert_groups(setting.group).parallel
        )
        self.load.add(counts_of(top_k_index, kept, setting.num_experts), 0)
        weights = torch.where(kept, top_k_weights, 0)
        inputs = weights if setting.weights_inputs else None
        rows = self._computed(dispatch.to_experts(hidden_states, inputs), dispatch.counts)
        outputs = torch.ones_like(weights) if setting.weights_inputs else weights
        return dispatch.to_tokens(rows, outputs).to(hidden_states.dtype)

    def _computed(self, rows: Tensor, counts: Sequence[int]) -> Tensor:
        setting = self._hadal_setting
        linear = grouped_linear if setting.is_grouped else looped_linear
        first, down, up = setting.names
        both = linear(rows, getattr(self, first), counts)
        if up is not None:
            both = torch.cat([both, linear(rows, getattr(self, up), counts)], dim=-1)
        inner = self._activated(both, setting.activation)
        return linear(inner, getattr(self, down), counts)

    def _activated(self, both: Tensor, kind: str | None) -> Tensor:
        if kind is None and hasattr(self, "_apply_gate"):
            found: Tensor = self._apply_gate(both)  # type: ignore[operator]
            return found
        gate, up = both.chunk(2, dim=-1)
        if kind is None:
            return self.act_fn(gate) * up  # type: ignore[operator, no-any-return]
        if kind == "swiglu":
            return F.silu(gate) * up
        if kind == "geglu_tanh":
            return F.gelu(gate, approximate="tanh") * up
        gate, up = gate.clamp(max=_LIMIT), up.clamp(-_LIMIT, _LIMIT)
        if kind == "swiglu_clamped":
            return F.silu(gate) * up
        return gate * torch.sigmoid(_ALPHA * gate) * (up + 1)


class SetRouter(nn.Module):
    """A router by the configuration's rule: a mixin that is added to a router's class."""

    _hadal_rule: RouterRule

    def forward(self, hidden_states: Tensor, *bias: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return logits [s, E], weights [s, k] and experts [s, k]."""
        weight: Tensor = self.weight  # type: ignore[assignment]
        tokens = hidden_states.reshape(-1, hidden_states.shape[-1])
        with torch.autocast(tokens.device.type, enabled=False):
            logits = F.linear(tokens.float(), weight.float())
        found = bias[0] if bias else getattr(self, "e_score_correction_bias", None)
        weights, experts = routed(logits, self._hadal_rule, found)
        return logits, weights, experts


def find_blocks(
    model: nn.Module, section: ExpertParallel, *, may_have_none: bool = False
) -> list[ExpertBlock]:
    """Return the blocks that the section's names, or those of transformers, match.

    Raises:
        ModelError: there are none although one is required, or the model does not belong to the
            preset's family.
    """
    router, experts = section.router_pattern or "gate", section.expert_pattern or "experts"
    first, down, _ = _names(section)
    pattern = section.moe_layer_pattern
    found = []
    for name, module in model.named_modules():
        inner = getattr(module, experts, None)
        outer = getattr(module, router, None)
        is_named = pattern is None or re.search(rf"(?:^|\.)(?:{pattern})$", name)
        if not (is_named and isinstance(inner, nn.Module) and isinstance(outer, nn.Module)):
            continue
        if _is_stack(inner, first) and _is_stack(inner, down):
            found.append(ExpertBlock(name, outer, inner))
    if not found and not may_have_none:
        named = f" and a name that ends with {pattern!r}" if pattern else ""
        raise ModelError(
            f"expert_parallel: no block of {type(model).__name__} has a router ({router!r}) next to"
            f" experts ({experts!r}) with weights {first!r} and {down!r} of three dimensions"
            f"{named}; set router_pattern, expert_pattern, expert_w1 and expert_w2"
        )
    _check_preset(model, section.preset_model)
    return found


def _names(section: ExpertParallel) -> tuple[str, str, str | None]:
    return section.expert_w1 or "gate_up_proj", section.expert_w2 or "down_proj", section.expert_w3


def _is_stack(module: Any, name: str) -> bool:
    value = getattr(module, name, None)
    return isinstance(value, nn.Parameter) and value.dim() == 3


def _check_preset(model: nn.Module, preset: str | None) -> None:
    config = getattr(model, "config", None)
    kind = getattr(config, "model_type", None)
    if preset is not None and kind is not None and kind not in _MODELS[preset]:
        raise ModelError(
            f"expert_parallel.preset_model is {preset!r}, but the model is a {kind!r}; leave the"
            " key out to find blocks by their structure"
        )


def plan_experts(
    model: nn.Module, section: ExpertParallel, place: ExpertPlace, *, may_have_none: bool = False
) -> ExpertsPlan:
    """Plan the distribution of a model's experts; nothing is changed.

    `may_have_none`: the model is a pipeline stage, and the blocks may be on other stages.

    Raises:
        ModelError: blocks or sizes do not fit the section.
    """
    blocks = find_blocks(model, section, may_have_none=may_have_none)
    return ExpertsPlan(
        place,
        [
            BlockPlan(
                block, _setting(block, model, section, place.size), _rule(block, model, section)
            )
            for block in blocks
        ],
    )


def distribute(plan: ExpertsPlan) -> None:
    """Reduce each block to this rank's slice of the experts, marked as expert parameters."""
    for block, setting, rule in plan.blocks:
        if setting is not None:
            _slice_experts(block.experts, setting, plan.place)
        if rule is not None:
            block.router._hadal_rule = rule  # type: ignore[assignment]
            if not isinstance(block.router, SetRouter):
                _add_class(block.router, SetRouter)


def _setting(
    block: ExpertBlock, model: nn.Module, section: ExpertParallel, size: int
) -> _Setting | None:
    experts, names = block.experts, _names(section)
    if isinstance(experts, DistributedExperts):
        return None
    total = len(getattr(experts, names[0]))
    told = _of_config(model, section.num_experts_attr, "num_experts_attr")
    if told is not None and told != total:
        raise ModelError(
            f"expert_parallel.num_experts_attr: the model's config has {told} experts, but"
            f" {block.name} has {total}"
        )
    if total % size:
        raise ModelError(
            f"expert_parallel.autoep_size is {size}, which does not divide the {total}"
            f" experts of {block.name}; choose a divisor"
        )
    # torch's own `forward`, of a module without one, takes any arguments as one parameter.
    if size > 1 and len(signature(type(experts).forward).parameters) < _CALLED_WITH:
        raise ModelError(
            f"expert_parallel: the experts of {block.name} ({type(experts).__name__}) have no"
            " forward(hidden_states, top_k_index, top_k_weights), so the block itself reads the"
            " weights of all experts; move that code into such a forward, or leave the section out"
        )
    for reason in ("has_bias", "is_transposed"):
        if getattr(experts, reason, False):
            raise ModelError(
                f"expert_parallel: the experts of {block.name} ({type(experts).__name__}) have"
                f" {reason} = True, which is not built yet; leave the section out"
            )
    for parameter in experts.parameters():
        if len(parameter) != total:
            raise ModelError(
                f"expert_parallel: a parameter of {block.name} has {len(parameter)} rows, but there"
                f" are {total} experts; a rank's slice is undefined"
            )
    return _Setting(
        group_name(size),
        total,
        names,
        section.expert_activation,
        section.use_grouped_mm,
        section.score_apply == "pre",
    )


def _slice_experts(experts: nn.Module, setting: _Setting, place: ExpertPlace) -> None:
    count = setting.num_experts // place.size
    for parameter in experts.parameters():
        # Keep the same object: an optimizer may hold it already.
        parameter.data = parameter.data[place.rank * count : (place.rank + 1) * count].clone()
        mark_expert(parameter, setting.group)
    if hasattr(experts, "num_experts"):
        experts.num_experts = count  # type: ignore[assignment]
    experts._hadal_setting = setting  # type: ignore[assignment]
    experts.load = Load(setting.num_experts)  # type: ignore[assignment]
    _add_class(experts, DistributedExperts)


def _add_class(module: nn.Module, added: type[nn.Module]) -> None:
    """Add a mixin in front of a module's class, which keeps its name."""
    own = type(module)
    module.__class__ = type(own.__name__, (added, own), {"__module__": own.__module__})


def _of_config(model: nn.Module, attribute: str | None, key: str) -> Any:
    """Return the attribute of the model's config that a key names; None without the key."""
    if attribute is None:
        return None
    config = getattr(model, "config", None)
    found = getattr(config, attribute, None)
    if found is None:
        raise ModelError(
            f"expert_parallel.{key} is {attribute!r}, which the model's config"
            f" ({type(config).__name__}) does not have"
        )
    return found


def _rule(block: ExpertBlock, model: nn.Module, section: ExpertParallel) -> RouterRule | None:
    """Return the rule of a router that a key sets; None if none does."""
    is_default = {
        "score_func": "auto",
        "route_norm": None,
        "route_scale": 1.0,
        "top_k": "auto",
        "routed_scaling_factor": "auto",
        "num_expert_groups": None,
        "num_limited_groups": None,
        "top_k_attr": None,
    }
    if all(getattr(section, name) == value for name, value in is_default.items()):
        return None
    router = block.router
    weight = getattr(router, "weight", None)
    if not isinstance(weight, Tensor) or weight.dim() != 2:
        raise ModelError(
            f"expert_parallel: keys of the router are set, and {block.name} has a"
            f" {type(router).__name__} without a weight of [experts, width]; leave them out"
        )
    return _settings_of(router, model, section)


def _settings_of(router: nn.Module, model: nn.Module, section: ExpertParallel) -> RouterRule:
    """Return the section's settings; missing ones come from the router."""
    kind = getattr(getattr(model, "config", None), "model_type", None)
    is_sigmoid = hasattr(router, "e_score_correction_bias") or kind in ("minimax_m2",)
    if section.preset_model is not None:
        is_sigmoid = section.preset_model in _SIGMOID_PRESETS
    score = section.score_func
    if score == "auto":
        score = "sigmoid" if is_sigmoid else "softmax"
    top_k: Any = section.top_k
    if top_k == "auto":
        top_k = _of_config(model, section.top_k_attr, "top_k_attr") or getattr(router, "top_k", 0)
    normalizes = section.route_norm
    if normalizes is None:
        normalizes = bool(getattr(router, "norm_topk_prob", kind != "deepseek_v2"))
    scale: Any = section.routed_scaling_factor
    if scale == "auto":
        scale = getattr(router, "routed_scaling_factor", section.route_scale)
    groups, limited = section.num_expert_groups, section.num_limited_groups
    if groups is None or limited is None:
        is_greedy = getattr(router, "topk_method", None) == "greedy"
        groups = 1 if is_greedy else getattr(router, "num_group", None) or 1
        limited = 1 if is_greedy else getattr(router, "topk_group", None) or groups
    experts = len(router.weight)  # type: ignore[arg-type]
    if experts % groups or not 1 <= limited <= groups or not 1 <= top_k <= experts:
        raise ModelError(
            f"expert_parallel: {groups} num_expert_groups, of which a token uses {limited}"
            f" (num_limited_groups), and top_k {top_k} do not fit {experts} experts"
        )
    return RouterRule(int(top_k), score, normalizes, float(scale), groups, limited)


def counts_of_experts(model: nn.Module) -> list[int]:
    """Return the number of experts of each layer of experts, on all ranks together."""
    return [
        module.total_experts if isinstance(module, DistributedExperts) else module.num_experts
        for module in model.modules()
        if isinstance(module, MoE | DistributedExperts)
    ]


# ---- the router ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RouterRule:
    """Rule that turns scores into experts and weights."""

    top_k: int
    score: Literal["softmax", "sigmoid"]
    normalizes: bool
    """True: the chosen scores of a token sum to 1."""
    scale: float
    """Factor of the weights."""
    groups: int = 1
    """Equal groups of consecutive experts, E / groups each."""
    limited_groups: int = 1
    """Groups that a token may use."""


def routed(logits: Tensor, rule: RouterRule, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return weights and experts, [s, k] fp32 and int64, of [s, E] logits.

    Args:
        logits: of the router, in any floating dtype.
        rule: the settings.
        bias: [E]: added to the scores only for the choice ("Auxiliary-loss-free load balancing",
            Wang et al., 2024). A group then counts by its two best scores, else by its best one.
    """
    logits = logits.float()
    scores = logits.softmax(dim=-1) if rule.score == "softmax" else logits.sigmoid()
    choice = scores if bias is None else scores + bias
    if rule.groups > 1:
        choice = _within_groups(choice, rule, 1 if bias is None else 2)
    experts = choice.topk(rule.top_k, dim=-1).indices
    weights = scores.gather(1, experts)
    if rule.normalizes:
        weights = weights / weights.sum(dim=-1, keepdim=True).clamp(min=1e-20)
    return weights * rule.scale, experts


def _within_groups(choice: Tensor, rule: RouterRule, best: int) -> Tensor:
    """Exclude experts outside each token's best groups (DeepSeek-V2's group-limited choice)."""
    tokens, experts = choice.shape
    grouped = choice.view(tokens, rule.groups, -1)
    of_group = grouped.topk(min(best, grouped.shape[2]), dim=-1).values.sum(dim=-1)
    mask = torch.zeros_like(of_group, dtype=torch.bool)
    mask.scatter_(1, of_group.topk(rule.limited_groups, dim=-1).indices, True)
    return grouped.masked_fill(~mask.unsqueeze(-1), -math.inf).view(tokens, experts)
