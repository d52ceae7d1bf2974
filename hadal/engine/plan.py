"""The plan of a model: its modules' changes, its units and buckets, and each parameter's policy.

It needs neither groups of ranks nor values: the model may be on the meta device, for ranks that do
not exist. `apply.py` applies it. The modules are planned first, before any of them is changed;
units and buckets follow when they have been changed, because pruning adds scores to train, slices
have other sizes, and param groups exist once an optimizer has been made over both.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import cache
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from hadal.comm.ranks import size_in_name
from hadal.config import Config
from hadal.engine.policies import leaves_of, limits_of, partition_of
from hadal.engine.precision import precisions_of
from hadal.errors import Fault, raise_faults
from hadal.zero.grouping import (
    BucketPlan,
    ParameterPolicy,
    Unit,
    announced_uses,
    find_tables,
    find_units,
    plan_buckets,
    repeated_blocks,
)
from hadal.zero.parameters import is_foreign
from hadal.zero.policy import STAGES, Limits
from hadal.zero.sharing import HolderGroups, holders_of

if TYPE_CHECKING:
    from hadal.plugins.compression.compress import CompressionPlan
    from hadal.plugins.moe.blocks import ExpertsPlan
    from hadal.plugins.sparse_attention.huggingface import PatternPlan
    from hadal.plugins.tensor_parallel.plan import CutPlan

_log = logging.getLogger(__name__)
_GROUPS = "zero_optimization.groups"
_RECOMPUTED = "activation_checkpointing.modules"


class RankCounts(NamedTuple):
    """The numbers of ranks for which a model is planned."""

    dense: int
    """Ranks that hold the same dense parameters."""
    shards: int
    """Ranks over which one copy of their states is sharded."""
    holding: Callable[[str], int]
    """Returns the ranks that hold the same experts, by the name of their groups."""

    @classmethod
    def of(cls, config: Config, ranks: int) -> RankCounts:
        """Return the numbers for `ranks` that need not exist, each with a copy of every layer."""
        zero = config.zero_optimization
        blocks = STAGES[zero.stage].weights and zero.mics_shard_size > 0
        return cls(
            ranks,
            zero.mics_shard_size if blocks else ranks,
            lambda name: max(1, ranks // (size_in_name(name) or 1)),
        )

    def ranks_of(self, holders: HolderGroups) -> int:
        """Return the number of ranks that hold some parameters."""
        return self.dense if holders.experts is None else self.holding(holders.experts)

    def shards_of(self, holders: HolderGroups) -> int:
        """Return the number of shards of a copy of some parameters' states."""
        return self.shards if holders.experts is None else self.holding(holders.experts)


@dataclass(frozen=True, slots=True, eq=False)
class ModulesPlan:
    """Changes of the modules of a model; None for those that the configuration does not request."""

    compression: CompressionPlan | None = None
    experts: ExpertsPlan | None = None
    pattern: PatternPlan | None = None
    """The parts of the model whose attention is block-sparse."""
    slices: CutPlan | None = None
    """The layers that are cut over ranks."""
    recomputed: Mapping[str, nn.Module] = field(default_factory=dict)
    """The modules that `activation_checkpointing` recomputes in backward, by full name."""
    grouped: Mapping[str, int] = field(default_factory=dict)
    """The modules that `zero_optimization.groups` names, with the number of the group."""

    def log_recomputed(self, config: Config) -> None:
        """Log which modules are recomputed, or that the section waits for calls of the program."""
        if self.recomputed:
            names = list(self.recomputed)
            some = names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}"
            _log.info("%s: %d modules are recomputed (%s)", _RECOMPUTED, len(names), some)
        elif config.activation_checkpointing.asks:
            _log.warning(
                "activation_checkpointing: without `modules` the section applies only to calls of"
                ' deepspeed.checkpointing.checkpoint; "modules": "units" recomputes every block'
            )


class ParameterPlan(NamedTuple):
    """When a parameter came, and how it is sharded."""

    name: str
    group: int
    """The number of its param group; -1: it is not trained."""
    policy: ParameterPolicy | None
    """None: no flat buffer can hold it."""
    required_grad: bool
    """True if it required a gradient when it was planned."""
    is_late: bool
    """True if it was added to the model after `initialize`."""

    @property
    def is_left_out(self) -> bool:
        """True if `initialize` found it outside of all param groups: it is not to be trained."""
        return self.group < 0 and self.required_grad and not self.is_late


