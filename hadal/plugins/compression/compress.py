"""Prepares a model for `compression_training`, and makes the results permanent."""

from __future__ import annotations

import logging
import math
import weakref
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

from hadal.config.compression import CompressionTraining, QuantizeTraining
from hadal.config.load import load_config
from hadal.config.reading import read
from hadal.errors import ConfigError, Fault, UsageError, few, written
from hadal.plugins.compression.layers import (
    ActivationRule,
    Bits,
    Compressed,
    PruneRule,
    WeightRule,
    change,
    change_back,
    compressed_modules,
)
from hadal.plugins.compression.matching import Match, matches_of
from hadal.plugins.compression.packed import Grid, grid_of, remember
from hadal.plugins.compression.pruning import (
    Pruned,
    Whole,
    as_it_is,
    begin,
    matrix_shape,
    prunes_blocks,
    prunings_of,
)
from hadal.plugins.compression.report import note_sizes
from hadal.plugins.compression.shrinking import (
    CutDimension,
    Cuts,
    count_heads,
    cuts_of,
    make_masks_final,
    mask_features,
    shrink,
)
from hadal.plugins.compression.student import describe, take_over_layers

_log = logging.getLogger("hadal.plugins.compression")

_WEIGHTS = (nn.Linear, nn.Conv2d, nn.Embedding)
_INPUTS = (nn.Linear, nn.Conv2d)
_students: weakref.WeakSet[nn.Module] = weakref.WeakSet()
_teachers: weakref.WeakSet[nn.Module] = weakref.WeakSet()


def section_of(config: Any) -> CompressionTraining:
    """Return the section `compression_training` of a dict, a path or a section itself.

    Raises:
        ConfigError: it has faults, or requests something that is not built yet.
    """
    if isinstance(config, CompressionTraining):
        return config
    _, raw = read(config)
    used = ("compression_training", "quantize_training")
    loaded = load_config({"train_batch_size": 1, **{name: raw.get(name) or {} for name in used}})
    return with_old_form(loaded.compression_training, loaded.quantize_training)


def with_old_form(
    section: CompressionTraining, old: QuantizeTraining | None
) -> CompressionTraining:
    """Return the section with the weight quantization that `quantize_training` requests."""
    if old is None or not old.enabled:
        return section
    algo = old.quantize_algo
    named = "q_type" in algo.model_fields_set
    shared = {
        "enabled": True,
        "schedule_offset": old.quantize_schedule.schedule_offset,
        "quantize_groups": old.quantize_groups,
        "quantize_verbose": old.quantize_verbose,
        "quantization_type": algo.q_type if named else old.quantize_type,
        "rounding": algo.rounding,
        "fp16_mixed_quantize": old.fp16_mixed_quantize.model_dump(),
    }
    params = {
        "start_bits": old.quantize_bits.start_bits,
        "target_bits": old.quantize_bits.target_bits,
        "quantization_period": old.quantize_schedule.quantize_period,
    }
    groups = {"all": {"params": params, "modules": ["*"]}}
    weights = {"shared_parameters": shared, "different_groups": groups}
    read = load_config(
        {"train_batch_size": 1, "compression_training": {"weight_quantization": weights}}
    )
    found = read.compression_training.weight_quantization
    return section.model_copy(update={"weight_quantization": found})


class CompressionPlan(NamedTuple):
    """The modules that compression changes, and their rules."""

    weights: list[tuple[Match, WeightRule]]
    inputs: list[tuple[Match, ActivationRule]]
    prunings: list[Pruned]
    cuts: Mapping[tuple[str, str], tuple[CutDimension, ...]]


def plan_compression(model: nn.Module, section: CompressionTraining) -> CompressionPlan:
    """Plan the enabled techniques of the section `compression_training`; nothing is changed.

    Raises:
        ConfigError: groups do not fit the modules; the message lists every fault.
    """
    faults: list[Fault] = []
    weights = _matches(model, section, "weight_quantization", _WEIGHTS, faults)
    inputs = _matches(model, section, "activation_quantization", _INPUTS, faults)
    faults += _uneven(section, weights)
    prunings = prunings_of(model, section, faults)
    cuts = cuts_of(model, section, prunings, faults)
    _expect_none(faults, model)
    return CompressionPlan(
        [(match, _weight_rule(section, match)) for match in weights],
        [(match, _activation_rule(section, match)) for match in inputs],
        prunings,
        cuts,
    )


