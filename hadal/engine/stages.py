"""Models in stages before their engine is made: what the configuration says of them.

Tests: tests/engine/test_pipeline.py
"""

from __future__ import annotations

from collections.abc import Container, Iterator
from dataclasses import replace
from functools import reduce
from typing import Any

from torch import nn
from torch.optim import Optimizer

from hadal.activation_checkpointing import Recomputation
from hadal.compression.compress import is_on
from hadal.config import Config
from hadal.config.pipeline import Pipeline
from hadal.config.reading import read
from hadal.config.report import written
from hadal.engine.wishes import Wishes
from hadal.errors import ConfigError, Fault, UsageError
from hadal.pipeline import PipelineModule, PipelineParallelGrid
from hadal.pipeline.decoder import DecoderModule
from hadal.pipeline.orders import check_schedule
from hadal.zero import init
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


def cut_by_configuration(
    model: nn.Module | None, source: Any, wishes: Wishes
) -> tuple[nn.Module | None, Wishes]:
    """Return the model in stages, if `pipeline.auto` asks for that, with what it has of the wishes.

    All ranks must call it.

    Raises:
        ConfigError: the number of stages is missing.
        UsageError: the caller brings an optimizer of the whole model's parameters.
        ModelError: the model cannot be cut.
    """
    _, raw = read(source)
    try:
        section = Pipeline.model_validate(raw.get("pipeline") or {})
    except ValueError:
        return model, wishes  # it is told with all other faults
    if not section.auto or model is None or isinstance(model, PipelineModule):
        return model, wishes
    if section.stages == "auto":
        fault = Fault("pipeline.stages", '"auto", but pipeline.auto needs the number of stages')
        raise ConfigError(written("the configuration", (fault,)), (fault,))
    if isinstance(wishes.optimizer, Optimizer):
        raise UsageError(
            "initialize(optimizer=...) has parameters that other stages will hold; name it in the"
            " configuration, or give a function that makes it"
        )
    if any(init.born_among(parameter) is not None for parameter in model.parameters()):
        raise UsageError(
            "pipeline.auto: the model was made in zero.Init, and stages hold their weights whole;"
            " leave zero.Init out"
        )
    method = "parameters" if section.partition == "best" else section.partition
    found = DecoderModule(model, section.stages, partition_method=method, chunks=section.chunks)
    own = set(found.parameters())
    given = wishes.model_parameters
    return found, replace(wishes, model_parameters=_own_among(given, own))


def _own_among(given: Any, own: Container[nn.Parameter]) -> Any:
    """Return the parameters, or param groups, without those of other stages."""
    if given is None:
        return None
    found: list[Any] = []
    for one in given:
        if isinstance(one, dict):
            found.append({**one, "params": [p for p in one["params"] if p in own]})
        elif one in own:
            found.append(one)
    return found


def groups_of_stages(module: PipelineModule, mpu: Any) -> PipelineParallelGrid:
    """Return the groups of ranks of a model in stages.

    Raises:
        UsageError: the program gives other groups.
    """
    grid = module.mpu()
    if mpu is not None and mpu is not grid:
        raise UsageError(
            f"initialize(mpu={type(mpu).__name__}, model=PipelineModule): the module has groups of"
            " its own, by its topology; leave mpu out"
        )
    return grid


def prepare_stage(module: PipelineModule, config: Config) -> None:
    """Apply the configuration to a stage, and mark what other stages have too.

    Raises:
        ConfigError: keys that do not fit a pipeline.
        UsageError: this stage has nothing to train.
    """
    faults = tuple(_faults(module, config))
    if faults:
        raise ConfigError(written("the configuration", faults), faults)
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
    if config.sequence_parallel_size > 1:
        yield Fault("sequence_parallel_size", "not built yet for a model in stages; leave it out")
    stages = config.pipeline.stages
    if stages not in ("auto", module.num_stages):
        why = f"{stages}, but the PipelineModule has {module.num_stages} stages; leave the key out"
        yield Fault("pipeline.stages", why)
    yield from _faults_of_schedule(module, config)
    for path in _UNBUILT:
        section: Any = reduce(getattr, path.split("."), config)
        on = is_on(section) if path == "compression_training" else section and section.enabled
        if on:
            yield Fault(path, "not built yet for a model in stages; switch it off")
    if module.has_ties and config.sparse_gradients:
        why = "true, but copies of tied weights on several stages add up dense gradients; leave out"
        yield Fault("sparse_gradients", why)


def _faults_of_schedule(module: PipelineModule, config: Config) -> Iterator[Fault]:
    path, schedule, chunks = "pipeline.schedule", config.pipeline.schedule, len(module.chunks)
    if (schedule == "interleaved") != (chunks > 1):
        yield Fault(
            path,
            f'"{schedule}", but PipelineModule has chunks={chunks}: "interleaved" and chunks=2 or'
            " more belong together",
        )
    if schedule == "interleaved" and module.num_stages == 1:
        yield Fault(path, '"interleaved" needs at least 2 stages; leave it and chunks out')
    try:
        check_schedule(schedule, config.gradient_accumulation_steps, module.num_stages)
    except UsageError as error:
        yield Fault("gradient_accumulation_steps", str(error))