@dataclass(frozen=True, slots=True, eq=False)
class ModelPlan:
    """The plan of a model."""

    modules: ModulesPlan
    units: list[Unit]
    """All units, and the announced reads of other modules' parameters."""
    buckets: list[BucketPlan]
    """The buckets to be made."""
    parameters: WeakIdKeyDictionary
    """The `ParameterPlan` of each parameter."""
    limits: Limits
    """As configured, less the elements that stay whole in `buckets`."""

    @property
    def unit_numel(self) -> int:
        """The elements of the largest unit, which is gathered at once."""
        sizes = (sum(m.parameter.numel() for m in unit.members) for unit in self.units)
        return max(sizes, default=0)


def plan_modules(model: nn.Module, config: Config, expert_rank: int = 0) -> ModulesPlan:
    """Plan what the modules of a model become; nothing of it is changed.

    `expert_rank`: this rank's number among those that share the model's experts.

    Raises:
        ConfigError: patterns match nothing or too much, or keys do not fit the modules.
        ModelError, NotBuiltYetError: the model does not fit a section.
    """
    grouped, faults = _grouped_modules(model, config)
    raise_faults(faults)
    return ModulesPlan(
        _compression(model, config),
        _experts(model, config, expert_rank),
        _pattern(model, config),
        _slices(model, config),
        _recomputed_modules(model, config),
        grouped,
    )


def plan_model(
    model: nn.Module,
    modules: ModulesPlan,
    config: Config,
    device: torch.device,
    counts: RankCounts,
    group_of: Mapping[nn.Parameter, int],
    known: ModelPlan | None = None,
) -> ModelPlan:
    """Plan a model, or what has been added to it since a `known` plan.

    Args:
        model: the model, whose modules have been changed; nothing else of it is.
        modules: the plan of its modules.
        config: the configuration.
        device: the device that computes.
        counts: the ranks.
        group_of: the param groups of parameters that will be trained.
        known: the plan that has been applied to the model.

    Raises:
        ConfigError: a key names classes that do not exist.
        UsageError: a parameter belongs to groups of experts that do not exist.
    """
    grouped = modules.grouped
    if known is not None:
        grouped = {**_grouped_modules(model, config)[0], **grouped}
    policy_of = _policies(model, config, device, counts, grouped)
    # Weak: a parameter outside of all buckets may be removed from the model, and is freed then.
    parameters = WeakIdKeyDictionary() if known is None else known.parameters.copy()
    added = set()
    for name, parameter in model.named_parameters():
        old = parameters.get(parameter)
        group = group_of.get(parameter, -1 if old is None else old.group)
        if old is not None:
            parameters[parameter] = old._replace(name=name, group=group)
            continue
        added.add(parameter)
        policy = None if is_foreign(parameter) else policy_of(name, parameter)
        parameters[parameter] = ParameterPlan(
            name, group, policy, parameter.requires_grad, known is not None
        )
    groups = {p: plan.group for p, plan in parameters.items() if plan.policy is not None}
    units = find_units(model, groups, leaves_of(config))
    limits = limits_of(config, counts.shards) if known is None else known.limits
    buckets = plan_buckets(
        units if known is None else list(_only(units, added)),
        lambda parameter: parameters[parameter].policy,
        limits,
        find_tables(model) if config.sparse_gradients else frozenset(),
    )
    kept = sum(bucket.numel for bucket in buckets if not bucket.partition.weights)
    return ModelPlan(
        modules,
        [*units, *announced_uses(model, units)],
        buckets,
        parameters,
        limits._replace(persistent_total_numel=max(0, limits.persistent_total_numel - kept)),
    )


def _only(units: Iterable[Unit], wanted: set[nn.Parameter]) -> Iterable[Unit]:
    """Yield units with only the wanted parameters, without empty ones."""
    for unit in units:
        members = [member for member in unit.members if member.parameter in wanted]
        if members:
            yield replace(unit, members=members)


def _policies(
    model: nn.Module,
    config: Config,
    device: torch.device,
    counts: RankCounts,
    grouped: Mapping[str, int],
) -> Callable[[str, nn.Parameter], ParameterPolicy]:
    """Return a function from a parameter's full name and itself to its policy."""
    precision_of = precisions_of(config, model, device)
    groups = config.zero_optimization.groups
    partition = cache(lambda ranks, stage: partition_of(config, ranks, stage, device))

    def policy(name: str, parameter: nn.Parameter) -> ParameterPolicy:
        holders = holders_of(parameter)
        ranks = counts.ranks_of(holders)
        if holders.experts is not None and ranks == counts.dense:
            holders = HolderGroups()  # experts that all ranks hold are as dense parameters
        number = _group_above(name, grouped)
        stage = None if number is None else groups[number].stage
        return ParameterPolicy(partition(ranks, stage), precision_of(parameter), holders)

    return policy