def compress(model: nn.Module, plan: CompressionPlan, whole: Whole = as_it_is) -> None:
    """Change a model's modules by a plan; `whole` makes possibly sharded weights readable."""
    for match, weight_rule in plan.weights:
        change(match.module).compression.weight = weight_rule
    for match, rule in plan.inputs:
        change(match.module).quantize_inputs(rule)
    for match, pruning in plan.prunings:
        begin(match, pruning, whole)
    mask_features(plan.cuts)
    for module in model.modules():
        if isinstance(module, nn.TransformerEncoderLayer) and any(compressed_modules(module)):
            # torch's fused path reads weights without calling their modules, unless this is 0.
            module.activation_relu_or_gelu = 0
    advance(model, 0)


def _expect_none(faults: list[Fault], model: nn.Module) -> None:
    if faults:
        told = tuple({fault.path: fault for fault in reversed(faults)}.values())[::-1]
        raise ConfigError(written(f"the compression of {type(model).__name__}", told), told)


def _matches(
    model: nn.Module,
    section: CompressionTraining,
    technique: str,
    kinds: tuple[type[nn.Module], ...],
    faults: list[Fault],
) -> list[Match]:
    wanted = getattr(section, technique)
    if not wanted.is_on:
        return []
    return matches_of(model, technique, wanted.different_groups or {}, kinds, faults)


def _weight_rule(section: CompressionTraining, match: Match) -> WeightRule:
    shared, params = section.weight_quantization.shared_parameters, match.params
    mixed = shared.fp16_mixed_quantize
    return WeightRule(
        params.start_bits,
        params.target_bits,
        params.quantization_period,
        match.offset(shared.schedule_offset),
        shared.quantize_groups,
        shared.quantization_type == "symmetric",
        shared.rounding == "stochastic",
        shared.quantize_weight_in_forward,
        mixed.quantize_change_ratio if mixed.enabled else None,
    )


def _activation_rule(section: CompressionTraining, match: Match) -> ActivationRule:
    shared = section.activation_quantization.shared_parameters
    return ActivationRule(
        match.params.bits,
        match.offset(shared.schedule_offset),
        shared.quantization_type == "symmetric",
        shared.range_calibration == "static",
    )


def _uneven(section: CompressionTraining, weights: list[Match]) -> Iterator[Fault]:
    groups = section.weight_quantization.shared_parameters.quantize_groups
    path = "compression_training.weight_quantization.shared_parameters.quantize_groups"
    # Each row of an embedding is a group, regardless of the number of groups.
    others = [match for match in weights if not isinstance(match.module, nn.Embedding)]
    sizes = {match.name: _numel(match.module) for match in others}
    uneven = [f"{name} ({size:,})" for name, size in sizes.items() if size % groups]
    if uneven:
        named = few(uneven, 3)
        yield Fault(path, f"{groups} does not divide the elements of the weight of {named}")


def _numel(module: nn.Module) -> int:
    """Return the elements of a weight, which may be sharded."""
    if isinstance(module, nn.Embedding):
        return module.num_embeddings * module.embedding_dim
    return math.prod(matrix_shape(module))


def advance(model: nn.Module, updates: int) -> None:
    """Set all modules to a number of applied updates."""
    for _, module in compressed_modules(model):
        module.compression.advance(updates)


