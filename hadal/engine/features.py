"""Features that a configuration asks for, as listeners: one factory for each section or key."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import nn

from hadal.autotuning.measuring import Experiment
from hadal.comm import Ranks
from hadal.config import Config
from hadal.engine.batches import BatchSizes
from hadal.engine.clocks import Clocks, Throughput
from hadal.engine.progress import updates_of
from hadal.engine.report import Reporter
from hadal.engine.topology import Topology
from hadal.listener import Listener


@dataclass(frozen=True, slots=True)
class Setting:
    """Arguments of the listeners' factories."""

    config: Config
    model: nn.Module
    world: Ranks
    device: torch.device
    clocks: Clocks
    batches: BatchSizes
    model_parallel_size: int


def setting_of(
    config: Config,
    model: nn.Module,
    world: Ranks,
    device: torch.device,
    batches: BatchSizes,
    topology: Topology,
) -> Setting:
    """Return the setting of an engine; its clocks measure what listeners need."""
    others = config.autotuning.enabled or config.flops_profiler.enabled
    clocks = Clocks(
        device, times=config.wall_clock_breakdown or others, memory=config.memory_breakdown
    )
    return Setting(config, model, world, device, clocks, batches, topology.model_parallel_size)


def _clocks(setting: Setting) -> Listener | None:
    return setting.clocks if setting.clocks.measures else None


def _experiment(setting: Setting) -> Listener | None:
    section = setting.config.autotuning
    if not section.enabled:
        return None
    return Experiment(section, setting.model, setting.world, setting.device)


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
    from hadal.profiling import ProfilerListener, Trained  # for this alone

    ranks = Trained(
        setting.world.size, batches.data_parallel_size, setting.model_parallel_size, batches.micro
    )
    return ProfilerListener(section, setting.model, setting.device, ranks)


LISTENERS: Mapping[str, Callable[[Setting], Listener | None]] = {
    "wall_clock_breakdown": _clocks,
    "steps_per_print": _reporter,
    "flops_profiler": _profiler,
    "autotuning": _experiment,
}
"""By the section or key that asks for them, in call order."""
