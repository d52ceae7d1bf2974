"""Features that the configuration enables, as listeners: one factory per section or key."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

from hadal.comm import Ranks
from hadal.comm.faults import raised_on_all
from hadal.comm.summary import end_of_log
from hadal.config import Config
from hadal.engine.batches import BatchSizes
from hadal.engine.clocks import Clocks, Throughput
from hadal.engine.policies import leaves_of
from hadal.engine.precision import scale_rule_of
from hadal.engine.progress import updates_of
from hadal.engine.recomputed import budget_of, recomputed_modules
from hadal.engine.report import Reporter
from hadal.engine.topology import Topology
from hadal.errors import MonitorError, UsageError
from hadal.listener import Listener
from hadal.optim.loss_scale import ScaleRule
from hadal.plugins.autotuning.measuring import Experiment
from hadal.plugins.monitor.jsonl_monitor import path_of
from hadal.plugins.monitor.monitor import Monitor
from hadal.plugins.monitor.opening import open_writers, sections_on
from hadal.plugins.monitor.run import describe_run
from hadal.plugins.monitor.training import ScalarScope, TrainingEvents
from hadal.zero.policy import STAGES

if TYPE_CHECKING:
    from hadal.plugins.data_efficiency.seqlen import Write

_log = logging.getLogger("hadal.plugins.compression")
_data_log = logging.getLogger("hadal.plugins.data_efficiency")


@dataclass(frozen=True, slots=True)
class Setting:
    """Arguments of the listeners' factories."""

    config: Config
    model: nn.Module
    world: Ranks
    topology: Topology
    device: torch.device
    clocks: Clocks
    batches: BatchSizes
    monitor: Monitor


def setting_of(
    config: Config,
    model: nn.Module,
    world: Ranks,
    device: torch.device,
    batches: BatchSizes,
    topology: Topology,
) -> Setting:
    """Return the setting of an engine; its clocks measure the times that listeners need."""
    others = config.autotuning.enabled or config.flops_profiler.enabled
    clocks = Clocks(
        device, times=config.wall_clock_breakdown or others, memory=config.memory_breakdown
    )
    monitor = Monitor(enabled=bool(sections_on(config)))
    return Setting(config, model, world, topology, device, clocks, batches, monitor)


def opened_monitor(setting: Setting) -> Monitor:
    """Open the files and connections of the engine's monitor on rank 0. All ranks must call it.

    Raises:
        MonitorError: one cannot be opened.
    """
    topology, world, monitor = setting.topology, setting.world, setting.monitor
    if not monitor.enabled:
        return monitor
    with raised_on_all(world, "initialize", MonitorError):
        if world.rank == 0:
            ranks = {
                "world": world.size,
                "data_parallel": topology.data_parallel.size,
                "sequence_parallel": topology.sequence_parallel_size,
                "model_parallel": topology.model_parallel_size,
            }
            run = describe_run(setting.config, setting.model, ranks)
            monitor.open(open_writers(setting.config, run))
    return monitor


def _write(setting: Setting) -> Write | None:
    """Return the monitors' writer of scalars that DeepSpeed does not write."""
    writes = setting.monitor.enabled and setting.config.monitor.extra
    return setting.monitor.write_events if writes else None


def _lengths(setting: Setting) -> Listener | None:
    section, readers = setting.config.curriculum_learning, setting.batches.data_parallel_size
    if section is None or not section.enabled:
        return None
    from hadal.plugins.data_efficiency.seqlen import LengthCurriculum  # for this alone

    return LengthCurriculum(section, setting.model, readers, _write(setting))


def _batching(setting: Setting) -> Listener | None:
    section = setting.config.data_efficiency.data_sampling.dynamic_batching
    if not section.enabled:
        return None
    from hadal.plugins.data_efficiency.batching import BatchingByTokens  # for this alone

    return BatchingByTokens(section, setting.batches.accumulation, _write(setting))


