"""The base of Hadal's own optimizers, and of elementwise ones, whose updates are made in blocks.

If the update of an element depends only on that element's gradient and state, a slice of elements
may be split anywhere. So a block can be cast, scaled, stepped and written back while it is in the
cache.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple, overload

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

State = dict[str, Any]
Group = dict[str, Any]


class OwnOptimizer(Optimizer, ABC):
    """The base class of Hadal's optimizers, which step like torch's if no engine steps them."""

    @abstractmethod
    def step_parameter(self, parameter: nn.Parameter, gradient: Tensor, group: Group) -> None:
        """Make one update of a whole parameter; may overwrite `gradient`."""

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Make one update of every parameter that has a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self.step_parameter(parameter, _laid_like(parameter), group)
        return loss


def _laid_like(parameter: nn.Parameter) -> Tensor:
    """Return a parameter's gradient with its strides, as fused kernels traverse both in memory."""
    gradient = parameter.grad
    assert gradient is not None  # the caller has checked
    if gradient.layout != torch.strided or gradient.stride() == parameter.stride():
        return gradient
    return torch.empty_like(parameter, dtype=gradient.dtype).copy_(gradient)


Zeros = Callable[[], Tensor]
"""A function that returns zeros of the slice's shape in the dtype of optimizer state."""


class Scaling(NamedTuple):
    """The scaling of gradients in an update: float32 scalars on their device."""

    divisor: Tensor | None = None
    """The divisor of gradients; None: they are not divided."""
    overflowed: Tensor | None = None
    """A flag: 1 leaves everything unchanged; None or 0 skips nothing."""


class Block(NamedTuple):
    """One block of an update: tensors of one dtype and length."""

    values: Tensor
    gradient: Tensor
    """The gradient, which may be overwritten."""
    state: Sequence[Tensor]
    number: Tensor | None = None
    """The number of the update as a float32 scalar."""


def _by_stepper(blocks: Sequence[Block], scaling: Scaling) -> None:
    raise NotImplementedError("an update that is not made in blocks")


class SliceUpdate(NamedTuple):
    """One update of a slice of elements: begun once, then applied to each of its blocks."""

    state: tuple[Tensor, ...]
    """The optimizer's state, each as long as the slice."""
    apply: Callable[[Sequence[Block], Scaling], None] = _by_stepper
    """The function that updates blocks in place, all of one dtype. If several updates have an equal
    one, it may get the blocks of all of them. Without it the stepper makes the update itself."""
    in_float32: bool = False
    """True if 16-bit blocks must be cast first, because `apply` rounds more than once."""
    number: Tensor | None = None
    """The number of updates of this slice, a float32 scalar of the state (see `count_up`)."""


Beginner = Callable[[Group, State, Zeros], SliceUpdate]
"""A function that begins an update of one slice, and creates its state on first use."""


def count_up(updates: Iterable[SliceUpdate]) -> None:
    """Increment the counts of begun updates, before they are applied."""
    by_device: dict[torch.device, list[Tensor]] = {}
    for update in updates:
        if update.number is not None:
            by_device.setdefault(update.number.device, []).append(update.number)
    for counts in by_device.values():
        torch._foreach_add_(counts, 1.0)


class ElementwiseOptimizer(OwnOptimizer):
    """An optimizer of Hadal whose update is made block by block, or by its own `step`."""

    @abstractmethod
    def begin(self, group: Group, state: State, zeros: Zeros) -> SliceUpdate:
        """Begin an update of one slice, and create its state on first use."""

    def step_parameter(self, parameter: nn.Parameter, gradient: Tensor, group: Group) -> None:
        """Make one update of a whole parameter."""
        values = parameter.detach()
        update = self.begin(group, self.state[parameter], partial(torch.zeros_like, values))
        count_up([update])
        update.apply([Block(values, gradient, update.state, update.number)], Scaling())
