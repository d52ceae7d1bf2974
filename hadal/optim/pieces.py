"""What flat cuts an optimizer finds in its param groups: one tensor per group and bucket."""

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
    """A contiguous run of one param group in one bucket's master, or a whole parameter."""

    group: int
    start: int
    stop: int
    values: nn.Parameter
    slot: Slot | None = None
    """Whose whole values they are; None for a flat cut."""

    @property
    def is_whole(self) -> bool:
        """Whether `values` are a whole parameter, and no flat cut."""
        return self.slot is not None

    def shaped(self, flat: Tensor) -> Tensor:
        """A view of as many elements, 1-D as they lie in memory, in the shape of `values`."""
        return flat if self.slot is None else shaped(flat, self.slot)

    def flattened(self, values: Tensor) -> Tensor:
        """What `shaped` gives such a view of."""
        return values if self.slot is None else flattened(values, self.slot)


class Held(NamedTuple):
    """A tensor that an optimizer has in its param groups, and where its values lie."""

    values: nn.Parameter
    bucket: Bucket
    start: int
    """The first of its elements, counted from the bucket's start."""
    group: int
    slot: int | None
    """Whose whole values they are; None for a flat cut through the parameters of a group."""


def lay_pieces(
    optimizer: Optimizer, one: Gradients, takes: Callable[[int], bool] = lambda _: True
) -> list[Piece]:
    """Add this rank's runs of a bucket to the param groups that `takes` accepts.

    State that the optimizer holds for the parameters goes along.

    Raises:
        OptimizerError: that state differs between parameters that are stepped together.
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
    """What the optimizer holds for the parameters of a run, laid out like the run.

    Tensors of a parameter's shape are cut and joined; anything else must be the same for all.
    """
    begin = bucket.span[0] + run.start
    parts = list(bucket.layout.fragments(begin, bucket.span[0] + run.stop))
    states = [optimizer.state.get(bucket.parameters[part.slot], {}) for part in parts]
    state: dict[str, Any] = {}
    for key in dict.fromkeys(key for known in states for key in known):
        for part, known in zip(parts, states, strict=True):
            slot, value = bucket.layout.slots[part.slot], known.get(key)
            # A 0-dim parameter's own state is 0-dim too; a count of steps is no element of it.
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
                    f"the state {key!r} that the {type(optimizer).__name__} brings along is"
                    f" {value!r} for {slot.name} and {state[key]!r} for the parameters before it;"
                    " parameters of one group are stepped together. Give a fresh optimizer."
                )
    return state