def init_compression(
    model: nn.Module, deepspeed_config: Any, teacher_model: Any = None, mpu: Any = None
) -> nn.Module:
    """Prepare a model for compression, and return it. Call it before `initialize`.

    Args:
        model: the model, changed in place; if it has a `module`, that is changed.
        deepspeed_config: a dict, or the path of a file, with a section `compression_training`.
        teacher_model: the model whose layers the student takes over; only for `layer_reduction`.
        mpu: accepted and ignored; modules belong to this rank either way.

    Raises:
        ConfigError: the section has faults, or does not fit the model: patterns without a module,
            modules of two groups, groups that do not divide a weight. The message lists them all.
        ModelError: student and teacher do not fit together.
        UsageError: `layer_reduction` is on, and there is no teacher.
    """
    del mpu
    section = section_of(deepspeed_config)
    if section.layer_reduction.is_on:
        if teacher_model is None:
            raise UsageError(
                "init_compression: layer_reduction is on, but there is no teacher_model; pass it as"
                " the third argument"
            )
        student_initialization(model, teacher_model, section)
    inner = _inner(model)
    compress(inner, plan_compression(inner, section))
    if teacher_model is not None:
        _teachers.add(_inner(teacher_model))
    return model


def is_teacher(model: nn.Module) -> bool:
    """Return whether a model was passed to `init_compression` as a teacher, which stays unchanged.

    Programs pass the same configuration to the engines of student and teacher.
    """
    return model in _teachers


def student_initialization(
    student_model: nn.Module, teacher_model: nn.Module, deepspeed_config: Any
) -> None:
    """Copy the layers and modules that `layer_reduction` names from a teacher into a student.

    Raises:
        ConfigError: the section has faults.
        ModelError: student and teacher do not fit together; nothing is copied.
    """
    section = section_of(deepspeed_config).layer_reduction
    student = _inner(student_model)
    take_over_layers(student, _inner(teacher_model), section)
    _students.add(student)


def tell_missing_teacher(model: nn.Module, section: CompressionTraining) -> None:
    """Warn if a student has not taken over any layers in this process."""
    if section.layer_reduction.is_on and model not in _students:
        _log.warning(
            "compression_training.layer_reduction is on, but this model has taken over no layers;"
            " call init_compression(model, config, teacher_model) before initialize, unless its"
            " weights come from a checkpoint"
        )


@torch.no_grad()
def redundancy_clean(
    model: nn.Module, deepspeed_config: Any, mpu: Any = None, *, counts_heads: bool = True
) -> nn.Module:
    """Make the compressed weights permanent after training, and return the model.

    A quantized weight gets the values that it has with its target bits. A module of a group with
    `related_modules` loses its pruned rows, heads or channels, and the related modules lose the
    indices that belong to them; other pruned weights become zero. Modules know their new sizes, and
    attention modules their number of heads; the configuration of a transformers model has both.
    Masks and scores are removed. A quantized input stays quantized. `pack_weights` can then
    store the weights in fewer bytes.

    This ends an engine's training: every rank gets the whole weights, even if they were sharded,
    and the engine only evaluates from then on. All ranks must call it.

    Args:
        model: the engine, or a model that no engine holds, in the state to keep; changed in place.
        deepspeed_config: the configuration that the model was trained with.
        mpu: accepted, and unused.
        counts_heads: set the number of heads that attention modules and the configuration of a
            transformers model have; if false, the program does that itself.

    Raises:
        ConfigError: the configuration does not fit the model.
        UsageError: the model was never prepared, or it was passed without the engine that shards
            its weights.
    """
    del mpu
    section, whole = section_of(deepspeed_config), _inner(model)
    changed = list(compressed_modules(whole))
    if section.changes_modules and not changed:
        raise UsageError(
            f"redundancy_clean: {type(whole).__name__} has no compressed modules; call"
            " init_compression before training"
        )
    faults: list[Fault] = []
    prunings = prunings_of(whole, section, faults)
    cuts = cuts_of(whole, section, prunings, faults)
    _expect_none(faults, whole)
    end = getattr(type(model), "end_training", None)
    if end is not None:
        end(model)
    note_sizes(whole)
    _tell_unfinished(dict(changed))
    made: dict[tuple[int, WeightRule, int], tuple[nn.Parameter, Grid]] = {}
    for name, module in changed:
        held = module.weight.untyped_storage().nbytes()
        if held < _numel(module) * module.weight.element_size():
            raise UsageError(
                f"redundancy_clean: {name}.weight is sharded over ranks; pass the engine instead of"
                " its module"
            )
        rule = module.compression.weight
        if rule is not None:
            key = id(module.weight), rule, module.scale_groups
            if key not in made:
                made[key] = _final(module, rule)
            # Weights that were tied, and were quantized alike, stay tied.
            module.weight, grid = made[key]
            remember(module, grid)
            module.compression.weight = module.compression.bits = None
    _remove_pruned(whole, dict(changed), cuts, prunings, counts_heads=counts_heads)
    for _, module in changed:
        if module.compression.activation is None:
            change_back(module)
    return model