def _ordered(setting: Setting) -> Listener | None:
    sampling = setting.config.data_efficiency.data_sampling
    is_curriculum = sampling.curriculum_learning.enabled
    if not (is_curriculum or sampling.dynamic_batching.enabled):
        return None
    from hadal.plugins.data_efficiency.ordered import ExpectsLoader  # for this alone

    part = "curriculum_learning" if is_curriculum else "dynamic_batching"
    tells = setting.world.rank == 0
    return ExpectsLoader(f"data_efficiency.data_sampling.{part}", tells=tells)


def _layer_drop(setting: Setting) -> Listener | None:
    section = setting.config.progressive_layer_drop
    if section is None or not section.enabled:
        _warn_idle(setting, "drop_layers", "progressive_layer_drop")
        return None
    from hadal.plugins.data_efficiency.layer_drop import LayerDrop  # for this alone

    return LayerDrop(section, setting.model, _write(setting))


def _warn_idle(setting: Setting, caller: str, path: str) -> None:
    """Log that layers were changed by `drop_layers` or `convert_to_random_ltd`, which is off."""
    if not any(hasattr(type(layer), "made_of") for layer in setting.model.modules()):
        return
    from hadal.plugins.data_efficiency.layer_drop import DroppableLayer  # for this alone
    from hadal.plugins.data_efficiency.layers import changed_layers
    from hadal.plugins.data_efficiency.token_drop import TokenDroppingLayer

    change = DroppableLayer if caller == "drop_layers" else TokenDroppingLayer
    kinds = {type(layer).__name__ for _, layer in changed_layers(setting.model, change)}
    if kinds and setting.world.rank == 0:
        _data_log.warning(
            "%s changed the layers %s, but %s.enabled is not true: all layers run on all tokens;"
            " set it, or leave the call out",
            caller,
            ", ".join(sorted(kinds)),
            path,
        )


def _token_drop(setting: Setting) -> Listener | None:
    section = setting.config.data_efficiency.data_routing.random_ltd
    if not section.enabled:
        path = "data_efficiency.data_routing.random_ltd"
        _warn_idle(setting, "convert_to_random_ltd", path)
        return None
    if setting.topology.sequence_parallel_size > 1:
        raise UsageError(
            "data_efficiency.data_routing.random_ltd drops tokens of whole sequences, and"
            f" {setting.topology.sequence_parallel_size} ranks share each one; switch one of the"
            " two off"
        )
    from hadal.plugins.data_efficiency.token_drop import TokenDrop  # for this alone

    rank, samples = setting.topology.data_parallel.rank, setting.batches.train
    return TokenDrop(section, setting.model, samples, rank, _write(setting))


def _compression(setting: Setting) -> Listener | None:
    section, old = setting.config.compression_training, setting.config.quantize_training
    is_old = old is not None and old.enabled
    if not (section.changes_modules or section.layer_reduction.is_on or is_old):
        return None
    from hadal.engine.compressing import ParameterValues
    from hadal.plugins.compression.compress import (  # for this alone
        is_teacher,
        tell_missing_teacher,
        with_old_form,
    )
    from hadal.plugins.compression.training import CompressionTechniques

    if is_teacher(setting.model):
        return None
    section = with_old_form(section, old)
    if is_old and setting.world.rank == 0:
        _log.warning(
            "quantize_training is read as compression_training.weight_quantization of all suitable"
            " modules; write that section, which also selects the modules"
        )
    tell_missing_teacher(setting.model, section)
    if not section.changes_modules:
        return None
    return CompressionTechniques(
        section, setting.model, setting.topology.sharding, ParameterValues()
    )


