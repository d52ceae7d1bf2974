"""Adoption of a model: parameters go into buckets, other tensors get rank 0's values."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from weakref import WeakSet

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from hadal.comm.collectives import broadcast_
from hadal.comm.pending import Leaving
from hadal.config import Config
from hadal.config.zero_optimization import ZeroOptimization
from hadal.device import look_at
from hadal.engine.policies import leaves_of, limits_of, transport_of
from hadal.engine.precision import buffer_rule_of, precisions_of
from hadal.engine.tiers import Offloading
from hadal.engine.treatments import Treatments
from hadal.zero import access, init
from hadal.zero.bucket import Bucket
from hadal.zero.external import announced_uses
from hadal.zero.grouping import Unit, find_tables, find_units, plan_buckets
from hadal.zero.kinds import is_foreign, tensors_inside
from hadal.zero.policy import Precision
from hadal.zero.sharing import Sharing


class Adopter:
    """Adopter of a model's modules and parameters, following one configuration.

    Remembers which modules and parameters it has seen; on request it adopts those that were added
    to the model later.
    """

    def __init__(
        self, model: nn.Module, config: Config, sharing: Sharing, device: torch.device
    ) -> None:
        self._model = model
        self._config = config
        self.sharing = sharing
        """The ranks that hold dense parameters."""
        self._ranks = sharing.ranks
        self._device = device
        self.offloading = Offloading(config, device)
        """The storage of each bucket between uses."""
        self.treatments = Treatments(model, config, sharing, self.offloading)
        """The partition of each parameter, and the ranks that share it."""
        self._limits = limits_of(config, sharing.shards.size)
        self._modules: WeakSet[nn.Module] = WeakSet()
        self._parameters: WeakIdKeyDictionary = WeakIdKeyDictionary()

    @property
    def zero(self) -> ZeroOptimization:
        """The section that selects the states to shard."""
        return self._config.zero_optimization

    def newcomers(self) -> dict[str, nn.Parameter]:
        """Return, by full name, the model's parameters that have not been taken over."""
        return {n: p for n, p in self._model.named_parameters() if p not in self._parameters}

    def buckets(
        self,
        group_of: Mapping[nn.Parameter, int],
        precisions: Callable[[nn.Parameter], Precision] | None = None,
    ) -> list[Bucket]:
        """Make buckets for all newcomers that fit in one. All ranks must call it together.

        `group_of`: the param group of each parameter that will be trained.
        """
        newcomers = {n: p for n, p in self.newcomers().items() if not is_foreign(p)}
        new = list(newcomers.values())
        init.show_as_given(newcomers.items())
        model, config = self._model, self._config
        precisions = precisions or precisions_of(config, model, self._device)
        units = find_units(model, {p: group_of.get(p, -1) for p in new}, leaves_of(config))
        tables = find_tables(model) if config.sparse_gradients else frozenset()
        buckets, leaving = [], Leaving(init.LEAVING_NBYTES)
        usual, treatments = self.treatments.usual, self.treatments.of(newcomers.items())
        for plan in plan_buckets(units, usual, self._limits, precisions, tables, treatments):
            precision = precisions(plan.members[0].parameter)
            sharing = plan.sharing or self.sharing
            with init.taking_over([m.parameter for m in plan.members], sharing) as plan.fetch:
                bucket = Bucket(
                    plan,
                    precision,
                    sharing,
                    self._device,
                    self.offloading.of(plan, sharing.shards.size, precision.accumulate),
                    transport_of(config, sharing.shards.size),
                    leaving,
                    detects_data_writes=config.zero_optimization.detect_data_writes,
                )
            bucket.reshard()
            buckets.append(bucket)
        leaving.wait()
        self._use_up_room(buckets)
        return buckets

    def _use_up_room(self, buckets: list[Bucket]) -> None:
        """Count weights that stay whole against the limit, also for buckets made later."""
        is_cut = self.treatments.usual.partition.weights
        whole = [b for b in buckets if is_cut and not b.partition.weights]
        room = self._limits.persistent_total_numel - sum(b.layout.numel for b in whole)
        self._limits = replace(self._limits, persistent_total_numel=max(0, room))

    def uses(self) -> list[Unit]:
        """Return every unit of the model as it is now, and the announced reads of other weights."""
        managed = {p: -1 for p in self._model.parameters() if not is_foreign(p)}
        units = find_units(self._model, managed, leaves_of(self._config))
        return [*units, *announced_uses(self._model, units)]

    def spread_the_rest(self) -> None:
        """Move buffers and parameters outside buckets to this rank's device, with rank 0's values.

        Everything has been taken over after this.
        """
        for name, parameter in self.newcomers().items():
            if is_foreign(parameter):
                look_at(parameter, parameter.data.to(self._device))
                for values in tensors_inside(parameter):
                    broadcast_(values, 0, self._ranks, f"the broadcast of {name}")
            self._parameters[parameter] = True
        rule = buffer_rule_of(self._config, self._model)
        for path, module in self._model.named_modules():
            if module in self._modules:
                continue
            self._modules.add(module)
            for key, buffer in module._buffers.items():
                if buffer is None:
                    continue
                name = f"{path}.{key}" if path else key
                moved = buffer.to(self._device, rule.dtype_of(name, module, buffer)).contiguous()
                broadcast_(moved, 0, self._ranks, f"the broadcast of buffer {name}")
                module._buffers[key] = moved

    def register(self, keeper: access.Keeper, buckets: list[Bucket]) -> None:
        """Make the buckets' parameters known to `GatheredParameters`, `apply` and copies."""
        parameters = [parameter for bucket in buckets for parameter in bucket.parameters]
        access.register(keeper, parameters)
        if not self._config.zero_optimization.override_module_apply:
            access.leave_alone(parameters)
