"""Contradictions inside sections that are independent of the others."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import PurePosixPath

from hadal.config.compression import CompressionTraining, SparsePruningShared
from hadal.config.elasticity import Elasticity
from hadal.config.parallelism import shape_fault
from hadal.config.plain import shown
from hadal.config.rules.rule import missing, reading
from hadal.config.section import Section
from hadal.config.sparse_attention import SparseAttention
from hadal.config.top_level import Config
from hadal.errors import Fault


@reading("eigenvalue", "quantize_training")
def _eigenvalue(config: Config) -> Iterator[Fault]:
    section, old = config.eigenvalue, config.quantize_training
    found = {"eigenvalue": section} if section is not None and section.enabled else {}
    if old is not None and old.enabled and old.eigenvalue.enabled:
        if found:
            yield Fault(
                "quantize_training.eigenvalue.enabled",
                "true contradicts eigenvalue, which is on; switch one off",
            )
        found["quantize_training.eigenvalue"] = old.eigenvalue
    for path, each in found.items():
        if not each.layer_num:
            yield Fault(
                f"{path}.layer_num",
                "required if the section is enabled; set the number of blocks in layer_name",
            )


@reading("autotuning.start_profile_step", "autotuning.end_profile_step")
def _profiled_steps(config: Config) -> Iterator[Fault]:
    first, last = config.autotuning.start_profile_step, config.autotuning.end_profile_step
    if last < first:
        yield Fault(
            "autotuning.end_profile_step", f"{last} is before start_profile_step {first}; raise it"
        )


@reading("activation_checkpointing.number_checkpoints")
def _contiguous_checkpoints(config: Config) -> Iterator[Fault]:
    section, path = config.activation_checkpointing, "activation_checkpointing"
    if section.contiguous_memory_optimization:
        if section.number_checkpoints is None:
            yield Fault(
                f"{path}.number_checkpoints",
                "required by contiguous_memory_optimization: set the number of recomputed blocks",
            )
        if not section.partition_activations:
            yield Fault(
                f"{path}.contiguous_memory_optimization",
                "needs partition_activations; enable that too",
            )


@reading("activation_checkpointing.memory_budget")
def _budget(config: Config) -> Iterator[Fault]:
    budget = config.activation_checkpointing.memory_budget
    if budget is not None and 1 < budget < 1 << 20:
        yield Fault(
            "activation_checkpointing.memory_budget",
            f"{budget:g} is neither a fraction of the device (up to 1, such as 0.9) nor a number of"
            " bytes that a model can need (a MiB or more); set one of the two",
        )


@reading("sparse_attention")
def _sparse_layout(config: Config) -> Iterator[Fault]:
    section, path = config.sparse_attention, "sparse_attention"
    if section is None:
        return
    if section.num_sliding_window_blocks % 2 == 0:
        got = section.num_sliding_window_blocks
        yield Fault(f"{path}.num_sliding_window_blocks", f"expected an odd number, got {got}")
    if section.horizontal_global_attention and section.attention == "unidirectional":
        yield Fault(
            f"{path}.horizontal_global_attention", 'needs attention "bidirectional"; change one'
        )
    yield from _sparse_blocks(section, path)
    if section.mode == "fixed":
        yield from _sparse_windows(section, path)


def _sparse_blocks(section: SparseAttention, path: str) -> Iterator[Fault]:
    sizes = section.local_window_blocks
    if not sizes or min(sizes) < 1:
        yield Fault(
            f"{path}.local_window_blocks",
            f"expected at least one size, each 1 or more, got {list(sizes)}",
        )
    ends, starts = section.global_block_end_indices, section.global_block_indices
    if min(starts, default=0) < 0:
        yield Fault(f"{path}.global_block_indices", f"expected numbers >= 0, got {min(starts)}")
    if ends is None:
        return
    if len(ends) != len(starts):
        yield Fault(
            f"{path}.global_block_end_indices",
            f"expected {len(starts)} ends, as many as global_block_indices, got {len(ends)}",
        )
    for start, end in zip(starts, ends, strict=False):
        if end <= start:
            yield Fault(
                f"{path}.global_block_end_indices",
                f"the end {end} is not after its start {start}; raise it",
            )


def _sparse_windows(section: SparseAttention, path: str) -> Iterator[Fault]:
    """Check how many blocks may represent a window, and in how many ways."""
    local, chosen = section.num_local_blocks, section.num_global_blocks
    patterns, choices = section.num_different_global_patterns, local // chosen
    if local % chosen:
        yield Fault(
            f"{path}.num_local_blocks",
            f"{local} is not a multiple of num_global_blocks {chosen}; change one",
        )
    elif patterns > choices:
        yield Fault(
            f"{path}.num_different_global_patterns",
            f"{patterns} is more than num_local_blocks {local} / num_global_blocks {chosen} ="
            f" {choices}; lower it",
        )
    if patterns > 1 and not section.different_layout_per_head:
        yield Fault(
            f"{path}.num_different_global_patterns",
            f"{patterns} needs different_layout_per_head true; enable that too",
        )


@reading("elasticity")
def _elastic(config: Config) -> Iterator[Fault]:
    section = config.elasticity
    if section is not None and section.enabled:
        yield from elastic_faults(section)


def elastic_faults(section: Elasticity) -> Iterator[Fault]:
    """Yield the reasons why elasticity cannot choose a batch."""
    yield from _elastic_sizes(section, "elasticity")
    yield from _elastic_version(section, "elasticity")


def _elastic_sizes(section: Elasticity, path: str) -> Iterator[Fault]:
    for name in ("max_train_batch_size", "micro_batch_sizes"):
        if name not in section.model_fields_set:
            yield Fault(f"{path}.{name}", "required while the section is on; add it")
    if max(section.micro_batch_sizes, default=0) > section.max_train_batch_size:
        yield Fault(
            f"{path}.micro_batch_sizes",
            f"{max(section.micro_batch_sizes)} is more than max_train_batch_size "
            f"{section.max_train_batch_size}; remove it or raise that",
        )
    if section.max_gpus < section.min_gpus:
        yield Fault(
            f"{path}.max_gpus", f"{section.max_gpus} is less than min_gpus {section.min_gpus}"
        )


def _elastic_version(section: Elasticity, path: str) -> Iterator[Fault]:
    if section.version not in (0.1, 0.2):
        yield Fault(f"{path}.version", f"expected 0.1 or 0.2, got {section.version}")
    shared = section.model_parallel_size
    if shared > 1 and section.version == 0.1:
        yield Fault(f"{path}.model_parallel_size", f"{shared} needs version 0.2")
    elif section.num_gpus_per_node % shared:
        yield Fault(
            f"{path}.num_gpus_per_node",
            f"{section.num_gpus_per_node} is not a multiple of model_parallel_size {shared}",
        )


@reading("compile.deepcompile", "compile.passes")
def _compile_passes(config: Config) -> Iterator[Fault]:
    passes = config.compile.passes or ()
    if config.compile.deepcompile and "autotp" in passes and len(set(passes)) > 1:
        yield Fault("compile.passes", '"autotp" cannot be combined with others; remove them')


@reading("tensor_parallel")
def _two_degrees(config: Config) -> Iterator[Fault]:
    degree, again = config.tensor_parallel.autotp_size, config.tensor_parallel.tp.tp_size
    if again not in (1, degree):
        yield Fault(
            "tensor_parallel.tp.tp_size",
            f"{again} is neither 1 nor autotp_size {degree}; leave it out",
        )


@reading("tensor_parallel")
def _layer_specs(config: Config) -> Iterator[Fault]:
    section, path = config.tensor_parallel, "tensor_parallel.partition_config"
    custom = section.partition_config
    if custom is None or not section.is_on:
        return
    for number, spec in enumerate(custom.layer_specs):
        here = f"{path}.layer_specs[{number}]"
        natural = 1 if spec.partition_type == "row" else 0
        dim = natural if spec.partition_dim is None else spec.partition_dim
        fault = shape_fault(spec.shape, dim)
        if fault is not None:
            yield Fault(f"{here}.shape", fault)
        for pattern in spec.patterns:
            try:
                re.compile(pattern)
            except re.error as error:
                yield Fault(f"{here}.patterns", f"{pattern!r} is no regular expression: {error}")
        if spec.gather_output and spec.partition_type != "column":
            yield Fault(f"{here}.gather_output", 'only "column" has outputs to gather; remove it')
        if spec.grad_allreduce and spec.partition_type != "skip":
            yield Fault(f"{here}.grad_allreduce", 'only "skip" leaves a parameter whole; remove it')


@reading("compression_training")
def _compression_groups(config: Config) -> Iterator[Fault]:
    compression = config.compression_training
    for name in CompressionTraining.model_fields:
        technique, path = getattr(compression, name), f"compression_training.{name}"
        if name == "layer_reduction" or not technique.shared_parameters.enabled:
            continue
        if getattr(technique.shared_parameters, "method", "") == "snip_momentum":
            continue  # in all modules
        yield from missing(technique, path, "different_groups")
        for group, content in (technique.different_groups or {}).items():
            here = f"{path}.different_groups.{group}.params"
            params = content.params
            if params is None:
                yield Fault(here, "required while the technique is on; add it")
            else:
                yield from missing(params, here, *_bits_or_share(params))


def _bits_or_share(params: Section) -> tuple[str, ...]:
    needed = ("start_bits", "target_bits", "bits", "dense_ratio")
    return tuple(name for name in needed if name in type(params).model_fields)


@reading("compression_training")
def _layer_reduction(config: Config) -> Iterator[Fault]:
    path = "compression_training.layer_reduction"
    section = config.compression_training.layer_reduction
    if not section.enabled:
        return
    yield from missing(section, path, "module_name_prefix", "teacher_layer")
    kept, chosen = section.keep_number_layer, section.teacher_layer
    if kept is not None and chosen is not None and kept != len(chosen):
        yield Fault(
            f"{path}.keep_number_layer", f"{kept}, but teacher_layer names {len(chosen)} layers"
        )


@reading("compression_training")
def _bits(config: Config) -> Iterator[Fault]:
    section = config.compression_training.weight_quantization
    shared, path = section.shared_parameters, "compression_training.weight_quantization"
    if not shared.enabled:
        return
    for group, content in (section.different_groups or {}).items():
        here, params = f"{path}.different_groups.{group}.params.target_bits", content.params
        if params is None or params.start_bits is None or params.target_bits is None:
            continue
        if params.target_bits > params.start_bits:
            yield Fault(here, f"{params.target_bits} is more than start_bits {params.start_bits}")
        elif params.target_bits <= 2 and shared.quantization_type != "symmetric":
            yield Fault(here, f'{params.target_bits} needs quantization_type "symmetric"')
        elif params.target_bits <= 2 and shared.rounding != "nearest":
            yield Fault(here, f'{params.target_bits} needs rounding "nearest"')
    if shared.fp16_mixed_quantize.enabled and shared.quantize_weight_in_forward:
        yield Fault(
            f"{path}.shared_parameters.fp16_mixed_quantize.enabled",
            "only works with quantization in the optimizer step; set quantize_weight_in_forward to"
            " false",
        )


@reading("quantize_training", "compression_training")
def _old_quantization(config: Config) -> Iterator[Fault]:
    old, path = config.quantize_training, "quantize_training"
    if old is None or not old.enabled:
        return
    if config.compression_training.weight_quantization.is_on:
        yield Fault(
            f"{path}.enabled",
            "true contradicts compression_training.weight_quantization, which is on; switch one"
            " off",
        )
    bits, given = old.quantize_bits, old.quantize_algo.model_fields_set
    kind = old.quantize_algo.q_type if "q_type" in given else old.quantize_type
    here = f"{path}.quantize_bits.target_bits"
    if bits.target_bits > bits.start_bits:
        yield Fault(here, f"{bits.target_bits} is more than start_bits {bits.start_bits}")
    elif bits.target_bits <= 2 and kind != "symmetric":
        yield Fault(here, f'{bits.target_bits} needs quantize_algo.q_type "symmetric"')
    elif bits.target_bits <= 2 and old.quantize_algo.rounding != "nearest":
        yield Fault(here, f'{bits.target_bits} needs quantize_algo.rounding "nearest"')


@reading("compression_training")
def _pruning(config: Config) -> Iterator[Fault]:
    path = "compression_training"
    heads = config.compression_training.head_pruning.shared_parameters
    if heads.enabled:
        yield from missing(heads, f"{path}.head_pruning.shared_parameters", "num_heads")
    sparse = config.compression_training.sparse_pruning.shared_parameters
    end = sparse.schedule_offset_end
    if sparse.enabled and end is not None and end < sparse.schedule_offset:
        yield Fault(
            f"{path}.sparse_pruning.shared_parameters.schedule_offset_end",
            f"{end} is before schedule_offset {sparse.schedule_offset}; raise it",
        )
    if sparse.enabled and sparse.method == "snip_momentum":
        yield from _block_pattern(sparse, f"{path}.sparse_pruning.shared_parameters")


def _block_pattern(sparse: SparsePruningShared, path: str) -> Iterator[Fault]:
    found = re.fullmatch(r"([1-9]\d*)([x:])([1-9]\d*)", sparse.block_pattern)
    if found is None or (found[2] == ":" and int(found[1]) >= int(found[3])):
        expected = 'expected rows x columns, such as "4x1", or N of M with N < M, such as "2:4"'
        yield Fault(f"{path}.block_pattern", f"{shown(sparse.block_pattern)}; {expected}")
    elif found[2] == ":" and 1 - sparse.dense_ratio > int(found[1]) / int(found[3]) + 1e-9:
        most = f"{found[1]} of {found[3]} pruned leave {1 - int(found[1]) / int(found[3]):g}"
        yield Fault(f"{path}.dense_ratio", f"{sparse.dense_ratio:g} is too few: {most}; raise it")


@reading("tensorboard", "csv_monitor", "jsonl_monitor")
def _folders_of_monitors(config: Config) -> Iterator[Fault]:
    for name in ("tensorboard", "csv_monitor", "jsonl_monitor"):
        section = getattr(config, name)
        job = PurePosixPath(section.job_name)
        if section.enabled and (job.is_absolute() or ".." in job.parts):
            yield Fault(
                f"{name}.job_name",
                f"{shown(section.job_name)} leads out of output_path; set a name without"
                f' ".." or a leading "/", and the directory in {name}.output_path',
            )


@reading("expert_parallel")
def _expert_groups(config: Config) -> Iterator[Fault]:
    section = config.expert_parallel
    groups, limited = section.num_expert_groups, section.num_limited_groups
    if section.enabled and (groups is None) != (limited is None):
        other = "num_expert_groups" if groups is None else "num_limited_groups"
        yield Fault(f"expert_parallel.{other}", "required together with the other key; add it")
    elif section.enabled and groups is not None and limited is not None and limited > groups:
        yield Fault(
            "expert_parallel.num_limited_groups",
            f"{limited} is more than num_expert_groups {groups}; lower it",
        )


RULES = (
    _eigenvalue,
    _profiled_steps,
    _contiguous_checkpoints,
    _budget,
    _sparse_layout,
    _elastic,
    _compile_passes,
    _two_degrees,
    _layer_specs,
    _compression_groups,
    _layer_reduction,
    _bits,
    _old_quantization,
    _pruning,
    _folders_of_monitors,
    _expert_groups,
)
