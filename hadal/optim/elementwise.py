"""Updates that can be made a block of elements at a time, and optimizers of our own that are such.

Where an update of one element looks at that element's gradient and state alone, a run of elements
may be cut anywhere. So a block can be cast, scaled, stepped and written back while it lies in the
cache.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from hadal.optim.own import Group, OwnOptimizer, State

Zeros = Callable[[], Tensor]
"""Makes a tensor of zeros like the run, in the dtype that state is kept in."""


class Scaling(NamedTuple):
    """What an update applies to gradients: float32 scalars of their device."""

    divisor: Tensor | None = None
    """Divides them; None: nothing does."""
    overflowed: Tensor | None = None
    """Leaves everything as it is if it is 1; None, or 0: nothing is skipped."""


class Block(NamedTuple):
    """What an update changes at a time: tensors of one dtype and length."""

    values: Tensor
    gradient: Tensor
    """May be overwritten."""
    state: Sequence[Tensor]
    number: Tensor | None = None
    """The number of the update, as a float32 scalar."""


class Update(NamedTuple):
    """One update of one run of elements: begun once, then applied to each block of the run."""

    state: tuple[Tensor, ...]
    """What the optimizer remembers, each as long as the run."""
    apply: Callable[[Sequence[Block], Scaling], None]
    """Changes blocks in place, all of one dtype. What is equal in several updates may be given
    the blocks of all of them."""
    in_float32: bool = False
    """Whether blocks of 16 bits must be cast, because `apply` rounds more than once in theirs."""
    number: Tensor | None = None
    """How many updates there were of this run, as a float32 scalar of the state; `count_up`."""


Beginner = Callable[[Group, State, Zeros], Update]
"""Begins an update of one run: makes its state at first use."""


def count_up(updates: Iterable[Update]) -> None:
    """Count updates that have begun, before they are applied."""
    by_device: dict[torch.device, list[Tensor]] = {}
    for update in updates:
        if update.number is not None:
            by_device.setdefault(update.number.device, []).append(update.number)
    for counts in by_device.values():
        torch._foreach_add_(counts, 1.0)


class ElementwiseOptimizer(OwnOptimizer):
    """An optimizer of our own that tells its update block by block, and can step by itself too."""

    @abstractmethod
    def begin(self, group: Group, state: State, zeros: Zeros) -> Update:
        """Begin an update of one run: make its state at first use."""

    def step_parameter(self, parameter: nn.Parameter, gradient: Tensor, group: Group) -> None:
        """Make one update of a whole parameter."""
        values = parameter.detach()
        update = self.begin(group, self.state[parameter], partial(torch.zeros_like, values))
        count_up([update])
        update.apply([Block(values, gradient, update.state, update.number)], Scaling())
