"""The tensors in an optimizer's param groups: flat slices, one per group and bucket."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hadal.errors import OptimizerError
from hadal.zero.bucket import Bucket
from hadal.zero.gradients import Gradients
from hadal.zero.layout import Run, Slot
from hadal.zero.views import flattened, shaped


class Piece(NamedTuple):
    """A contiguous slice of one param group in a bucket's master, or a whole parameter."""

    group: int
    start: int
    stop: int
    values: nn.Parameter
    slot: Slot | None = None
    """The slot of a whole parameter; None for a flat slice."""

    @property
    def is_whole(self) -> bool:
        """True if `values` are a whole parameter rather than a flat slice."""
        return self.slot is not None

    def shaped(self, flat: Tensor) -> Tensor:
        """Return a view, in the shape of `values`, of as many 1-D elements in memory order."""
        return flat if self.slot is None else shaped(flat, self.slot)

    def flattened(self, values: Tensor) -> Tensor:
        """Return the 1-D elements of such a view, in memory order: the inverse of `shaped`."""
        return values if self.slot is None else flattened(values, self.slot)


class HeldTensor(NamedTuple):
    """A tensor in an optimizer's param groups, with the location of its values."""

    values: nn.Parameter
    bucket: Bucket
    start: int
    """Its first element, counted from the bucket's start."""
    group: int
    slot: int | None
    """The slot of a whole parameter; None for a flat slice of a group's parameters."""


def lay_pieces(
    optimizer: Optimizer, one: Gradients, takes: Callable[[int], bool] = lambda _: True
) -> list[Piece]:
    """Add this rank's slices of a bucket to the param groups that `takes` accepts.

    The optimizer's state of the parameters moves with them.

    Raises:
        OptimizerError: the state differs between parameters that are stepped together.
    """
    bucket = one.bucket
    master = bucket.master
    assert master is not None  # every bucket with gradients is trained
    pieces = []
    for run in bucket.layout.runs(*bucket.span):
        if not takes(run.group):
            continue
        values = nn.Parameter(master[run.start : run.stop])
        optimizer.param_groups[run.group]["params"].append(values)
        state = _state_of_run(optimizer, bucket, run, values)
        if state:
            optimizer.state[values] = state
        pieces.append(Piece(run.group, run.start, run.stop, values))
    bucket.count_views(len(pieces))
    for slot, parameter in zip(bucket.layout.slots, bucket.parameters, strict=True):
        if takes(slot.group):
            optimizer.state.pop(parameter, None)
    return pieces


def _state_of_run(optimizer: Optimizer, bucket: Bucket, run: Run, values: Tensor) -> dict[str, Any]:
    """Return the optimizer's state of a slice's parameters, arranged like the slice.

    Tensors of a parameter's shape are split and joined; other state must be equal for all of them.
    """
    begin = bucket.span[0] + run.start
    parts = list(bucket.layout.fragments(begin, bucket.span[0] + run.stop))
    states = [optimizer.state.get(bucket.parameters[part.slot], {}) for part in parts]
    state: dict[str, Any] = {}
    for key in dict.fromkeys(key for known in states for key in known):
        for part, known in zip(parts, states, strict=True):
            slot, value = bucket.layout.slots[part.slot], known.get(key)
            # A 0-dim parameter has 0-dim state; a step count is not per element.
            fits = isinstance(value, Tensor) and tuple(value.shape) == slot.shape
            if fits and key != "step":
                dtype = bucket.precision.state_dtype if value.is_floating_point() else value.dtype
                whole = state.setdefault(key, torch.zeros_like(values, dtype=dtype))
                cut = flattened(value.detach(), slot)[part.start : part.start + part.numel]
                whole[part.offset : part.offset + part.numel].copy_(cut)
            elif key not in state:
                state[key] = value.clone() if isinstance(value, Tensor) else value
            elif value is None or bool(state[key] != value):
                raise OptimizerError(
                    f"the existing state {key!r} of {type(optimizer).__name__} is {value!r} for"
                    f" {slot.name}, but {state[key]!r} for the parameters before it; parameters of"
                    " one group are stepped together. Pass a new optimizer."
                )
    return state
