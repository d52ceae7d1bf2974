"""The plan of a model's cuts, checked before anything changes."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from hadal.config.parallelism import TensorParallel
from hadal.errors import ModelError, few
from hadal.plugins.tensor_parallel.layers import (
    HEAD_NAMES,
    WeightCut,
    head_size_of,
    is_attention,
    key_heads_of,
    shard_sizes,
    subparameter_sizes,
    text_config_of,
)
from hadal.plugins.tensor_parallel.rules import (
    COLUMN,
    PRESETS,
    ROW,
    SKIP,
    LayerRule,
    blocks_of,
    find_rules,
    guessed_rules,
    model_type_of,
    plan_of,
    preset,
    rules_of_plan,
    without_experts,
)

_log = logging.getLogger(__name__)

_PATH = "tensor_parallel"
# Classes whose own forward computes a linear layer.
_PLAIN = frozenset({"FalconLinear"})
# Norms of single heads: each rank applies them to its own heads.
_HEAD_NORM = re.compile(r"(q|k|v|query|key|value)_?(layer)?_?norm")


@dataclass(frozen=True, slots=True)
class CutLayer:
    """A layer that is cut."""

    name: str
    layer: nn.Module
    rule: LayerRule
    cut: WeightCut
    gather_output: bool = False

    @property
    def is_row(self) -> bool:
        """True if inputs are cut."""
        return isinstance(self.layer, nn.Linear) and self.rule.partition_type is ROW

    @property
    def parent(self) -> str:
        """The full name of the module around the layer."""
        return self.name.rpartition(".")[0]


@dataclass(slots=True)
class CutPlan:
    """All changes to a model that is cut over ranks."""

    size: int
    heads: int | None
    """Key-value heads; None if their number is unknown."""
    layers: list[CutLayer] = field(default_factory=list)
    embeddings: list[CutLayer] = field(default_factory=list)
    """Embeddings that are cut by their vocabulary."""
    biases: list[CutLayer] = field(default_factory=list)
    """Embeddings with an entry for each head (position biases)."""
    summed: dict[str, nn.Parameter] = field(default_factory=dict)
    """Whole parameters whose gradient is partial on each rank, by full name."""
    head: str | None = None
    """The output layer, if it is cut by its vocabulary."""

    def among(self, model: nn.Module) -> CutPlan:
        """Return the part of the plan for a stage's modules, which keep their names."""
        modules, parameters = set(model.modules()), set(model.parameters())
        kept = {
            kind: [one for one in getattr(self, kind) if one.layer in modules]
            for kind in ("layers", "embeddings", "biases")
        }
        summed = {name: one for name, one in self.summed.items() if one in parameters}
        return CutPlan(self.size, self.heads, summed=summed, head=self.head, **kept)

    def parents(self) -> dict[str, list[CutLayer]]:
        """Return the modules around cut layers, and these layers."""
        found: dict[str, list[CutLayer]] = {}
        for one in self.layers:
            found.setdefault(one.parent, []).append(one)
        return found


def rules_for(model: nn.Module, section: TensorParallel) -> tuple[LayerRule, ...]:
    """Return the rules for a model: the configuration's, its own plan's, or heuristic ones.

    Raises:
        ModelError: none can be used.
    """
    custom = section.partition_config
    if custom is not None or section.preset_model is not None:
        specs = () if custom is None else custom.layer_specs
        origin = f"{_PATH}.partition_config.layer_specs"
        rules = [LayerRule.of(spec, f"{origin}[{n}]") for n, spec in enumerate(specs)]
        if section.preset_model is not None and (custom is None or custom.use_default_specs):
            rules += preset(section.preset_model)
        return tuple(rules)
    if section.injection_policy_tuple is not None:
        return guessed_rules(model, section.injection_policy_tuple)
    try:
        planned = rules_of_plan(without_experts(plan_of(model)))
    except ModelError:
        kind = model_type_of(model)
        if kind not in PRESETS:
            raise
        _log.info("tensor parallel: the plan of %s has other styles; its preset is used", kind)
        return preset(kind)
    return planned if planned is not None else guessed_rules(model)


def plan_cuts(model: nn.Module, section: TensorParallel, size: int) -> CutPlan:
    """Return the cuts over `size` ranks, without changing anything.

    Raises:
        ModelError: the rules, the layers and the ranks do not fit each other.
    """
    return _Planner(model, section, size).plan()