def _eigenvalues(setting: Setting) -> Listener | None:
    section, topology, path = setting.config.eigenvalue, setting.topology, "eigenvalue"
    old = setting.config.quantize_training
    if old is not None and old.enabled and old.eigenvalue.enabled:
        section, path = old.eigenvalue, "quantize_training.eigenvalue"
    if section is None or not section.enabled:
        return None
    if topology.model_parallel_size > 1 or topology.sequence_parallel_size > 1:
        raise UsageError(
            f"{path}: a block's second derivatives are not built yet for a model, or sequences,"
            f" that are split over several ranks; switch {path} off"
        )
    from hadal.engine.curvature import BlockEigenvalues  # for this alone

    writes = setting.monitor.enabled
    write = setting.monitor.write_events if writes else None
    return BlockEigenvalues(section, setting.model, topology.data_parallel, write, path)


def _generate(setting: Setting) -> Listener | None:
    section = setting.config.hybrid_engine
    if not section.enabled:
        return None
    from hadal.engine.generating import GatheredGenerate  # for this alone

    listener = GatheredGenerate(setting.model)  # checks the model at every stage
    is_cut = STAGES[setting.config.zero_optimization.stage].weights
    return listener if section.pin_parameters and is_cut else None


def _clocks(setting: Setting) -> Listener | None:
    return setting.clocks if setting.clocks.measures else None


def _experiment(setting: Setting) -> Listener | None:
    section = setting.config.autotuning
    if not section.enabled:
        return None
    leaves = leaves_of(setting.config)
    return Experiment(section, setting.model, leaves, setting.world, setting.device)


def _reporter(setting: Setting) -> Listener | None:
    every, timer = setting.config.steps_per_print, setting.config.timers.throughput
    if every is None and not setting.clocks.measures:
        return None
    measured = timer.enabled and every is not None
    throughput = Throughput(setting.device, synchronized=timer.synchronized) if measured else None
    return Reporter(
        every,
        setting.clocks,
        throughput,
        setting.device,
        total=updates_of(setting.config),
        readers=setting.batches.data_parallel_size,
        speaks=setting.world.rank == 0,
    )


def _profiler(setting: Setting) -> Listener | None:
    section, batches = setting.config.flops_profiler, setting.batches
    if not section.enabled or setting.world.rank != 0:
        return None
    from hadal.plugins.profiling import ProfilerListener, Trained  # for this alone

    ranks = Trained(
        setting.world.size,
        batches.data_parallel_size,
        setting.topology.model_parallel_size,
        batches.micro,
    )
    return ProfilerListener(section, setting.model, setting.device, ranks)


def _monitors(setting: Setting) -> Listener | None:
    config, topology = setting.config, setting.topology
    # Rank 0 writes: the others are needed for its sums, if they hold the same part of the model.
    if not setting.monitor.enabled or 0 not in topology.sharding.numbers:
        return None
    scope = ScalarScope(
        topology.sharding,
        topology.data_parallel.size,
        extra=config.monitor.extra,
        has_scale=scale_rule_of(config, setting.device) != ScaleRule(),
    )
    return TrainingEvents(setting.monitor, scope, setting.device)


def _recomputed(setting: Setting) -> Listener | None:
    section, ranks = setting.config.activation_checkpointing, setting.topology.model_parallel
    modules = recomputed_modules(setting.config, setting.model)
    if not modules:
        return None
    from hadal.plugins import activation_checkpointing as wing  # for this alone

    if setting.world.rank == 0:
        wing.tell_unshared(section, ranks)
    budget = budget_of(setting.config, setting.device)
    if budget is not None:
        around = wing.Surroundings(setting.device, setting.world, budget)
        return wing.BudgetedModules(setting.model, modules, section, ranks, around)
    return wing.RecomputedModules(setting.model, modules, wing.Recomputation(section, ranks))


def _experts(setting: Setting) -> Listener | None:
    write = _write(setting)
    if write is None or all(getattr(p, "allreduce", True) for p in setting.model.parameters()):
        return None
    from hadal.plugins.moe.load import ExpertLoad, loads_of  # for this alone

    loads, ranks = loads_of(setting.model), setting.topology.sharding
    return ExpertLoad(loads, ranks, write, setting.device) if loads else None


