"""Rules for cutting layers: presets, plans of transformers, and the configuration's."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

from torch import nn

from hadal.config.parallelism import Shape, SplitLayer, shape_fault
from hadal.errors import ModelError


class PartitionType(Enum):
    """The side of a layer that is cut: outputs, inputs, or nothing."""

    COLUMN = "column"
    ROW = "row"
    SKIP = "skip"


COLUMN, ROW, SKIP = PartitionType.COLUMN, PartitionType.ROW, PartitionType.SKIP


@dataclass(frozen=True)
class LayerRule:
    """A way to cut the parameters that match a pattern.

    Raises:
        ModelError: the shape cannot be cut this way.
    """

    patterns: Sequence[str]
    """Regular expressions, matched from the start of a parameter's full name."""
    partition_type: PartitionType = COLUMN
    shape: Shape | None = None
    """A fused weight: the number or the sizes of its parts (see `subparameter_sizes`)."""
    partition_dim: int | None = None
    """The dimension of that shape; None: the outputs of a column, the inputs of a row."""
    model_types: Sequence[str] | None = None
    gather_output: bool = False
    """column: every rank gets the outputs of all."""
    grad_allreduce: bool = False
    """skip: each rank has a part of the gradient."""
    cuts_vocabulary: bool = False
    """skip: an embedding may be cut by its vocabulary."""
    origin: str = ""
    """The rule's origin: a path in the configuration, a preset, or an entry of a plan."""

    def __post_init__(self) -> None:
        fault = shape_fault(self.shape, self.dim)
        if fault is not None:
            raise ModelError(f"{self.origin or 'a rule'}: {fault}")

    @property
    def dim(self) -> int:
        """The dimension that is cut."""
        if self.partition_dim is not None:
            return self.partition_dim
        return 1 if self.partition_type is ROW else 0

    def matches(self, name: str, model_type: str | None = None) -> bool:
        """Return whether the rule applies to this parameter of this type of model."""
        if self.model_types is not None:
            known = {kind.lower() for kind in self.model_types}
            if model_type is None or model_type.lower() not in known:
                return False
        return any(re.match(pattern, name) for pattern in self.patterns)

    @classmethod
    def of(cls, spec: SplitLayer, origin: str) -> LayerRule:
        """Return the rule of the configuration's `layer_specs` entry."""
        return cls(
            tuple(spec.patterns),
            PartitionType(spec.partition_type),
            spec.shape,
            spec.partition_dim,
            None if spec.model_types is None else tuple(spec.model_types),
            spec.gather_output,
            spec.grad_allreduce,
            origin=origin,
        )


def find_rules(
    rules: Iterable[LayerRule], name: str, model_type: str | None
) -> tuple[LayerRule | None, list[LayerRule]]:
    """Return the first rule that matches a parameter, and the others that contradict it."""
    found = [rule for rule in rules if rule.matches(name, model_type)]
    if not found:
        return None, []
    first = found[0]
    same = replace(first, patterns=(), origin="")
    return first, [one for one in found[1:] if replace(one, patterns=(), origin="") != same]


# ---- presets -------------------------------------------------------------------------------------

_ATTENTION = (
    (r".*\.self_attn\.o_proj\.weight$", ROW, None),
    (r".*\.self_attn\.[qkv]_proj\.weight$", COLUMN, None),
)
_GATED = (
    (r".*\.mlp\.down_proj\.weight$", ROW, None),
    (r".*\.mlp\.(up|gate)_proj\.weight$", COLUMN, None),
)
_FUSED = {"phi3": (3, 2), "chatglm": (3, 2), "bloom": (None, None)}


def _one_matrix(name: str) -> tuple[tuple[str, PartitionType, int | None], ...]:
    """Return the rules of models whose attention calls its layers `query_key_value` and `dense`."""
    attention, feed_forward = _FUSED[name]
    return (
        (r".*\.self_attention\.dense\.weight$", ROW, None),
        (r".*\.self_attention\.query_key_value\.weight$", COLUMN, attention),
        (r".*\.mlp\.dense_4h_to_h\.weight$", ROW, None),
        (r".*\.mlp\.dense_h_to_4h\.weight$", COLUMN, feed_forward),
    )