class _Planner:
    def __init__(self, model: nn.Module, section: TensorParallel, size: int) -> None:
        self._model, self._section = model, section
        self._rules = rules_for(model, section)
        self._type = model_type_of(model)
        self._config = text_config_of(model)
        self._plan = CutPlan(size, key_heads_of(model))
        self._modules = dict(model.named_modules())
        self._blocks = {path for path, _ in blocks_of(model)}
        self._ambiguous: list[str] = []
        custom = section.partition_config
        self._head_names = HEAD_NAMES if custom is None else tuple(custom.lm_head_patterns)
        self._is_strict = custom is not None and custom.strict_mode

    def plan(self) -> CutPlan:
        tables = {
            id(one.weight): (name, one)
            for name, one in self._modules.items()
            if isinstance(one, nn.Embedding) and _is_plain_table(one)
        }
        for name, layer in self._modules.items():
            if isinstance(layer, nn.Linear):
                self._look_at_linear(name, layer, tables)
            elif "weight" in layer._parameters and layer._parameters["weight"] is not None:
                self._look_at_other(name, layer)
        if self._ambiguous:
            _log.warning(
                "tensor_parallel: several rules match %s; the first is used", few(self._ambiguous)
            )
        if not self._plan.layers and not self._plan.embeddings:
            raise ModelError(
                f"{_PATH}.autotp_size: no rule cuts a layer of {type(self._model).__name__};"
                f" set {_PATH}.partition_config.layer_specs whose patterns match from the start of"
                " its parameters' full names"
            )
        check_pairs(self._plan.layers, self._blocks)
        self._find_head_norms()
        self._find_position_biases()
        self._check_dropout()
        return self._plan

    # ---- linear layers ---------------------------------------------------------------------------

    def _look_at_linear(
        self, name: str, layer: nn.Linear, tables: dict[int, tuple[str, nn.Embedding]]
    ) -> None:
        rule = self._rule_of(name)
        is_head = name.rpartition(".")[2] in self._head_names
        tied = tables.get(id(layer.weight))
        wish = self._section.vocab_parallel_lm_head
        if is_head and wish and (rule is None or rule.partition_type is not COLUMN):
            rule = LayerRule((), COLUMN, origin=f"{_PATH}.vocab_parallel_lm_head")
        if rule is None:
            if self._is_strict and not is_head:
                raise ModelError(
                    f"{_PATH}.partition_config.strict_mode: no rule matches {name}.weight; add an"
                    ' entry to layer_specs ("partition_type": "skip" leaves it whole)'
                )
            return
        if rule.partition_type is SKIP:
            self._note_skip(name, layer, rule)
            return
        self._expect_plain(name, layer, rule)
        if is_head and self._is_tied(layer) and (tied is None or wish is False):
            return  # its embedding stays whole, and so does the tied head
        cut = self._cut_of(name, layer, rule)
        if is_head and rule.partition_type is COLUMN:
            self._plan.head = name
            if tied is not None:
                self._plan.embeddings.append(CutLayer(*tied, rule, cut))
        gathers = rule.gather_output or is_head
        self._plan.layers.append(CutLayer(name, layer, rule, cut, gathers))

    def _is_tied(self, layer: nn.Linear) -> bool:
        return any(
            isinstance(one, nn.Embedding) and one.weight is layer.weight
            for one in self._modules.values()
        )

    def _expect_plain(self, name: str, layer: nn.Module, rule: LayerRule) -> None:
        kind = type(layer)
        if kind.forward is not nn.Linear.forward and kind.__name__ not in _PLAIN:
            raise ModelError(
                f"{rule.origin} cuts {name}, a {type(layer).__name__}; only torch.nn.Linear layers"
                " are cut. Match its linear layers instead, or leave it whole"
            )
        natural = 1 if rule.partition_type is ROW else 0
        if rule.dim != natural:
            raise ModelError(
                f"{rule.origin}: partition_dim {rule.dim} for {name};"
                f" {rule.partition_type.value} cuts dimension {natural}"
            )

    def _cut_of(self, name: str, layer: nn.Linear, rule: LayerRule) -> WeightCut:
        dim = rule.dim
        length = layer.weight.shape[dim]
        grain, size = self._section.tp.tp_grain_size, self._plan.size
        try:
            parts = self._parts_of(name, length, rule)
        except ModelError as error:
            raise ModelError(f"{rule.origin}, {name}: {error}") from None
        sizes = [
            shard_sizes(part, size, heads=self._plan.heads, grain=grain, name=name)
            for part in parts
        ]
        cut = WeightCut.of(dim, sizes)
        if min(map(min, sizes)) == 0:
            raise ModelError(
                f"{_PATH}.autotp_size: {size} ranks get {cut.sizes} of the {length:,} rows of"
                f" {name} ({rule.origin}): one would have none"
                + (f" of {self._plan.heads} key-value heads" if self._plan.heads else "")
                + "; use fewer ranks"
            )
        parent = self._modules[name.rpartition(".")[0]]
        head_size = head_size_of(parent, self._config)
        if is_attention(parent) and head_size and length % head_size == 0:
            for shares in sizes:
                if any(share % head_size for share in shares):
                    raise ModelError(
                        f"{_PATH}.autotp_size: {size} ranks get {shares} rows of {name}"
                        f" ({rule.origin}), whose heads have {head_size}; use a number of ranks"
                        " that divides the heads"
                    )
        return cut

    def _parts_of(self, name: str, length: int, rule: LayerRule) -> tuple[int, ...]:
        """Return the sizes of a weight's fused parts."""
        if rule.origin.startswith("preset") and rule.shape == (3, -1):
            # The preset's equal parts assume as many key-value heads as query heads.
            grouped = self._grouped_parts(name, length)
            if grouped is not None:
                return grouped
        return subparameter_sizes(length, rule.shape, rule.dim)

    def _grouped_parts(self, name: str, length: int) -> tuple[int, ...] | None:
        heads = getattr(self._config, "num_attention_heads", None)
        keys = self._plan.heads
        parent = self._modules[name.rpartition(".")[0]]
        head_size = head_size_of(parent, self._config)
        if not (heads and keys and head_size and length == (heads + 2 * keys) * head_size):
            return None
        return heads * head_size, keys * head_size, keys * head_size

    # ---- others ----------------------------------------------------------------------------------

    def _rule_of(self, name: str) -> LayerRule | None:
        full = f"{name}.weight" if name else "weight"
        rule, others = find_rules(self._rules, full, self._type)
        if others:
            self._ambiguous.append(full)
        return rule

    def _look_at_other(self, name: str, layer: nn.Module) -> None:
        rule = self._rule_of(name)
        if rule is None:
            return
        if rule.partition_type is not SKIP:
            self._expect_plain(name, layer, rule)
        if rule.cuts_vocabulary and isinstance(layer, nn.Embedding):
            if _is_plain_table(layer) and not any(
                isinstance(one, nn.Linear) and one.weight is layer.weight
                for one in self._modules.values()
            ):
                length, size = layer.num_embeddings, self._plan.size
                sizes = shard_sizes(length, size, grain=self._section.tp.tp_grain_size)
                if min(sizes):
                    cut = WeightCut.of(0, [sizes])
                    self._plan.embeddings.append(CutLayer(name, layer, rule, cut))
            return
        self._note_skip(name, layer, rule)

    def _note_skip(self, name: str, layer: nn.Module, rule: LayerRule) -> None:
        if rule.grad_allreduce:
            for leaf, parameter in layer.named_parameters(name, recurse=False):
                self._plan.summed[leaf] = parameter

    def _find_head_norms(self) -> None:
        for parent in self._plan.parents():
            for name, child in self._modules[parent].named_children():
                if _HEAD_NORM.fullmatch(name) and self._is_of_heads(child, parent):
                    for leaf, parameter in child.named_parameters(f"{parent}.{name}"):
                        self._plan.summed.setdefault(leaf, parameter)

    def _is_of_heads(self, norm: nn.Module, parent: str) -> bool:
        """Return whether a norm is applied to single heads, not to whole values (latents)."""
        size = head_size_of(self._modules[parent], self._config)
        found = [parameter.shape for parameter in norm.parameters()]
        return bool(found) and all(len(shape) == 1 and shape[0] == size for shape in found)

    def _find_position_biases(self) -> None:
        """Find embeddings in an attention that have an entry for each of its heads."""
        for parent, layers in self._plan.parents().items():
            module = self._modules[parent]
            counts = {getattr(module, name, None) for name in ("n_heads", "num_heads")} - {None}
            for name, child in module.named_children():
                if isinstance(child, nn.Embedding) and child.embedding_dim in counts:
                    sizes = shard_sizes(
                        child.embedding_dim, self._plan.size, heads=self._plan.heads
                    )
                    cut = WeightCut.of(1, [sizes])
                    full = f"{parent}.{name}"
                    self._plan.biases.append(CutLayer(full, child, layers[0].rule, cut))

    def _check_dropout(self) -> None:
        """Refuse dropout on slices of different sizes: ranks would draw different numbers."""
        uneven = [one for one in self._plan.layers if len(set(one.cut.sizes)) > 1]
        uneven = [one for one in uneven if not one.gather_output]
        if not uneven:
            return
        for name, module in self._modules.items():
            drops = module.p if isinstance(module, nn.Dropout) else None
            for attribute in ("attention_dropout", "dropout"):
                found = getattr(module, attribute, None)
                drops = found if drops is None and isinstance(found, float) else drops
            if drops:
                raise ModelError(
                    f"{_PATH}.autotp_size: ranks get {uneven[0].cut.sizes} rows of"
                    f" {uneven[0].name}, and dropout of {name} ({drops}) would leave their random"
                    " generators in different states; use a number of ranks that cuts evenly, or"
                    " set dropout to 0"
                )