def _slices(setting: Setting) -> Listener | None:
    topology, model = setting.topology, setting.model
    if topology.sequence_parallel is None or topology.is_from_program:
        return None
    if not hasattr(getattr(model, "config", None), "_attn_implementation"):
        _warn_unsplit(setting)
        return None
    from hadal.plugins.sequence.training import SequenceSlices  # for this alone

    return SequenceSlices.of(model, topology.sequence_parallel.group)


def _warn_unsplit(setting: Setting) -> None:
    """Log that the program must split sequences, unless its model exchanges heads already."""
    from hadal.plugins.sequence import DistributedAttention  # for this alone

    model = setting.model
    if setting.world.rank or any(isinstance(m, DistributedAttention) for m in model.modules()):
        return
    logging.getLogger(__name__).warning(
        "sequence_parallel_size: %s has no config._attn_implementation, by which models of"
        " transformers choose their attention, so its sequences are not split: split them in the"
        " program, and wrap the attention in hadal.sequence.DistributedAttention",
        type(model).__name__,
    )


def _journal(setting: Setting) -> Listener | None:
    path = _reported(setting)
    if path is None:
        return _OwnLog(setting.world) if _is_reported(setting) else None
    from hadal.plugins.monitor.report import Journal, communication_lines  # for this alone

    written: Any = None

    def profile(engine: Any) -> Mapping[str, Any] | None:
        nonlocal written
        found = engine and engine.flops_profiler and engine.flops_profiler.profile
        if found is None or found is written:
            return None
        written = found
        return cast(Mapping[str, Any], found.as_dict())

    def compression(engine: Any) -> Mapping[str, Any] | None:
        from hadal.plugins.compression.report import compression_report  # for this alone

        found = engine and compression_report(engine)
        return found.as_dict() if found and found.rows else None

    first = {"memory": lambda engine: {"bytes": engine.state_nbytes()}}
    at_end = {
        "compression": compression,
        "communication": lambda _: communication_lines(end_of_log(setting.world)),
    }
    return Journal(path, first, {"profile": profile}, at_end)


def _page(setting: Setting) -> Listener | None:
    path = _reported(setting)
    if path is None:
        return None
    from hadal.plugins.monitor.report import PageAtEnd  # for this alone

    return PageAtEnd(path)


def _reported(setting: Setting) -> Path | None:
    """Return the file of the run that is reported, on rank 0."""
    if not _is_reported(setting) or setting.world.rank != 0:
        return None
    return path_of(setting.config.jsonl_monitor)


def _is_reported(setting: Setting) -> bool:
    return setting.config.jsonl_monitor.enabled and setting.config.jsonl_monitor.report


class _OwnLog(Listener):
    """Hands another rank's log of collectives to rank 0 for the report."""

    name = "hadal.report"

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks

    def close(self) -> None:
        end_of_log(self._ranks)

    def at_exit(self) -> None:
        self.close()


LISTENERS: Mapping[str, Callable[[Setting], Listener | None]] = {
    # Listeners that change inputs come before those that count tokens.
    "curriculum_learning": _lengths,
    "data_efficiency.data_sampling": _ordered,
    "data_efficiency.data_sampling.dynamic_batching": _batching,
    "progressive_layer_drop": _layer_drop,
    "activation_checkpointing": _recomputed,
    "data_efficiency.data_routing.random_ltd": _token_drop,
    "compression_training": _compression,
    "eigenvalue": _eigenvalues,
    "hybrid_engine": _generate,
    "wall_clock_breakdown": _clocks,
    "steps_per_print": _reporter,
    "expert_parallel": _experts,
    # The report's other records are written before the monitors close their files.
    "jsonl_monitor": _journal,
    "monitor": _monitors,
    "jsonl_monitor.report": _page,
    "flops_profiler": _profiler,
    "autotuning": _experiment,
    # Last: the other listeners change or count whole sequences.
    "sequence_parallel_size": _slices,
}
"""Factories by the section or key that enables them, in call order."""
