"""Param groups that are added while a model trains: `optimizer.add_param_group` as in torch."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from hadal.comm.collectives import gather_objects
from hadal.comm.faults import told_to_all
from hadal.errors import MismatchError, ModelError, OptimizerError, UsageError
from hadal.optim.step import Stepper
from hadal.zero import access
from hadal.zero.grouping import is_foreign
from hadal.zero.hooks import Hooks
from hadal.zero.regroup import train_later
from hadal.zero.runtime import ZeroRuntime


class LaterGroups:
    """Takes the place of an optimizer's `add_param_group`, and trains what is added.

    Owns nothing but the way there: torch's own method checks the group and fills in its options,
    the buckets that hold its parameters are divided, and the stepper takes up the new ones.
    """

    def __init__(
        self,
        model: nn.Module,
        runtime: ZeroRuntime,
        hooks: Hooks,
        optimizer: Optimizer,
        stepper: Stepper,
    ) -> None:
        self._model = model
        self._runtime = runtime
        self._hooks = hooks
        self._optimizer = optimizer
        self._stepper = stepper
        self._add = optimizer.add_param_group
        optimizer.add_param_group = self.add  # type: ignore[method-assign]

    def add(self, param_group: dict[str, Any]) -> None:
        """Train the parameters of one more group from the next update on.

        All ranks must call it at the same point between two updates, with the same group. What was
        frozen must have been thawed (`requires_grad_(True)`) before.

        Raises:
            OptimizerError: torch refuses the group, or a parameter of it is not the model's, is
                frozen or is trained already.
            ModelError: a parameter of it cannot lie in a flat buffer.
            UsageError: gradients have been collected since the last update.
            MismatchError: another rank is elsewhere, or adds something else.
        """
        runtime, groups = self._runtime, self._optimizer.param_groups
        number = len(groups)
        runtime.meet_to_regroup()
        try:
            with told_to_all(runtime.ranks, "add_param_group"):
                self._check_moment()
                self._add(param_group)
                self._check_members(groups[number]["params"], number)
            self._check_same(groups[number])
        except Exception:
            # Whether it was refused here or elsewhere: no rank keeps it.
            del groups[number:]
            raise
        members = list(groups[number]["params"])
        gradients = train_later(runtime, members, number)
        self._hooks.watch_gradients(gradients)
        self._stepper.add(gradients, members)

    @property
    def _where(self) -> str:
        return f"rank {self._runtime.ranks.rank}: optimizer.add_param_group"

    def _check_moment(self) -> None:
        if not self._runtime.is_between_updates:
            raise UsageError(
                f"{self._where} was called inside forward, backward or GatheredParameters, or after"
                " a backward whose gradients no update has used; call it after an engine.step()"
                " that ended in an update"
            )

    def _check_members(self, members: list[Tensor], number: int) -> None:
        names = {id(p): name for name, p in self._model.named_parameters()}
        for index, parameter in enumerate(members):
            name = names.get(id(parameter))
            if name is None or not isinstance(parameter, nn.Parameter):
                raise OptimizerError(
                    f"{self._where}: parameter {index} of the group ({tuple(parameter.shape)},"
                    f" {parameter.dtype}) is not a parameter of the model; add the model's own"
                )
            self._check_member(name, parameter)

    def _check_member(self, name: str, parameter: nn.Parameter) -> None:
        if is_foreign(parameter):
            raise ModelError(
                f"{self._where}: {name} is a {type(parameter).__name__} of {parameter.dtype} and"
                " cannot lie in a flat buffer; leave it frozen, or convert it to a plain"
                " floating-point parameter before hadal.initialize"
            )
        if not access.is_kept_by_engine(parameter) or parameter not in self._runtime.bucket_of:
            raise OptimizerError(
                f"{self._where}: {name} is in no engine's hands; the engine was destroyed, or the"
                " parameter was put into the model after hadal.initialize. Initialize anew"
            )
        bucket = self._runtime.bucket_of[parameter]
        if bucket.trainable:
            pairs = zip(bucket.layout.slots, bucket.parameters, strict=True)
            group = next(slot.group for slot, known in pairs if known is parameter)
            raise OptimizerError(
                f"{self._where}: {name} is in param group {group} already; leave it out of the new"
                " one"
            )
        if not parameter.requires_grad:
            raise OptimizerError(
                f"{self._where}: {name} is frozen; call its requires_grad_(True) first"
            )

    def _check_same(self, group: dict[str, Any]) -> None:
        names = {id(p): name for name, p in self._model.named_parameters()}
        mine = {"its parameters": [names[id(p)] for p in group["params"]]}
        mine |= {key: repr(value) for key, value in group.items() if key != "params"}  # type: ignore[misc]
        everybody = gather_objects(mine, self._runtime.ranks)
        for rank, other in enumerate(everybody):
            for key in dict.fromkeys([*everybody[0], *other]):
                if other.get(key) != everybody[0].get(key):
                    raise MismatchError(
                        f"the ranks add different param groups: {key} is {everybody[0].get(key)} on"
                        f" rank 0 and {other.get(key)} on rank {rank}. Add the same group on every"
                        " rank."
                    )
