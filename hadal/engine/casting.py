"""The dtypes of a forward pass's inputs, outputs and operations: casts, and autocast."""

from __future__ import annotations

import copy
from collections.abc import Mapping, MutableMapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class Casting:
    """Casts around and inside a forward pass; None means no cast."""

    inputs: torch.dtype | None = None
    """Floating-point tensors among the arguments."""
    outputs: torch.dtype | None = None
    """Floating-point tensors in the module's output."""
    autocast: torch.dtype | None = None
    """Operations that are safe at lower precision, by torch's own list."""

    def run(
        self, module: nn.Module, device: torch.device, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Call the module."""
        if self.inputs is not None:
            args, kwargs = cast_floats(args, self.inputs), cast_floats(kwargs, self.inputs)
        with self._around(device):
            output = module(*args, **kwargs)
        return output if self.outputs is None else cast_floats(output, self.outputs)

    def _around(self, device: torch.device) -> AbstractContextManager[Any]:
        if self.autocast is None:
            return nullcontext()
        # Casts of weights are cached until the outermost autocast ends. If that is the caller's,
        # around several updates, a forward would compute with stale weights.
        torch.clear_autocast_cache()
        return torch.autocast(device.type, dtype=self.autocast)


def cast_floats(value: Any, dtype: torch.dtype) -> Any:
    """Cast the floating-point tensors in `value`, also those in nested lists, tuples and mappings.

    A container is copied if something in it changes; the caller's containers are never modified.
    Other values are returned unchanged.
    """
    if isinstance(value, Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    if isinstance(value, (list, tuple)):
        cast = [cast_floats(item, dtype) for item in value]
        return _like(value, cast) if _differ(value, cast) else value
    if isinstance(value, Mapping):
        changed = {key: cast_floats(item, dtype) for key, item in value.items()}
        return _updated(value, changed) if _differ(value.values(), changed.values()) else value
    return value


def _differ(before: Any, after: Any) -> bool:
    return any(one is not other for one, other in zip(before, after, strict=True))


def _like(value: list[Any] | tuple[Any, ...], items: list[Any]) -> Any:
    """Return a sequence of the same type; a named tuple takes its fields one by one."""
    return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)


def _updated(value: Mapping[Any, Any], changed: dict[Any, Any]) -> Any:
    """Return a mapping of the same type, also if it is more than a dict (an output object)."""
    if not isinstance(value, MutableMapping):
        return changed
    twin = copy.copy(value)
    for key, item in changed.items():
        twin[key] = item
    return twin
