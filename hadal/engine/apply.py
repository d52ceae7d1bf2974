"""Application of a plan to a model: its parameters go into buckets, also those that come later."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from hadal.comm import Ranks
from hadal.comm.collectives import broadcast_
from hadal.comm.faults import raised_on_all
from hadal.comm.pending import UnreadSends
from hadal.comm.ranks import expert_groups
from hadal.config import Config
from hadal.device import look_at
from hadal.engine import checks
from hadal.engine.plan import (
    ModelPlan,
    ModulesPlan,
    ParameterPlan,
    RankCounts,
    plan_model,
    plan_modules,
)
from hadal.engine.policies import Offloading, divergence_of, reduction_of, transport_of
from hadal.engine.precision import buffer_rule_of
from hadal.engine.topology import RequestedRanks, Sharings, Topology
from hadal.errors import ModelError, OffloadError, OptimizerError, UsageError, few
from hadal.optim.step import OptimizerStepper
from hadal.zero import access, sharded_init
from hadal.zero.access import GatheredParameters
from hadal.zero.agreement import Marker
from hadal.zero.bucket import Bucket
from hadal.zero.grouping import BucketPlan
from hadal.zero.hooks import Hooks
from hadal.zero.parameters import is_foreign, refusal_of, tensors_inside
from hadal.zero.regroup import merged, renamed, train_later
from hadal.zero.runtime import ZeroRuntime
from hadal.zero.sanity import Sanity
from hadal.zero.sharing import holders_of

_log = logging.getLogger(__name__)


def plan_for_ranks(
    model: nn.Module, config: Config, requested: RequestedRanks, topology: Topology, world: Ranks
) -> ModulesPlan:
    """Plan the modules for these ranks.

    Raises:
        ConfigError, ModelError, UsageError, NotBuiltYetError: the ranks, the model and the keys do
            not fit; nothing has been changed.
    """
    expert_rank = 0
    if config.expert_parallel.enabled or config.tensor_parallel.is_on:
        from hadal.engine.parallel import check_slices, rank_among_experts  # for this alone

        expert_rank = rank_among_experts(model, config, requested, world)
        check_slices(model, config, topology)
    return plan_modules(model, config, expert_rank)


def change_modules(model: nn.Module, plan: ModulesPlan) -> None:
    """Change modules by their plan, before an optimizer is made. Each rank calls it alone.

    Masks are chosen by whole weights, one at a time: these may have been created sharded.
    """
    if plan.compression is not None:
        from hadal.plugins.compression.compress import compress  # for this alone

        compress(model, plan.compression, GatheredParameters)
    if plan.experts is not None:
        from hadal.plugins.moe.blocks import distribute  # for this alone

        distribute(plan.experts)
    if plan.pattern is not None:
        from hadal.plugins.sparse_attention import give_pattern  # for this alone

        give_pattern(plan.pattern)


def cut_model(
    model: nn.Module,
    optimizer: Optimizer | None,
    plan: ModulesPlan,
    config: Config,
    topology: Topology,
    world: Ranks,
) -> None:
    """Make the groups of experts, and cut layers over ranks. All ranks must call it together.

    Raises:
        UsageError: experts and ranks do not fit each other.
        NotBuiltYetError: the optimizer cannot train slices.
    """
    if any(holders_of(parameter).experts is not None for parameter in model.parameters()):
        from hadal.engine.parallel import make_groups_of_experts  # for this alone

        make_groups_of_experts(model, config, topology)
    checks.check_same_keys(config, world)
    if plan.slices is not None:
        from hadal.engine.parallel import cut_over_ranks  # for this alone

        cut_over_ranks(model, optimizer, plan.slices, config, topology, world)


class ShardedModel:
    """A model whose parameters are in buckets, by a plan that grows with the model."""

    plan: ModelPlan
    runtime: ZeroRuntime
    hooks: Hooks

    def __init__(
        self, model: nn.Module, config: Config, topology: Topology, device: torch.device
    ) -> None:
        self.model = model
        self.config = config
        self.topology = topology
        self._device = device
        self._sharings = Sharings(config, topology.sharing)
        self._counts = RankCounts(
            topology.sharding.size,
            topology.sharing.shards.size,
            lambda name: expert_groups(name).data.size,
        )
        self.offloading = Offloading(config, device)
        """The storage of each bucket between uses."""
        self._modules: WeakSet[nn.Module] = WeakSet()
        self._reported: WeakIdKeyDictionary = WeakIdKeyDictionary()
        """Parameters that `check_late` has warned of; True: they required gradients."""

    def make_plan(
        self, modules: ModulesPlan, groups: Sequence[Sequence[nn.Parameter]], world: Ranks
    ) -> None:
        """Plan units and buckets; nothing is changed. All ranks must call it together.

        Args:
            modules: the plan by which the modules have been changed.
            groups: the parameters that are trained, per param group.
            world: all ranks.

        Raises:
            ConfigError: a key names what does not exist, or does not fit the model.
            UsageError: parameters were created sharded for a different setup.
            OffloadError: a disk cannot be written.
        """
        group_of = {p: number for number, members in enumerate(groups) for p in members}
        with raised_on_all(world, "initialize", OffloadError):
            self.plan = plan_model(
                self.model, modules, self.config, self._device, self._counts, group_of
            )
            self.check_birth(dict(self.model.named_parameters()))
            self.offloading.open_disks()
        if world.rank == 0:
            modules.log_recomputed(self.config)

    def apply_plan(self, reducing: AbstractContextManager[Any] | None = None) -> None:
        """Make the buckets, and all that uses them. All ranks must call it together.

        `reducing`: surrounds reductions, to measure them.
        """
        config, plan, ranks = self.config, self.plan, self._sharings.dense.ranks
        buckets = self._buckets()
        self.runtime = ZeroRuntime(
            plan.units,
            buckets,
            ranks,
            plan.limits,
            reduction_of(config),
            divergence_of(config),
            Sanity(ranks) if config.zero_optimization.enable_sanity_checks else None,
        )
        if reducing is not None:
            self.runtime.reducing = self.runtime.gathering.meeting = reducing
        self._share_the_rest({})
        self._register(buckets)
        access.watch_apply()
        self.hooks = Hooks(self.model, self.runtime)
        self.hooks.watch_refreshes(plan.units)

    def _buckets(self) -> list[Bucket]:
        sends = UnreadSends(sharded_init.UNREAD_NBYTES)
        buckets = [self._bucket(plan, sends) for plan in self.plan.buckets]
        sends.wait()
        return buckets

    def _bucket(self, plan: BucketPlan, sends: UnreadSends) -> Bucket:
        sharing, config = self._sharings.of(plan.holders), self.config
        shards = sharing.shards.size
        with sharded_init.taking_over(
            [member.parameter for member in plan.members], sharing
        ) as fetch:
            bucket = Bucket(
                replace(plan, fetch=fetch),
                plan.precision,
                sharing,
                self._device,
                self.offloading.of(plan, shards, plan.precision.accumulate),
                transport_of(config, shards),
                sends,
                detects_data_writes=config.zero_optimization.detect_data_writes,
            )
        bucket.reshard()
        return bucket

    def _share_the_rest(self, known: Mapping[nn.Parameter, ParameterPlan]) -> None:
        """Move buffers and parameters outside buckets to this rank's device, with rank 0's values.

        `known`: parameters that have been moved before.
        """
        ranks = self._sharings.dense.ranks
        for parameter, plan in self.plan.parameters.items():
            if plan.policy is None and parameter not in known:
                look_at(parameter, parameter.data.to(self._device))
                for values in tensors_inside(parameter):
                    broadcast_(values, 0, ranks, f"the broadcast of {plan.name}")
        rule = buffer_rule_of(self.config, self.model)
        for path, module in self.model.named_modules():
            if module in self._modules:
                continue
            self._modules.add(module)
            for key, buffer in module._buffers.items():
                if buffer is None:
                    continue
                name = f"{path}.{key}" if path else key
                moved = buffer.to(self._device, rule.dtype_of(name, module, buffer)).contiguous()
                broadcast_(moved, 0, ranks, f"the broadcast of buffer {name}")
                module._buffers[key] = moved

    def _register(self, buckets: list[Bucket]) -> None:
        """Make the buckets' parameters known to `GatheredParameters`, `apply` and copies."""
        parameters = [parameter for bucket in buckets for parameter in bucket.parameters]
        access.register(self.runtime, parameters)
        if not self.config.zero_optimization.override_module_apply:
            access.leave_alone(parameters)

    # ---- parameters that come later --------------------------------------------------------------

    def late_parameters(self) -> dict[str, nn.Parameter]:
        """Return, by full name, the model's parameters that are not in the plan."""
        known = self.plan.parameters
        return {name: p for name, p in self.model.named_parameters() if p not in known}

    def check_birth(self, named: Mapping[str, nn.Parameter]) -> None:
        """Raise `UsageError` for a parameter that was created sharded for a different setup."""
        zero = self.config.zero_optimization
        checks.check_birth(named.items(), lambda p: self._sharings.of(holders_of(p)), zero)

    def take_in(self, group_of: Mapping[nn.Parameter, int]) -> None:
        """Make buckets for late parameters, and rename others. All ranks must call it together."""
        runtime, known = self.runtime, self.plan
        sharded_init.show_as_given(self.late_parameters().items())
        self.plan = plan_model(
            self.model, known.modules, self.config, self._device, self._counts, group_of, known
        )
        buckets = self._buckets()
        order = {p: number for number, p in enumerate(self.model.parameters())}
        runtime.extend(merged(runtime.buckets, buckets, order))
        self._share_the_rest(known.parameters)
        self._register(buckets)
        self.hooks.watch_units(runtime.gathering.uses.extend(self.plan.units))
        self.hooks.watch_refreshes(self.plan.units)
        gone = renamed(runtime.buckets, {p: name for name, p in self.model.named_parameters()})
        if gone and runtime.ranks.rank == 0:
            _log.warning(
                "parameters were removed from the model after initialize: %s. Their memory and"
                " optimizer state are kept until the engine is destroyed",
                few(gone),
            )

    def check_late(self, where: str) -> None:
        """Refuse added parameters that are not trained; warn of unfrozen ones, once each.

        Raises:
            UsageError: a parameter that requires gradients was added to the model.
        """
        if all(map(self._is_expected, self.model.parameters())):
            return
        found = [(n, p) for n, p in self.model.named_parameters() if not self._is_expected(p)]
        asking = [(n, p) for n, p in found if p.requires_grad]
        plans = self.plan.parameters
        added = [name for name, p in asking if p not in plans or plans[p].is_late]
        if added:
            raise UsageError(
                f"{where}: {few(added)} would get gradients and never be trained: added to the"
                " model after initialize. Pass them to optimizer.add_param_group({'params': [...]})"
                " on every rank, or freeze them (requires_grad_(False)); to train them yourself,"
                " add them before initialize and leave them out of model_parameters."
            )
        if asking:
            _log.warning(
                "%s: %s get gradients but are not trained: unfrozen after initialize. Pass them to"
                " optimizer.add_param_group({'params': [...]}), or freeze them again.",
                where,
                few([name for name, _ in asking]),
            )
        frozen = [name for name, parameter in found if not parameter.requires_grad]
        if frozen:
            _log.warning(
                "%s: %s were added to the model after initialize, frozen: each rank computes with"
                " its own values; the next optimizer.add_param_group sends rank 0's to all",
                where,
                few(frozen),
            )
        for _, parameter in found:
            self._reported[parameter] = parameter.requires_grad

    def _is_expected(self, parameter: nn.Parameter) -> bool:
        bucket = self.runtime.bucket_of.get(parameter)
        if bucket is not None and bucket.trainable:
            return True  # the usual case, first: the parameter itself may be freed
        plan = self.plan.parameters.get(parameter)
        reported = self._reported.get(parameter)
        if parameter.requires_grad:
            return reported is True or (plan is not None and plan.is_left_out)
        return plan is not None or reported is not None or is_foreign(parameter)


