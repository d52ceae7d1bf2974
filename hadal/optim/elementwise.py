"""Updates that can be made a block of elements at a time, and optimizers of our own that are such.

Where an update of one element looks at that element's gradient and state alone, a run of elements
may be cut anywhere. So a block can be cast, scaled, stepped and written back while it lies in the
cache.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, overload

import torch
from torch import Tensor
from torch.optim import Optimizer

State = dict[str, Any]
Group = dict[str, Any]
Zeros = Callable[[], Tensor]
"""Makes a tensor of zeros like the run, in the dtype that state is kept in."""


class Update(NamedTuple):
    """One update of one run of elements: begun once, then applied to each block of the run."""

    state: tuple[Tensor, ...]
    """What the optimizer remembers, each as long as the run."""
    apply: Callable[[Tensor, Tensor, Sequence[Tensor], Tensor | None], None]
    """Change a block in place: its values, gradient, state, and the gradient's divisor (a float32
    scalar tensor, or None). All but the last have one dtype. The gradient may be overwritten."""
    in_float32: bool = False
    """Whether blocks of 16 bits must be cast, because `apply` rounds more than once in theirs."""


Beginner = Callable[[Group, State, Zeros], Update]
"""Begins an update of one run: makes its state at first use, and counts."""


class ElementwiseOptimizer(Optimizer, ABC):
    """An optimizer of our own that tells its update block by block, and can step by itself too."""

    @abstractmethod
    def begin(self, group: Group, state: State, zeros: Zeros) -> Update:
        """Begin an update of one run: make its state at first use, and count."""

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
                    values = parameter.detach()
                    state = self.state[parameter]
                    update = self.begin(group, state, partial(torch.zeros_like, values))
                    update.apply(values, parameter.grad, update.state, None)
        return loss