_PRESETS: dict[str, tuple[tuple[str, PartitionType, int | None], ...]] = {
    "llama": _ATTENTION + _GATED,
    "bloom": _one_matrix("bloom"),
    "chatglm": _one_matrix("chatglm"),
    "mixtral": (
        *_ATTENTION,
        (r".*\.block_sparse_moe\.experts\.\d+\.w2\.weight$", ROW, None),
        (r".*\.block_sparse_moe\.experts\.\d+\.w[13]\.weight$", COLUMN, None),
        (r".*\.block_sparse_moe\.gate\.weight$", SKIP, None),
    ),
    "deepseek_v2": (
        _ATTENTION[0],
        (r".*\.self_attn\.(q_a_proj|kv_a_proj_with_mqa)\.weight$", SKIP, None),
        (r".*\.self_attn\.(q_b_proj|kv_b_proj)\.weight$", COLUMN, None),
        (r".*\.mlp\.experts\.\d+\.down_proj\.weight$", ROW, None),
        (r".*\.mlp\.experts\.\d+\.(up|gate)_proj\.weight$", COLUMN, None),
        (r".*\.mlp\.gate\.weight$", SKIP, None),
        (r".*\.mlp\.shared_experts\.down_proj\.weight$", ROW, None),
        (r".*\.mlp\.shared_experts\.(up|gate)_proj\.weight$", COLUMN, None),
    ),
    "qwen2": _ATTENTION + _GATED,
    "phi3": (
        _ATTENTION[0],
        (r".*\.self_attn\.qkv_proj\.weight$", COLUMN, 3),
        _GATED[0],
        (r".*\.mlp\.gate_up_proj\.weight$", COLUMN, 2),
    ),
}
PRESETS = tuple(_PRESETS)


def preset(name: str) -> tuple[LayerRule, ...]:
    """Return the rules of a family of models."""
    found = []
    for pattern, kind, fused in _PRESETS[name]:
        shape, dim = (None, None) if fused is None else ((fused, -1), 0)
        found.append(LayerRule((pattern,), kind, shape, dim, origin=f"preset {name}"))
    return tuple(found)


# ---- plans of transformers -----------------------------------------------------------------------

_STYLES: dict[str, dict[str, Any]] = {
    "colwise": {"partition_type": COLUMN},
    "rowwise": {"partition_type": ROW},
    "colwise_rep": {"partition_type": COLUMN, "gather_output": True},
    "colwise_gather_output": {"partition_type": COLUMN, "gather_output": True},
    "embedding_rowwise": {"partition_type": SKIP, "cuts_vocabulary": True},
    "replicated_with_grad_allreduce": {"partition_type": SKIP, "grad_allreduce": True},
}
_STACKS = frozenset({"moe_tp_experts"})
STYLES = frozenset(_STYLES)
"""The styles of transformers' plans that have a rule."""


def pattern_of(wildcard: str) -> str:
    """Return the regular expression for the weights of a plan's entry."""
    return rf".*{re.escape(wildcard)}\.weight$".replace(r"\*", ".*")


def rules_of_plan(plan: Mapping[str, str]) -> tuple[LayerRule, ...] | None:
    """Return the rules of a transformers plan; None if it is empty.

    Raises:
        ModelError: a style has no rule. Then nothing is cut, as a column without its row would be
            wrong.
    """
    unknown = sorted({style.lower() for style in plan.values()} - STYLES)
    if unknown:
        raise ModelError(
            f"HuggingFace tp_plan contains unsupported partition style(s): {unknown}. Applying only"
            " the supported entries could shard one half of a column/row pair, so none is. Set"
            " tensor_parallel.preset_model or tensor_parallel.partition_config"
        )
    rules = tuple(
        LayerRule((pattern_of(name),), **_STYLES[style.lower()], origin=f"tp_plan {name!r}")
        for name, style in plan.items()
    )
    return rules or None


