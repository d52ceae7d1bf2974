"""Features that the configuration enables, as listeners: one row per section or key."""

from __future__ import annotations

import importlib
import logging
import socket
from collections.abc import Callable, Mapping
from functools import partial
from operator import attrgetter
from typing import Any, NamedTuple, cast

import torch
from torch import nn

from hadal.comm import Ranks
from hadal.comm.collectives import gather_objects
from hadal.comm.faults import raised_on_all
from hadal.comm.start import get_local_world_size
from hadal.comm.summary import end_of_log
from hadal.config import Config
from hadal.config.autotuning import Autotuning
from hadal.config.monitors import JsonlMonitor
from hadal.config.parallelism import HybridEngine
from hadal.config.reading import read
from hadal.engine.clocks import Clocks
from hadal.engine.listeners import EngineSetting, GivenArguments
from hadal.engine.plan import ModelPlan
from hadal.engine.policies import budget_of
from hadal.engine.precision import casting_of, scale_rule_of
from hadal.engine.report import Reporter
from hadal.engine.topology import Topology
from hadal.errors import MonitorError, UsageError
from hadal.listener import Listener, Setting
from hadal.optim.norm import ScaleRule
from hadal.plugins.autotuning.measuring import Experiment, PlansOf
from hadal.plugins.autotuning.words import found_at
from hadal.plugins.monitor.files import path_of
from hadal.plugins.monitor.monitor import Monitor
from hadal.plugins.monitor.opening import describe_run, open_writers, sections_on
from hadal.plugins.monitor.training import ScalarScope, TrainingEvents
from hadal.zero.access import GatheredParameters
from hadal.zero.policy import STAGES
from hadal.zero.sharded_init import show_as_given
from hadal.zero.state import ParameterValues

_log = logging.getLogger(__name__)
Build = Callable[[Any, EngineSetting], Listener | None]


class Feature(NamedTuple):
    """A section or key that adds a listener to the engine."""

    path: str
    """JSON path of the section or key."""
    build: str | Build
    """The listener's class, or a function that returns one or None; it takes the section and the
    setting. As "module:name" it is imported only if the feature is on."""
    is_on: Callable[[EngineSetting], Any] | None = None
    """Returns True if the section switches it on; None: its `enabled` says so."""


def copied_for_plans(model: Any, source: Any, world: Ranks) -> nn.Module | None:
    """Return a copy of a model that is about to be changed, if a search plans it on this rank."""
    if world.rank or found_at(read(source)[1], "autotuning.model_info.candidates") is None:
        return None
    from hadal.engine.activations import copied  # for this alone

    try:
        show_as_given(model.named_parameters())
        return copied(model, torch.device("meta"))
    except Exception as error:  # modules may hold anything, which may refuse copies
        _log.warning("autotuning: no plans, since the model cannot be copied: %r", error)
        return None


def setting_of(
    config: Config,
    model: nn.Module,
    world: Ranks,
    device: torch.device,
    topology: Topology,
    plan: ModelPlan,
    given: GivenArguments,
) -> EngineSetting:
    """Return the setting of an engine; its clocks measure the times that listeners need."""
    others = config.autotuning.enabled or config.flops_profiler.enabled
    clocks = Clocks(
        device, times=config.wall_clock_breakdown or others, memory=config.memory_breakdown
    )
    monitor, casting = Monitor(enabled=bool(sections_on(config))), casting_of(config, device)
    return EngineSetting(
        config=config,
        model=model,
        device=device,
        world=world,
        sharding=topology.sharding,
        data_parallel=topology.data_parallel,
        sequence_parallel=topology.sequence_parallel,
        model_parallel=topology.model_parallel,
        write_events=monitor.write_events if monitor.enabled else None,
        forward=lambda module, args, kwargs: casting.run(module, device, args, kwargs),
        gathered=GatheredParameters,
        values=ParameterValues(),
        topology=topology,
        clocks=clocks,
        monitor=monitor,
        plan=plan,
        given=given,
    )


def listeners_of(setting: EngineSetting) -> tuple[Listener, ...]:
    """Build the listeners that the configuration enables, in call order."""
    if any(hasattr(type(layer), "made_of") for layer in setting.model.modules()):
        from hadal.plugins.data_efficiency.layer_drop import warn_of_idle_layers  # for this alone

        warn_of_idle_layers(setting)
    return tuple(filter(None, (_built(feature, setting) for feature in FEATURES)))


