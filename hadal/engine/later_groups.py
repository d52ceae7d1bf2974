"""Param groups that are added while a model trains: `optimizer.add_param_group` as in torch.

Modules that the program has added since `initialize` (an adapter, another head) are adopted then:
parameters in the group are trained, the others are kept as frozen parameters.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from hadal.comm.collectives import gather_objects
from hadal.comm.faults import raised_on_all
from hadal.engine.adopt import Adopter
from hadal.engine.checks import check_birth, check_parameters, described_parameter
from hadal.errors import MismatchError, ModelError, OffloadError, OptimizerError, UsageError, few
from hadal.optim.step import OptimizerStepper
from hadal.zero import access
from hadal.zero.agreement import Marker
from hadal.zero.hooks import Hooks
from hadal.zero.kinds import refusal_of
from hadal.zero.regroup import merged, renamed, train_later
from hadal.zero.runtime import ZeroRuntime

_log = logging.getLogger(__name__)


class LaterGroups:
    """Replacement of an optimizer's `add_param_group` that trains the new group.

    Torch's own method checks the group and fills in its options; then the buckets that hold its
    parameters are split, and the stepper takes the new ones.
    """

    def __init__(
        self,
        model: nn.Module,
        runtime: ZeroRuntime,
        hooks: Hooks,
        optimizer: Optimizer,
        stepper: OptimizerStepper,
        adopter: Adopter,
    ) -> None:
        self._model = model
        self._runtime = runtime
        self._hooks = hooks
        self._optimizer = optimizer
        self._stepper = stepper
        self._adopter = adopter
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
                newcomers = self._adopter.newcomers()
                self._check_newcomers(newcomers)
                self._check_members(groups[number]["params"], newcomers)
            self._check_same(groups[number], newcomers)
        except Exception:
            # Refused here or on another rank: no rank keeps it.
            del groups[number:]
            raise
        members = list(groups[number]["params"])
        self._take_in(dict.fromkeys(members, number))
        gradients = train_later(runtime, members, number)
        self._hooks.watch_gradients(gradients)
        with raised_on_all(runtime.ranks, "add_param_group", OffloadError):
            # State may be offloaded to a disk.
            self._stepper.add(gradients, members)

    def _take_in(self, group_of: Mapping[nn.Parameter, int]) -> None:
        """Make buckets for the newcomers, and rename old parameters."""
        runtime = self._runtime
        buckets = self._adopter.buckets(group_of)
        order = {p: number for number, p in enumerate(self._model.parameters())}
        runtime.extend(merged(runtime.buckets, buckets, order))
        self._adopter.spread_the_rest()
        self._adopter.register(runtime, buckets)
        units = self._adopter.uses()
        self._hooks.watch_units(runtime.gathering.uses.extend(units))
        self._hooks.watch_refreshes(units)
        gone = renamed(runtime.buckets, {p: name for name, p in self._model.named_parameters()})
        if gone and runtime.ranks.rank == 0:
            _log.warning(
                "parameters were removed from the model after initialize: %s. Their memory and"
                " optimizer state are kept until the engine is destroyed",
                few(gone),
            )

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

    def _check_newcomers(self, newcomers: Mapping[str, nn.Parameter]) -> None:
        ranks = self._runtime.ranks
        device = self._runtime.buckets[0].device
        check_parameters(newcomers.items(), device, ranks)
        check_birth(newcomers.items(), self._adopter.treatments.sharing_of, self._adopter.zero)

    def _check_members(self, members: list[Tensor], newcomers: Mapping[str, nn.Parameter]) -> None:
        names = {id(p): name for name, p in self._model.named_parameters()}
        for index, parameter in enumerate(members):
            name = names.get(id(parameter))
            if name is None or not isinstance(parameter, nn.Parameter):
                raise OptimizerError(
                    f"{self._where}: parameter {index} of the group ({tuple(parameter.shape)},"
                    f" {parameter.dtype}) is not a parameter of the model; add the model's own"
                )
            self._check_member(name, parameter, is_new=name in newcomers)

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

    def _check_same(self, group: dict[str, Any], newcomers: Mapping[str, nn.Parameter]) -> None:
        names = {id(p): name for name, p in self._model.named_parameters()}
        mine: dict[str, Any] = {"its parameters": [names[id(p)] for p in group["params"]]}
        mine |= {f"the new {name}": described_parameter(p) for name, p in newcomers.items()}
        mine |= {key: repr(value) for key, value in group.items() if key != "params"}
        everybody = gather_objects(mine, self._runtime.ranks)
        for rank, other in enumerate(everybody):
            for key in dict.fromkeys([*everybody[0], *other]):
                if other.get(key) != everybody[0].get(key):
                    raise MismatchError(
                        f"ranks added different param groups: {key} is {everybody[0].get(key)} on"
                        f" rank 0 and {other.get(key)} on rank {rank}. Add the same group on every"
                        " rank."
                    )