def without_experts(plan: Mapping[str, str]) -> dict[str, str]:
    """Return a plan without its modules of stacked experts, which stay whole on each rank."""
    stacks = [name for name, style in plan.items() if style.lower() in _STACKS]
    return {
        name: style
        for name, style in plan.items()
        if not any(name == stack or name.startswith(f"{stack}.") for stack in stacks)
    }


def plan_of(model: Any) -> dict[str, str]:
    """Return a transformers model's plan, merged from its configuration, class and instance."""
    plan: dict[str, str] = {}
    config = getattr(model, "config", None)
    own = (config, "base_model_tp_plan"), (type(model), "_tp_plan"), (model, "_tp_plan")
    for owner, name in own:
        plan |= getattr(owner, name, None) or {}
    return plan


def model_type_of(model: Any) -> str | None:
    """Return the type that a model's configuration names."""
    found = getattr(getattr(model, "config", None), "model_type", None)
    return found if isinstance(found, str) else None


# ---- models without rules ------------------------------------------------------------------------

_ROWS = frozenset(
    {"o_proj", "out_proj", "down_proj", "dense_4h_to_h", "fc2", "fc_out", "wo", "o", "w2"}
)
# A layer of this name is a block's output only in these.
_DENSE, _LEAVES = "dense", frozenset({"attention", "self_attention", "self_attn", "output"})
# A router chooses among experts; every rank computes the whole choice.
_ROUTERS = frozenset({"gate", "router", "shared_expert_gate"})
# Their fused or relative attentions would be cut wrongly.
REFUSED = frozenset(
    {"gpt2", "deberta", "deberta-v2", "flaubert", "fsmt", "led", "longformer", "xlm", "xlnet"}
)


def blocks_of(model: nn.Module, path: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yield the outermost repeated blocks of a model (elements of a ModuleList), with paths."""
    for name, child in model.named_children():
        where = f"{path}.{name}" if path else name
        if isinstance(child, nn.ModuleList):
            yield from ((f"{where}.{number}", block) for number, block in child.named_children())
        else:
            yield from blocks_of(child, where)


def row_layers(model: nn.Module) -> dict[str, list[str]]:
    """Return, for each class of blocks, the names of its row layers: "parent.layer".

    Raises:
        ModelError: this type of model cannot be cut without rules.
    """
    kind = str(getattr(getattr(model, "config", None), "model_type", ""))
    if kind in REFUSED:
        raise ModelError(
            f"tensor_parallel.autotp_size: a model of type {kind!r} cannot be cut without rules;"
            " set tensor_parallel.partition_config with layer_specs for its layers"
        )
    found: dict[str, set[str]] = {}
    for _, block in blocks_of(model):
        names = {
            ".".join(f".{name}".split(".")[-2:])
            for name, layer in block.named_modules()
            if isinstance(layer, nn.Linear) and _is_row(name)
        }
        if names:
            found.setdefault(type(block).__name__, set()).update(names)
    return {kind: sorted(names) for kind, names in found.items()}


def _is_row(name: str) -> bool:
    *above, leaf = name.split(".")
    return leaf in _ROWS or (leaf == _DENSE and bool(above) and above[-1] in _LEAVES)


def guessed_rules(model: nn.Module, rows: Sequence[str] = ()) -> tuple[LayerRule, ...]:
    """Return rules for every linear layer of a model's blocks.

    `rows`: ends of the names of the row layers, if the caller knows them.
    """
    known = tuple(rows)
    if not known:
        known = tuple({name for names in row_layers(model).values() for name in names})
    rules = []
    for path, block in blocks_of(model):
        for name, layer in block.named_modules():
            if not isinstance(layer, nn.Linear):
                continue
            full = f"{path}.{name}"
            way = ROW if _ends(full, known) else COLUMN
            if name.split(".")[-1] in _ROUTERS:
                way = SKIP
            origin = "tensor_parallel.injection_policy_tuple" if rows else "the names of layers"
            pattern = full.replace(".", "\\.") + "\\.weight$"
            rules.append(LayerRule((pattern,), way, origin=origin))
    return tuple(rules)


def _ends(name: str, ends: Sequence[str]) -> bool:
    return any(f".{name}".endswith(end if end.startswith(".") else f".{end}") for end in ends)