# ---- what modules become -------------------------------------------------------------------------


def _compression(model: nn.Module, config: Config) -> CompressionPlan | None:
    """Plan the compression, unless the program has called `init_compression` itself."""
    section, old = config.compression_training, config.quantize_training
    if not (section.changes_modules or (old and old.enabled)):
        return None
    from hadal.plugins.compression import compress  # for this alone
    from hadal.plugins.compression.layers import is_prepared

    if is_prepared(model) or compress.is_teacher(model):
        return None
    return compress.plan_compression(model, compress.with_old_form(section, old))


def _experts(model: nn.Module, config: Config, rank: int) -> ExpertsPlan | None:
    section = config.expert_parallel
    if not section.enabled:
        return None
    from hadal.plugins.moe.blocks import ExpertPlace, plan_experts  # for this alone

    # A stage of a pipeline may have none.
    whole = getattr(model, "whole_model", model)
    place = ExpertPlace(section.autoep_size, rank)
    return plan_experts(whole, section, place, may_have_none=whole is not model)


def _pattern(model: nn.Module, config: Config) -> PatternPlan | None:
    if config.sparse_attention is None:
        return None
    from hadal.plugins.sparse_attention import plan_pattern  # for this alone

    return plan_pattern(model, config.sparse_attention)


def _slices(model: nn.Module, config: Config) -> CutPlan | None:
    section = config.tensor_parallel
    if not section.is_on:
        return None
    from hadal.plugins.pipeline.decoder import DecoderModule  # for this alone
    from hadal.plugins.tensor_parallel.plan import plan_cuts

    if isinstance(model, DecoderModule):
        whole: CutPlan = model.plan  # planned before the model was split
        return whole.among(model.whole_model)
    return plan_cuts(model, section, section.autotp_size)


def _recomputed_modules(model: nn.Module, config: Config) -> dict[str, nn.Module]:
    """Return the modules to recompute by full name; none if the configuration names none.

    Raises:
        ConfigError: a pattern matches nothing, or a module would be recomputed twice.
    """
    section = config.activation_checkpointing
    wish = "units" if section.modules is None and section.memory_budget else section.modules
    if wish is None:
        return {}
    from hadal.plugins.activation_checkpointing import (  # for this alone
        chosen,
        recomputed_elsewhere,
    )

    found, faults = chosen(model, wish, repeated_blocks(model))
    twice = recomputed_elsewhere(model, list(found))
    faults += [Fault(_RECOMPUTED, twice)] if twice is not None else []
    raise_faults(faults)
    return found


# ---- zero_optimization.groups --------------------------------------------------------------------


def _grouped_modules(model: nn.Module, config: Config) -> tuple[dict[str, int], list[Fault]]:
    """Return the modules of `zero_optimization.groups` with their group's number, and faults."""
    found: dict[str, int] = {}
    faults = []
    for number, group in enumerate(config.zero_optimization.groups):
        for pattern in group.modules:
            mine = [n for n, m in model.named_modules() if n and _matches(pattern, n, m)]
            found |= {name: number for name in mine if name not in found}
            if not mine:
                faults.append(Fault(f"{_GROUPS}[{number}].modules", _unmatched(pattern)))
    return found, faults


def _group_above(name: str, grouped: Mapping[str, int]) -> int | None:
    """Return the number of a parameter's first group; None if it is in none."""
    path = name.split(".")
    above = (".".join(path[:count]) for count in range(1, len(path)))
    return min((grouped[module] for module in above if module in grouped), default=None)


def _matches(pattern: str, name: str, module: nn.Module) -> bool:
    """Return whether a module has this class, or a full name that ends like the pattern."""
    if type(module).__name__ == pattern:
        return True
    wanted = pattern.split(".")
    parts = name.split(".")[-len(wanted) :]
    return len(parts) == len(wanted) and all(map(fnmatchcase, parts, wanted))


def _unmatched(pattern: str) -> str:
    return (
        f"{pattern!r} matches no module: set a class's name, or the end of full names, in which *"
        ' is any part between two dots, such as "mlp.experts.*"'
    )
