"""The base of Hadal's own optimizers, and of elementwise ones, whose updates are made in blocks.

If the update of an element depends only on that element's gradient and state, a slice of elements
may be split anywhere. So a block can be cast, scaled, stepped and written back while it is in the
cache.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, overload

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hadal.device import current_device, fused_step_
from hadal.errors import OptimizerError

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


# ---- torch's optimizers: its fused kernels, with its classes' state ------------------------------

_FLAGS = ("amsgrad", "maximize", "nesterov")


def begin_adam(
    group: Group,
    state: State,
    zeros: Zeros,
    *,
    decoupled: bool | None = None,
    corrected: bool = True,
) -> SliceUpdate:
    """Begin an update of Adam (Kingma & Ba 2015) or AdamW (Loshchilov & Hutter 2019).

    The group has `decoupled_weight_decay` if `decoupled` is None.
    """
    names = ["exp_avg", "exp_avg_sq"] + ["max_exp_avg_sq"] * bool(group["amsgrad"])
    for name in names:
        if name not in state:
            state[name] = zeros()
    beta1, beta2 = group["betas"]
    decoupled = group.get("decoupled_weight_decay") if decoupled is None else decoupled
    numbers = _numbers(group, "lr eps weight_decay amsgrad maximize", beta1=beta1, beta2=beta2)
    apply = _Fused("adamw" if decoupled else "adam", numbers, corrected)
    count = _count(state, state["exp_avg"].device)
    return SliceUpdate(tuple(state[name] for name in names), apply, number=count)


def begin_sgd(group: Group, state: State, zeros: Zeros) -> SliceUpdate:
    """Begin an update of SGD, with the momentum of Sutskever et al. 2013 if there is any."""
    is_first = state.get("momentum_buffer") is None
    if group["momentum"] and is_first:
        state["momentum_buffer"] = zeros()
    momentum = (state["momentum_buffer"],) if group["momentum"] else ()
    names = "lr momentum dampening weight_decay nesterov maximize"
    apply = _Fused("sgd", _numbers(group, names, is_first_step=is_first))
    # The kernel is wrong for 16 bits on a CPU (torch 2.13): it skips elements.
    return SliceUpdate(momentum, apply, in_float32=True)


def begin_adagrad(group: Group, state: State, zeros: Zeros) -> SliceUpdate:
    """Begin an update of Adagrad (Duchi et al. 2011)."""
    if "sum" not in state:
        state["sum"] = zeros().fill_(group["initial_accumulator_value"])
    apply = _Fused("adagrad", _numbers(group, "lr lr_decay eps weight_decay maximize"))
    count = _count(state, state["sum"].device)
    return SliceUpdate((state["sum"],), apply, number=count)


_Numbers = tuple[tuple[str, float], ...]


def _numbers(group: Group, names: str, **more: float) -> _Numbers:
    """Return numbers of a param group, whose rates may be tensors, and `more`, by name."""
    given = {name: group[name] for name in names.split()}
    found = {n: bool(value) if n in _FLAGS else float(value) for n, value in given.items()}
    return (*found.items(), *more.items())


@dataclass(frozen=True, slots=True)
class _Fused:
    """An update in one of torch's kernels; equal ones are made together."""

    kernel: str
    numbers: _Numbers
    corrected: bool = True

    def __call__(self, blocks: Sequence[Block], scaling: Scaling) -> None:
        counts = [block.number for block in blocks if block.number is not None]
        if not self.corrected:
            # After infinitely many updates there is nothing to correct.
            counts = [torch.full_like(counts[0], math.inf)] * len(counts)
        rows = [(block.values, block.gradient, *block.state) for block in blocks]
        lists = list(zip(*rows, strict=True))
        fused_step_(self.kernel, dict(self.numbers), lists, counts, *scaling)


def _count(state: State, device: torch.device) -> Tensor:
    """Return the number of updates as a float32 scalar on the kernels' device."""
    count = state.get("step", 0)
    if not isinstance(count, Tensor):
        count = torch.full((), float(count), device=device)
    counted: Tensor = count.to(device, torch.float32)
    state["step"] = counted
    return counted


BEGINNERS: Mapping[type[Optimizer], Beginner] = {
    torch.optim.Adam: begin_adam,
    torch.optim.AdamW: partial(begin_adam, decoupled=True),
    torch.optim.Adagrad: begin_adagrad,
    torch.optim.SGD: begin_sgd,
}


class UncorrectedAdam(ElementwiseOptimizer):
    """Adam or AdamW without bias correction: moments are not divided by 1 - beta^t.

    Param groups and state have the same names as in torch.optim.Adam.
    """

    def __init__(
        self,
        params: Iterable[nn.Parameter] | Iterable[dict[str, Any]],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        decoupled_weight_decay: bool = True,
    ) -> None:
        settings: dict[str, Any] = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "amsgrad": amsgrad,
            "maximize": maximize,
            "decoupled_weight_decay": decoupled_weight_decay,
        }
        torch.optim.Adam([torch.zeros(1)], **settings)  # validates the numbers
        super().__init__(params, settings)

    def begin(self, group: Group, state: State, zeros: Zeros) -> SliceUpdate:
        """Begin an update of one slice."""
        return begin_adam(group, state, zeros, corrected=False)


def adam(
    groups: Any,
    *,
    adam_w_mode: bool = True,
    torch_adam: bool = False,
    bias_correction: bool = True,
    **arguments: Any,
) -> Optimizer:
    """Build Adam with decoupled weight decay, unless `adam_w_mode` is false.

    Raises:
        OptimizerError: `capturable` is set on a CPU.
    """
    if not torch_adam:
        arguments.setdefault("weight_decay", 0.0)
    if arguments.get("capturable") and current_device().type == "cpu":
        raise OptimizerError(
            "optimizer.params.capturable is for updates that an accelerator records and replays,"
            " but this process computes on a CPU: remove it"
        )
    if not bias_correction:
        return UncorrectedAdam(groups, decoupled_weight_decay=adam_w_mode, **arguments)
    return (torch.optim.AdamW if adam_w_mode else torch.optim.Adam)(groups, **arguments)


def adamw(groups: Any, *, adam_w_mode: bool = True, **arguments: Any) -> Optimizer:
    """Build AdamW, whose weight decay is always decoupled; see `adam`."""
    return adam(groups, **arguments)