class LaterGroups:
    """Replacement of an optimizer's `add_param_group` that trains the new group.

    Modules that the program has added since `initialize` (an adapter, another head) come into the
    plan then: parameters in the group are trained, the others are kept as frozen parameters.

    Torch's own method checks the group and fills in its options; then the buckets that hold its
    parameters are split, and the stepper takes the new ones.
    """

    def __init__(
        self, sharded: ShardedModel, optimizer: Optimizer, stepper: OptimizerStepper
    ) -> None:
        self._sharded = sharded
        self._runtime = sharded.runtime
        self._optimizer = optimizer
        self._stepper = stepper
        self._add = optimizer.add_param_group
        optimizer.add_param_group = self.add  # type: ignore[method-assign]

    def add(self, param_group: dict[str, Any]) -> None:
        """Train the parameters of one more group from the next update on.

        All ranks must call it at the same point between two updates, with the same group. Frozen
        parameters must be unfrozen (`requires_grad_(True)`) before. Parameters added to the model
        since `initialize` get rank 0's values.

        Raises:
            OptimizerError: torch refuses the group, or a parameter of it is not the model's, is
                frozen or is trained already.
            ModelError: a parameter of it cannot be stored in a flat buffer, or a new one has no
                values here.
            UsageError: gradients have been collected since the last update.
            MismatchError: another rank is elsewhere, or adds another group.
            OffloadError: a disk failed on some rank; load a checkpoint into a new engine.
        """
        runtime, groups = self._runtime, self._optimizer.param_groups
        number = len(groups)
        runtime.gathering.meet(Marker.REGROUP)
        try:
            with raised_on_all(runtime.ranks, "add_param_group"):
                self._check_moment()
                self._add(param_group)
                late = self._sharded.late_parameters()
                checks.check_parameters(late.items(), runtime.buckets[0].device, runtime.ranks)
                self._sharded.check_birth(late)
                self._check_members(groups[number]["params"], late)
            self._check_same(groups[number], late)
        except Exception:
            # Refused here or on another rank: no rank keeps it.
            del groups[number:]
            raise
        members = list(groups[number]["params"])
        self._sharded.take_in(dict.fromkeys(members, number))
        gradients = train_later(runtime, members, number)
        self._sharded.hooks.watch_gradients(gradients)
        with raised_on_all(runtime.ranks, "add_param_group", OffloadError):
            # State may be offloaded to a disk.
            self._stepper.add(gradients, members)

    @property
    def _where(self) -> str:
        return f"rank {self._runtime.ranks.rank}: optimizer.add_param_group"

    def _check_moment(self) -> None:
        if not all(map(access.is_kept_by_engine, self._runtime.bucket_of)):
            raise OptimizerError(f"{self._where}: the engine was destroyed; initialize again")
        if not self._runtime.is_between_updates:
            raise UsageError(
                f"{self._where} was called inside forward, backward or GatheredParameters, or after"
                " a backward whose gradients no update has used; call it after an engine.step()"
                " that ended in an update"
            )

    def _check_members(self, members: list[Tensor], late: Mapping[str, nn.Parameter]) -> None:
        names = {id(p): name for name, p in self._sharded.model.named_parameters()}
        for index, parameter in enumerate(members):
            name = names.get(id(parameter))
            if name is None or not isinstance(parameter, nn.Parameter):
                raise OptimizerError(
                    f"{self._where}: parameter {index} of the group ({tuple(parameter.shape)},"
                    f" {parameter.dtype}) is not a parameter of the model; add the model's own"
                )
            self._check_member(name, parameter, is_new=name in late)

    def _check_member(self, name: str, parameter: nn.Parameter, *, is_new: bool) -> None:
        refusal = refusal_of(parameter, trains=True)
        if refusal is not None:
            raise ModelError(f"{self._where}: {name} {refusal}")
        bucket = None if is_new else self._runtime.bucket_of[parameter]
        if bucket is not None and bucket.trainable:
            group = bucket.slot_of(parameter).group
            raise OptimizerError(
                f"{self._where}: {name} is in param group {group} already; leave it out of the new"
                " one"
            )
        if not parameter.requires_grad:
            raise OptimizerError(
                f"{self._where}: {name} is frozen; call its requires_grad_(True) first"
            )

    def _check_same(self, group: dict[str, Any], late: Mapping[str, nn.Parameter]) -> None:
        names = {id(p): name for name, p in self._sharded.model.named_parameters()}
        mine = {"its parameters": str([names[id(p)] for p in group["params"]])}
        mine |= {f"the new {name}": checks.described_parameter(p) for name, p in late.items()}
        mine |= {key: repr(value) for key, value in group.items() if key != "params"}
        checks.compare("param group", mine, self._runtime.ranks)