def _built(feature: Feature, setting: EngineSetting) -> Listener | None:
    section = attrgetter(feature.path)(setting.config)
    is_on = getattr(section, "enabled", False) if feature.is_on is None else feature.is_on(setting)
    if not is_on:
        return None
    build: Any = feature.build
    if isinstance(build, str):
        module, _, name = build.partition(":")
        build = getattr(importlib.import_module(module), name)
    listener: Listener | None = build(section, setting)
    return listener


def opened_monitor(setting: EngineSetting) -> Monitor:
    """Open the files and connections of the engine's monitor on rank 0. All ranks must call it.

    Raises:
        MonitorError: one cannot be opened.
    """
    topology, world, monitor = setting.topology, setting.world, setting.monitor
    if not monitor.enabled:
        return monitor
    hosts = gather_objects(socket.gethostname(), world)
    with raised_on_all(world, "initialize", MonitorError):
        if world.rank == 0:
            ranks = {
                "world": world.size,
                "data_parallel": topology.data_parallel.size,
                "sequence_parallel": topology.sequence_parallel_size,
                "model_parallel": topology.model_parallel_size,
            }
            run = describe_run(setting.config, setting.model, ranks, hosts)
            monitor.open(open_writers(setting.config, run))
    return monitor


# ---- features that need the engine's own parts ---------------------------------------------------


def _recomputed(section: Any, setting: EngineSetting) -> Listener | None:
    modules = setting.plan.modules.recomputed
    if not modules:
        return None
    from hadal.plugins import activation_checkpointing as plugin  # for this alone

    ranks = setting.model_parallel
    if setting.world.rank == 0:
        plugin.tell_unshared(section, ranks)
    budget = budget_of(setting.config, setting.device)
    if budget is not None:
        around = plugin.Surroundings(setting.device, setting.world, budget)
        return plugin.BudgetedModules(setting.model, modules, section, ranks, around)
    return plugin.RecomputedModules(setting.model, modules, plugin.Recomputation(section, ranks))


def _experiment(section: Autotuning, setting: EngineSetting) -> Listener:
    plans = None if setting.given.model is None else _planner_of(setting.given, setting)
    largest = setting.plan.unit_numel
    return Experiment(section, setting.model, largest, setting.world, setting.device, plans)


def _planner_of(given: GivenArguments, setting: EngineSetting) -> PlansOf:
    """Return the planner of a model's configurations for a search."""
    from hadal.engine.candidates import CandidatePlanner  # for this alone, as the next
    from hadal.engine.clusters import cluster_here

    ranks = get_local_world_size() or setting.world.size
    cluster, nodes = cluster_here(setting.device, ranks), setting.world.size // ranks
    return CandidatePlanner(given, setting.config, cluster, nodes).plan


def _scalars(_: Any, setting: EngineSetting) -> Listener:
    scope = ScalarScope(
        setting.sharding,
        setting.data_parallel.size,
        extra=setting.config.monitor.extra,
        has_scale=scale_rule_of(setting.config, setting.device) != ScaleRule(),
    )
    return TrainingEvents(setting.monitor, scope, setting.device)


def _journal(section: JsonlMonitor, setting: EngineSetting) -> Listener:
    if setting.world.rank != 0:
        return _OwnLog(setting.world)
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
    return Journal(path_of(section), first, {"profile": profile}, at_end)


class _OwnLog(Listener):
    """Hands another rank's log of collectives to rank 0 for the report."""

    name = "hadal.report"

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks

    def close(self) -> None:
        end_of_log(self._ranks)

    def at_exit(self) -> None:
        self.close()


class GatheredGenerate(Listener):
    """Replaces a model's `generate` by one that keeps all weights gathered until it returns.

    The model's own gathers the weights of stage 3 as it uses them: for every token, if the model
    has more elements than `stage3_max_live_parameters`, and together with all other ranks.

    Raises:
        UsageError: the model has no `generate`.
    """

    name = "hadal.generate"

    def __init__(self, section: HybridEngine, setting: Setting) -> None:
        self._model: Any = setting.model
        if not callable(getattr(self._model, "generate", None)):
            raise UsageError(
                f"hybrid_engine.enabled: {type(self._model).__name__} has no method `generate`;"
                " pass a model that has one, or set hybrid_engine.enabled to false"
            )
        is_cut = STAGES[setting.config.zero_optimization.stage].weights
        self._keeps_whole = section.pin_parameters and is_cut

    def on_attach(self, engine: Any) -> None:
        """Replace the method in this instance of the model."""
        if self._keeps_whole:
            vars(self._model)["generate"] = partial(
                _gathered_generate, self._model, self._model.generate
            )

    def close(self) -> None:
        """Give the model its own method back."""
        vars(self._model).pop("generate", None)