def _is_plain_table(table: nn.Embedding) -> bool:
    is_plain = type(table).forward is nn.Embedding.forward
    options = table.max_norm, table.scale_grad_by_freq, table.sparse
    return is_plain and not any(options)


# ---- pairs ---------------------------------------------------------------------------------------


def check_pairs(layers: list[CutLayer], blocks: set[str]) -> None:
    """Check that each column layer meets a row layer with the same cut, and vice versa.

    A row belongs to the smallest enclosing module with columns, and a column to the smallest one
    with such rows.

    Raises:
        ModelError: a layer has no partner, or the cuts differ.
    """
    columns = [one for one in layers if not one.is_row and not one.gather_output]
    rows = [one for one in layers if one.is_row]
    owner_of = {row.name: _smallest_with(columns, row.name, blocks) for row in rows}
    owned: dict[str, list[CutLayer]] = {}
    for row in rows:
        owner = owner_of[row.name]
        if owner is not None:
            owned.setdefault(owner, []).append(row)
    paired: dict[str, list[CutLayer]] = {}
    for column in columns:
        region = next((path for path in _around(column.name, blocks) if path in owned), None)
        if region is None:
            raise ModelError(
                f"{column.rule.origin} cuts the outputs of {column.name}, but no row layer around"
                f" it takes them (rows: {few([row.name for row in rows]) or 'none'}); cut the"
                ' inputs of the layer that takes them ("partition_type": "row"), or set'
                " gather_output"
            )
        paired.setdefault(region, []).append(column)
    for row in rows:
        owner = owner_of[row.name]
        mates = paired.get(owner, []) if owner is not None else []
        if not mates:
            raise ModelError(
                f"{row.rule.origin} cuts the inputs of {row.name}, but no column layer around it"
                f" makes them (columns: {few([one.name for one in columns]) or 'none'}); cut the"
                ' outputs of the layer that makes them ("partition_type": "column")'
            )
        if not any(_are_alike(row.cut, column.cut) for column in mates):
            raise ModelError(
                f"{row.name} has {row.cut.sizes} of its inputs ({row.rule.origin}), but"
                f" {mates[0].name} has {mates[0].cut.sizes} of its outputs"
                f" ({mates[0].rule.origin}): they do not match. Use a number of ranks that divides"
                " both evenly, or set shapes"
            )


def _around(name: str, blocks: set[str]) -> Iterator[str]:
    """Yield the modules around a layer, from the smallest to the block, or to the model."""
    while name:
        name = name.rpartition(".")[0]
        yield name
        if name in blocks:
            return


def _smallest_with(columns: list[CutLayer], name: str, blocks: set[str]) -> str | None:
    for path in _around(name, blocks):
        prefix = f"{path}." if path else ""
        if any(column.name.startswith(prefix) for column in columns):
            return path
    return None


def _are_alike(row: WeightCut, column: WeightCut) -> bool:
    """Return whether each rank has the same fraction of two cuts (fused outputs are longer)."""
    for part in column.parts:
        total, shares = sum(part), row.sizes
        if all(
            mine * total == share * row.length for mine, share in zip(shares, part, strict=True)
        ):
            return True
    return False


def describe(plan: CutPlan) -> dict[str, Any]:
    """Return the number of layers that are cut in each way, for a log."""
    columns = sum(not one.is_row for one in plan.layers)
    return {
        "columns": columns,
        "rows": len(plan.layers) - columns,
        "vocabularies": len(plan.embeddings),
    }
