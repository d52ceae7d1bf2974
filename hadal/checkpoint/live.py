"""The running side of a checkpoint: the source of values in a save, the target in a load."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from hadal.checkpoint.rules import Rules
from hadal.comm import Ranks
from hadal.listener import Listener
from hadal.optim.step import OptimizerStepper
from hadal.zero.boxes import ATTRIBUTE, Placement, placement_of
from hadal.zero.bucket import Bucket
from hadal.zero.layout import Slot
from hadal.zero.runtime import ZeroRuntime
from hadal.zero.sharing import is_model_part

# `torch.compile(model)` puts this into the path of everything it wraps.
_WRAPPED = "_orig_mod"
# Keys of the saved engine state: its numbers include the counters; listeners' state is by name.
COUNTERS, LISTENERS = "counters", "listeners"


def plain_name(name: str) -> str:
    """Return a full name or a module's path as it is without `torch.compile`, as it is saved."""
    return ".".join(part for part in name.split(".") if part != _WRAPPED)


def plain_slots(slots: Sequence[Slot]) -> tuple[Slot, ...]:
    """Return a bucket's slots with the names that are saved."""
    return tuple(
        slot._replace(name=plain_name(slot.name)) if _WRAPPED in slot.name else slot
        for slot in slots
    )


@dataclass(frozen=True, slots=True)
class Live:
    """The objects of the running program that a checkpoint saves and loads."""

    module: nn.Module
    runtime: ZeroRuntime
    optimizer: Optimizer | None
    stepper: OptimizerStepper | None
    schedule: Any
    loader: Any
    """The training loader; each rank has its own position in the data."""
    scalars: dict[str, Any]
    """The engine's numbers, in lists and dicts; loaded ones must have the same structure."""
    listeners: Mapping[str, Listener]
    """The engine's listeners, by the names that their state is saved under."""
    world: Ranks
    """All ranks: they save and load together."""
    part: int = 0
    """The model-parallel part that this rank holds; 0 if the model is whole."""
    parts: int = 1
    rules: Rules = field(default_factory=Rules)

    @property
    def ranks(self) -> Ranks:
        """The ranks that share this part of the model."""
        return self.runtime.ranks

    @property
    def has_experts(self) -> bool:
        """True if some parameters are on fewer ranks than the others."""
        return any(bucket.ranks != self.ranks for bucket in self.runtime.buckets)

    @property
    def loads_on_use(self) -> bool:
        """True if any state must be loaded before use (because it is on a disk, or encoded)."""
        return any(bucket.loads_on_use for bucket in self.runtime.buckets)

    def present(self, bucket: Bucket) -> AbstractContextManager[None]:
        """Hold a bucket's weights, master and state in memory in a block; changes are kept."""
        if self.stepper is None or not bucket.trainable:
            return bucket.present()
        return self.stepper.present(bucket)

    def names(self) -> dict[nn.Parameter, list[str]]:
        """Return all saved names of each parameter; a tied one has several."""
        names: dict[nn.Parameter, list[str]] = {}
        for name, parameter in self.module.named_parameters(remove_duplicate=False):
            names.setdefault(parameter, []).append(plain_name(name))
        return names

    def placements(self) -> dict[str, Placement]:
        """Return what each parameter and buffer is of the whole model, by its first saved name.

        Raises:
            UsageError: an attribute says so wrongly; the message names the parameter.
        """
        values = [(names[0], parameter) for parameter, names in self.names().items()]
        shapes: dict[Tensor, tuple[int, ...]] = {
            parameter: slot.shape
            for bucket in self.runtime.buckets
            for slot, parameter in zip(bucket.layout.slots, bucket.parameters, strict=True)
        }
        return {
            name: placement_of(value, name, shapes.get(value))
            for name, value in (*values, *self.buffers())
        }

    def unknown_places(self) -> frozenset[str]:
        """Return the names of parameters that are marked as parts, and do not say which."""
        return frozenset(
            names[0]
            for parameter, names in self.names().items()
            if self.parts > 1 and is_model_part(parameter) and not hasattr(parameter, ATTRIBUTE)
        )

    def unmanaged(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the parameters that are in no bucket, by their first names."""
        for name, parameter in self.module.named_parameters():
            if parameter not in self.runtime.bucket_of:
                yield plain_name(name), parameter

    def buffers(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the persistent buffers, each once, by the names of `state_dict`."""
        seen: set[Tensor] = set()
        for path, module in self.module.named_modules():
            for key, buffer in module._buffers.items():
                if buffer is None or key in module._non_persistent_buffers_set or buffer in seen:
                    continue
                seen.add(buffer)
                yield plain_name(f"{path}.{key}" if path else key), buffer

    def with_extra_state(self) -> Iterator[tuple[str, nn.Module]]:
        """Yield the modules with extra state (`get_extra_state`), by their paths."""
        for path, module in self.module.named_modules():
            if type(module).get_extra_state is not nn.Module.get_extra_state:
                yield plain_name(path), module

    def is_trained(self, parameter: nn.Parameter) -> bool:
        """Return whether updates change the parameter."""
        bucket = self.runtime.bucket_of.get(parameter)
        return parameter.requires_grad if bucket is None else bucket.trainable

    def frozen_names(self) -> Iterator[str]:
        """Yield all names of the frozen parameters."""
        for parameter, names in self.names().items():
            if not self.is_trained(parameter):
                yield from names

    def group_names(self) -> list[list[str]]:
        """Return the full names of each param group's parameters, in the order of the buckets."""
        groups = [] if self.optimizer is None else self.optimizer.param_groups
        names: list[list[str]] = [[] for _ in groups]
        for bucket in self.runtime.buckets:
            # There may be trainable parameters and no optimizer.
            for slot in bucket.layout.slots if bucket.trainable and names else ():
                names[slot.group].append(plain_name(slot.name))
        return names