def _tell_unfinished(modules: Mapping[str, Compressed]) -> None:
    """Warn of techniques that no update was made with, or not yet with their last setting."""
    late: dict[str, list[str]] = {}
    for name, module in modules.items():
        state = module.compression
        for rule in state.prunings:
            if rule not in state.active:
                late.setdefault(f"{rule.technique} begins at update {rule.offset}", []).append(name)
        if state.weight is not None and state.bits is None:
            begins = f"weight_quantization begins at update {state.weight.offset}"
            late.setdefault(begins, []).append(name)
        elif state.weight is not None and state.bits is not None:
            now, last = state.bits.bits, state.weight.target_bits
            if now > last:
                late.setdefault(f"weights have {now} bits so far and get {last}", []).append(name)
    for what, names in late.items():
        _log.warning(
            "redundancy_clean: %s, but training has ended before: the model was not trained with"
            " what is removed now (%s)",
            what,
            few(names),
        )


def _remove_pruned(
    model: nn.Module,
    modules: Mapping[str, Compressed],
    cuts: Cuts,
    prunings: list[Pruned],
    *,
    counts_heads: bool,
) -> None:
    heads: set[tuple[int, int]] = set()
    rows: set[tuple[int, int]] = set()
    before = {match.name: getattr(match.module, "out_features", 0) for match, _ in prunings}
    shrink(model, make_masks_final(modules, cuts))
    for match, rule in prunings:
        found = cuts.get((match.technique, match.name))
        if found is None or not isinstance(rule, PruneRule):
            continue
        left = matrix_shape(found[0].module)
        if rule.technique == "head_pruning":
            count_heads(model, found, rule.heads, sets=counts_heads)
            heads.add((rule.heads, left[1] // found[0].each))
        elif rule.technique == "row_pruning":
            rows.add((before[match.name], left[0]))
    describe(model, heads, rows)


def _final(module: Compressed, rule: WeightRule) -> tuple[nn.Parameter, Grid]:
    weight, bits = module.weight, rule.target_bits
    values = module.quantized(Bits(bits, 0.0))
    grid = grid_of(weight, bits, module.scale_groups, symmetric=rule.symmetric)
    return nn.Parameter(values, requires_grad=weight.requires_grad), grid


def _inner(model: Any) -> nn.Module:
    """Return the module of an engine or a wrapper, or the model itself.

    Raises:
        UsageError: it is not a module.
    """
    inner = model if isinstance(model, type) else getattr(model, "module", model)
    if isinstance(inner, nn.Module):
        return inner
    if isinstance(model, nn.Module):
        return model
    kind = f"the class {model.__name__}" if isinstance(model, type) else type(model).__name__
    raise UsageError(f"expected a torch.nn.Module to compress, got {kind}")


class CompressionScheduler:
    """Schedule of a model's techniques for programs that train it without an engine."""

    def __init__(self, model: nn.Module, compression_config: Any) -> None:
        if prunes_blocks(section_of(compression_config)):
            _log.warning(
                "CompressionScheduler: snip_momentum prunes by the optimizer's momentum, which it"
                " does not see, so no block will be pruned; train with hadal.initialize"
            )
        self.model = model
        self.training_steps = 0

    def step(self, step_zero_check: bool = False) -> None:
        """Count an applied update; with `step_zero_check`, only apply the current state."""
        if not step_zero_check:
            self.training_steps += 1
        advance(_inner(self.model), self.training_steps)
