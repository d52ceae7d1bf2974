"""The running side of a checkpoint: where values come from when saving, and go to when loading."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from hadal.checkpoint.keep import Keep
from hadal.checkpoint.shards import Writing
from hadal.comm import Ranks
from hadal.listener import Listener
from hadal.optim.step import Stepper
from hadal.zero.bucket import Bucket
from hadal.zero.layout import Slot
from hadal.zero.runtime import ZeroRuntime

# What `torch.compile(model)` puts into the path of all that it wraps.
_WRAPPED = "_orig_mod"
# Among the numbers of the engine; and beside them, the state of its listeners by name.
COUNTERS, LISTENERS = "counters", "listeners"


def plain_name(name: str) -> str:
    """A full name, or a module's path, as it is where nothing is compiled: so it is saved."""
    return ".".join(part for part in name.split(".") if part != _WRAPPED)


def plain_slots(slots: Sequence[Slot]) -> tuple[Slot, ...]:
    """A bucket's slots, by the names that are saved."""
    return tuple(
        replace(slot, name=plain_name(slot.name)) if _WRAPPED in slot.name else slot
        for slot in slots
    )


@dataclass(frozen=True, slots=True)
class Rules:
    """What the configuration says of saving and loading."""

    verifies: bool = True
    """Whether loading compares every byte with its checksum; else sizes and headers alone."""
    keep: Keep = field(default_factory=Keep)
    tag_validation: str = "Warn"
    """What is done where ranks save under different tags: "Ignore", "Warn" or "Fail"."""
    is_node_local: bool = False
    """Whether each node has a folder of its own, which the other nodes do not see."""
    is_async: bool = False
    """Whether a save returns when the state is copied to host memory, and is written meanwhile."""
    uses_masters: bool = True
    """Whether masters are loaded from saved ones; else from the weights."""
    writing: Writing = field(default_factory=Writing)
    gathers_weights: bool = False
    """Whether partitioned weights are gathered to save the model alone."""
    cuts_weights: bool = False
    """Whether weights are partitioned."""
    stage: int = 0
    """The usual name of how state is partitioned; told by those who read the folder."""


@dataclass(frozen=True, slots=True)
class Live:
    """What belongs to a checkpoint in the running program."""

    module: nn.Module
    runtime: ZeroRuntime
    optimizer: Optimizer | None
    stepper: Stepper | None
    schedule: Any
    loader: Any
    """The training loader; each rank's place in the data is its own."""
    scalars: dict[str, Any]
    """Numbers of the engine, in lists and dicts; what is loaded must be built alike."""
    listeners: Mapping[str, Listener]
    """By the names that their state is saved under."""
    world: Ranks
    """All ranks: they save and load together."""
    part: int = 0
    """Which part of the model this rank holds; 0 where none is cut."""
    parts: int = 1
    rules: Rules = Rules()

    @property
    def ranks(self) -> Ranks:
        """The ranks that share this part of the model."""
        return self.runtime.ranks

    @property
    def loads_on_use(self) -> bool:
        """Whether any state must be loaded before use (it is on a disk, or encoded)."""
        return any(bucket.loads_on_use for bucket in self.runtime.buckets)

    def present(self, bucket: Bucket) -> AbstractContextManager[None]:
        """Have a bucket's weights, master and state in memory; what is written is kept."""
        if self.stepper is None or not bucket.trainable:
            return bucket.present()
        return self.stepper.present(bucket)

    def names(self) -> dict[nn.Parameter, list[str]]:
        """All names of each parameter, as they are saved; a tied one has several."""
        names: dict[nn.Parameter, list[str]] = {}
        for name, parameter in self.module.named_parameters(remove_duplicate=False):
            names.setdefault(parameter, []).append(plain_name(name))
        return names

    def unmanaged(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Parameters that lie in no bucket, by their first names."""
        for name, parameter in self.module.named_parameters():
            if parameter not in self.runtime.bucket_of:
                yield plain_name(name), parameter

    def buffers(self) -> Iterator[tuple[str, Tensor]]:
        """What `state_dict` calls buffers: those that are persistent, each once."""
        seen: set[Tensor] = set()
        for path, module in self.module.named_modules():
            for key, buffer in module._buffers.items():
                if buffer is None or key in module._non_persistent_buffers_set or buffer in seen:
                    continue
                seen.add(buffer)
                yield plain_name(f"{path}.{key}" if path else key), buffer

    def with_extra_state(self) -> Iterator[tuple[str, nn.Module]]:
        """Modules that have more state than tensors (`get_extra_state`), by their paths."""
        for path, module in self.module.named_modules():
            if type(module).get_extra_state is not nn.Module.get_extra_state:
                yield plain_name(path), module

    def is_trained(self, parameter: nn.Parameter) -> bool:
        """Whether updates change it."""
        bucket = self.runtime.bucket_of.get(parameter)
        return parameter.requires_grad if bucket is None else bucket.trainable

    def frozen_names(self) -> Iterator[str]:
        """All names of the parameters that are not trained."""
        for parameter, names in self.names().items():
            if not self.is_trained(parameter):
                yield from names

    def group_names(self) -> list[list[str]]:
        """The full names of each param group's parameters, in the order of the buckets."""
        groups = [] if self.optimizer is None else self.optimizer.param_groups
        names: list[list[str]] = [[] for _ in groups]
        for bucket in self.runtime.buckets:
            # There may be what could be trained, and no optimizer.
            for slot in bucket.layout.slots if bucket.trainable and names else ():
                names[slot.group].append(plain_name(slot.name))
        return names
