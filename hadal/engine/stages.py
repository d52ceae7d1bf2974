"""Preparation of pipelined models for their engine, from the configuration."""

from __future__ import annotations

from collections.abc import Iterator
from functools import reduce
from typing import Any

from hadal.config import Config
from hadal.errors import Fault, UsageError, raise_faults
from hadal.plugins.activation_checkpointing import Recomputation
from hadal.plugins.pipeline import PipelineModule, PipelineParallelGrid
from hadal.plugins.pipeline.orders import check_schedule
from hadal.zero.boxes import Box
from hadal.zero.sharing import Tied

# Features that see a whole model, or change its inputs but not the labels, which are elsewhere.
_UNBUILT = (
    "autotuning",
    "compression_training",
    "curriculum_learning",
    "data_efficiency.data_routing.random_ltd",
    "data_efficiency.data_sampling.curriculum_learning",
    "data_efficiency.data_sampling.dynamic_batching",
    "eigenvalue",
    "flops_profiler",
    "progressive_layer_drop",
    "quantize_training",
)


def groups_of_stages(module: PipelineModule, mpu: Any) -> PipelineParallelGrid:
    """Return the groups of ranks of a model in stages.

    Raises:
        UsageError: the program passes other groups.
    """
    grid = module.mpu()
    if mpu is not None and mpu is not grid:
        raise UsageError(
            f"initialize(mpu={type(mpu).__name__}, model=PipelineModule): the module has groups of"
            " its own, by its topology; leave mpu out"
        )
    return grid


def prepare_stage(module: PipelineModule, config: Config) -> None:
    """Apply the configuration to a stage, and mark parameters that other stages hold too.

    Raises:
        ConfigError: keys that do not fit a pipeline.
        UsageError: this stage has nothing to train.
    """
    raise_faults(_faults(module, config))
    if not any(parameter.requires_grad for parameter in module.parameters()):
        raise UsageError(
            f"{module.chunk_name(module.stage_id)} has no trainable parameters: use another"
            " partition_method, or fewer stages"
        )
    interval = config.pipeline.activation_checkpoint_interval
    if interval:
        module.set_checkpoint_interval(interval)
    if module.activation_checkpoint_func is None:
        slices = module.mpu().slices
        shared = slices if slices.size > 1 else None
        recomputation = Recomputation(config.activation_checkpointing, shared)
        module.activation_checkpoint_func = recomputation.call
    for parameter, name in module.renamed.items():
        parameter.hadal_box = Box.whole(name, tuple(parameter.shape))  # type: ignore[attr-defined]
    for key, tie in module.tied_comms.items():
        for parameter in tie.module.parameters():
            parameter.hadal_tied = Tied(key, tie.ranks)  # type: ignore[attr-defined]


def _faults(module: PipelineModule, config: Config) -> Iterator[Fault]:
    if config.zero_optimization.stage > 2:
        yield Fault(
            "zero_optimization.stage",
            "3, but stages of a pipeline hold their weights whole: each micro-batch would gather"
            " them again; choose 0, 1 or 2",
        )
    if not config.managed_gradient_accumulation:
        yield Fault(
            "managed_gradient_accumulation",
            "false, but train_batch() counts the micro-batches of a pipeline; leave the key out",
        )
    if config.zero_optimization.groups:
        why = "not built yet for a model in stages, which may lack a group's modules; leave it out"
        yield Fault("zero_optimization.groups", why)
    stages = config.pipeline.stages
    if stages not in ("auto", module.num_stages):
        why = f"{stages}, but the PipelineModule has {module.num_stages} stages; leave the key out"
        yield Fault("pipeline.stages", why)
    yield from _faults_of_schedule(module, config)
    for path in _UNBUILT:
        section: Any = reduce(getattr, path.split("."), config)
        switch = "changes_modules" if path == "compression_training" else "enabled"
        if getattr(section, switch, False):
            yield Fault(path, "not built yet for a model in stages; switch it off")
    if module.has_ties and config.sparse_gradients:
        why = "true, but copies of tied weights on several stages add up dense gradients; leave out"
        yield Fault("sparse_gradients", why)


def _faults_of_schedule(module: PipelineModule, config: Config) -> Iterator[Fault]:
    path, schedule, chunks = "pipeline.schedule", config.pipeline.schedule, len(module.chunks)
    if (schedule == "interleaved") != (chunks > 1):
        yield Fault(
            path,
            f'"{schedule}", but PipelineModule has chunks={chunks}: use "interleaved" if and'
            " only if chunks >= 2",
        )
    if schedule == "interleaved" and module.num_stages == 1:
        yield Fault(path, '"interleaved" needs at least 2 stages; leave it and chunks out')
    try:
        check_schedule(schedule, config.gradient_accumulation_steps, module.num_stages)
    except UsageError as error:
        yield Fault("gradient_accumulation_steps", str(error))