def _gathered_generate(
    model: nn.Module, plain: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    """Call a model's own `generate` while its weights are gathered."""
    with GatheredParameters(model.parameters()):
        return plain(*args, **kwargs)


# ---- the table -----------------------------------------------------------------------------------


def _is_reported(setting: EngineSetting) -> bool:
    return setting.config.jsonl_monitor.enabled and setting.config.jsonl_monitor.report


def _has_curvature(setting: EngineSetting) -> bool:
    own, old = setting.config.eigenvalue, setting.config.quantize_training
    is_old = old is not None and old.enabled and old.eigenvalue.enabled
    return is_old or (own is not None and own.enabled)


def _is_compressed(setting: EngineSetting) -> bool:
    section, old = setting.config.compression_training, setting.config.quantize_training
    is_old = old is not None and old.enabled
    return section.changes_modules or section.layer_reduction.is_on or is_old


_DATA, _BITS = "hadal.plugins.data_efficiency", "hadal.plugins.compression"
_SAMPLING = "data_efficiency.data_sampling"

FEATURES: tuple[Feature, ...] = (
    # Listeners that change inputs come before those that count tokens.
    Feature("curriculum_learning", f"{_DATA}.seqlen:LengthCurriculum"),
    Feature(
        _SAMPLING,
        f"{_DATA}.ordered:ExpectsLoader",
        lambda setting: any(
            getattr(setting.config.data_efficiency.data_sampling, name).enabled
            for name in ("curriculum_learning", "dynamic_batching")
        ),
    ),
    Feature(f"{_SAMPLING}.dynamic_batching", f"{_DATA}.batching:BatchingByTokens"),
    Feature("progressive_layer_drop", f"{_DATA}.layer_drop:LayerDrop"),
    Feature("activation_checkpointing", _recomputed, lambda _: True),
    Feature("data_efficiency.data_routing.random_ltd", f"{_DATA}.token_drop:TokenDrop"),
    Feature("compression_training", f"{_BITS}.training:techniques_of", _is_compressed),
    Feature("eigenvalue", f"{_BITS}.eigenvalues:BlockEigenvalues", _has_curvature),
    Feature("hybrid_engine", GatheredGenerate),
    Feature(
        "wall_clock_breakdown",
        lambda _, setting: setting.clocks,
        lambda setting: setting.clocks.measures,
    ),
    # After the clocks, which measure what it compares; always, as memory may run out.
    Feature(
        "memory_breakdown",
        "hadal.engine.planned_memory:PlannedMemory",
        lambda setting: setting.device.type != "cpu",
    ),
    Feature(
        "steps_per_print",
        Reporter,
        lambda setting: setting.config.steps_per_print is not None or setting.clocks.measures,
    ),
    Feature(
        "expert_parallel",
        "hadal.plugins.moe.layer:ExpertLoad",
        lambda setting: (
            setting.write is not None
            and any(not getattr(p, "allreduce", True) for p in setting.model.parameters())
        ),
    ),
    # The report's other records are written before the monitors close their files.
    Feature("jsonl_monitor", _journal, _is_reported),
    # Rank 0 writes: others are needed for its sums, if they hold the same part of the model.
    Feature(
        "monitor",
        _scalars,
        lambda setting: setting.monitor.enabled and 0 in setting.sharding.numbers,
    ),
    Feature(
        "jsonl_monitor",
        "hadal.plugins.monitor.report.journal:PageAtEnd",
        lambda setting: _is_reported(setting) and setting.world.rank == 0,
    ),
    Feature(
        "flops_profiler",
        "hadal.plugins.profiling.listener:ProfilerListener",
        lambda setting: setting.config.flops_profiler.enabled and setting.world.rank == 0,
    ),
    Feature("autotuning", _experiment),
    # Last: the other listeners change or count whole sequences.
    Feature(
        "sequence_parallel_size",
        "hadal.plugins.sequence.training:slices_of",
        lambda setting: setting.sequence_parallel and not setting.topology.is_from_program,
    ),
)
"""Features in call order of their listeners."""

ATTRIBUTES: Mapping[str, str] = {
    "dynamic_batching": "dynamic_batching",
    "eigenvalues": "eigenvalue",
    "flops_profiler": "flops_profiler",
    "layer_drop": "progressive_layer_drop",
    "length_curriculum": "curriculum_learning",
    "token_drop": "random_ltd",
}
"""Names under which an engine shows listeners, by their own names."""
