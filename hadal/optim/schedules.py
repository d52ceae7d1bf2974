"""Learning-rate schedules of the `scheduler` section: pure curves, and objects that apply them.

In every curve `n` counts the schedule's steps so far (0 before the first) and `t` is n - 1.
"""

from __future__ import annotations

import inspect
import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from hadal.errors import OptimizerError, UsageError

_log = logging.getLogger(__name__)

SAMPLES = "increment"
"""The argument by which Megatron's schedules count samples in each step."""

Rates = float | Sequence[float]
# OneCycle's constant second beta while it varies the first.
_SECOND_BETA = 0.99


class Schedule(ABC):
    """A schedule that sets each param group's learning rate after each update.

    It owns the number of steps so far; `rate` is the curve. `last_batch_iteration` is the number
    of the last step, -1 before the first: a schedule created with a larger one continues there.
    """

    def __init__(self, optimizer: Optimizer, last_batch_iteration: int = -1) -> None:
        self.optimizer = optimizer
        # Groups that are added later keep their own rates, as under a constant schedule.
        self._known = len(groups_of(optimizer))
        self.last_batch_iteration = last_batch_iteration
        self._write()

    @abstractmethod
    def rate(self, n: int, group: int) -> float:
        """Return the learning rate of param group number `group` after `n` steps."""

    def step(self, last_batch_iteration: int | None = None) -> None:
        """Advance by one update (or to a given one) and write the new rates."""
        if last_batch_iteration is None:
            last_batch_iteration = self.last_batch_iteration + 1
        self.last_batch_iteration = last_batch_iteration
        self._write()

    def _write(self) -> None:
        for group, rate in zip(self.optimizer.param_groups, self.get_lr(), strict=False):
            # A rate in a tensor stays in it: captured steps read it there.
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate

    def get_lr(self) -> list[float]:
        """Return the current rate of each param group."""
        n = self.last_batch_iteration + 1
        return [self.rate(n, index) for index in range(self._known)]

    def get_last_lr(self) -> list[float]:
        """Return the rates that were written last."""
        return [float(group["lr"]) for group in self.optimizer.param_groups]

    def state_dict(self) -> dict[str, Any]:
        """Return the state for `load_state_dict`."""
        return {"last_batch_iteration": self.last_batch_iteration}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved state."""
        self.last_batch_iteration = int(state["last_batch_iteration"])
        self._write()


def groups_of(optimizer: Any) -> list[dict[str, Any]]:
    """Return an optimizer's param groups.

    Raises:
        OptimizerError: it has none.
    """
    groups: list[dict[str, Any]] | None = getattr(optimizer, "param_groups", None)
    if groups is None:
        raise OptimizerError(
            f"a schedule was given a {type(optimizer).__name__}, which has no param_groups; pass"
            " the optimizer that initialize returns, or torch's own"
        )
    return groups


def _per_group(optimizer: Optimizer, value: Rates, key: str) -> list[float]:
    """Return one value for each param group."""
    groups = len(groups_of(optimizer))
    if not isinstance(value, (list, tuple)):
        return [float(value)] * groups  # type: ignore[arg-type]
    if len(value) != groups:
        raise OptimizerError(
            f"scheduler.params.{key} lists {len(value)} values for {groups} param groups; use"
            " one value, or one for each group"
        )
    return [float(item) for item in value]


def _count(value: Any, key: str, least: int = 1) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise OptimizerError(
            f"scheduler.params.{key} must be an integer >= {least}, found {value!r}"
        )
    return value


def _length_of(total: int) -> int:
    if not total > 0:
        raise OptimizerError(f"scheduler.params.total_num_steps must be > 0, found {total!r}")
    return total


class _WarmUp(Schedule):
    """A schedule that begins with a warm-up of `warmup_num_steps`, of `warmup_type`."""

    def _set_warm_up(self, steps: int, kind: str) -> None:
        # The logarithm divides by ln(length), so 0 and 1 steps count as 2.
        self.warmup_num_steps = max(2, _count(steps, "warmup_num_steps", 0))
        if kind not in ("log", "linear"):
            _log.warning('scheduler.params.warmup_type %r is unknown, "log" is used', kind)
        self.warmup_type = "linear" if kind == "linear" else "log"

    def _warmed_up(self, t: int) -> float:
        """Return the completed fraction of the warm-up at t < length, from 0 to 1."""
        length = self.warmup_num_steps
        return t / length if self.warmup_type == "linear" else math.log(t + 1) / math.log(length)


class WarmupLR(_WarmUp):
    """A schedule from a low rate to a high one in `warmup_num_steps`, then constant."""

    def __init__(
        self,
        optimizer: Optimizer,
        warmup_min_lr: Rates = 0.0,
        warmup_max_lr: Rates | None = None,
        warmup_num_steps: int = 1000,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        own = [float(group["lr"]) for group in groups_of(optimizer)]
        self.min_lrs = _per_group(optimizer, warmup_min_lr, "warmup_min_lr")
        high = own if warmup_max_lr is None else warmup_max_lr
        self.max_lrs = _per_group(optimizer, high, "warmup_max_lr")
        self._set_warm_up(warmup_num_steps, warmup_type)
        super().__init__(optimizer, last_batch_iteration)

    def share(self, t: int) -> float:
        """Return the position between the low (0) and the high (1) rate."""
        return self._warmed_up(t) if t < self.warmup_num_steps else 1.0

    def rate(self, n: int, group: int) -> float:
        """Return the rate of a param group after `n` steps."""
        low, high = self.min_lrs[group], self.max_lrs[group]
        return low if n == 0 else low + (high - low) * self.share(n - 1)


class WarmupDecayLR(WarmupLR):
    """`WarmupLR` followed by a linear decay to the low rate at `total_num_steps`."""

    def __init__(
        self,
        optimizer: Optimizer,
        total_num_steps: int,
        warmup_min_lr: Rates = 0.0,
        warmup_max_lr: Rates = 0.001,
        warmup_num_steps: int = 1000,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        self.total_num_steps = _length_of(total_num_steps)
        rates = warmup_min_lr, warmup_max_lr
        super().__init__(optimizer, *rates, warmup_num_steps, warmup_type, last_batch_iteration)
        if total_num_steps < warmup_num_steps:
            _log.warning(
                "scheduler.params.total_num_steps %d is below warmup_num_steps %d",
                total_num_steps,
                warmup_num_steps,
            )

    def share(self, t: int) -> float:
        """Return the position between the low (0) and the high (1) rate."""
        length, total = self.warmup_num_steps, self.total_num_steps
        return (
            self._warmed_up(t) if t < length else max(0.0, (total - t) / max(1.0, total - length))
        )


class WarmupCosineLR(_WarmUp):
    """A warm-up to each group's own rate, then half a cosine down (Loshchilov 2017)."""

    def __init__(
        self,
        optimizer: Optimizer,
        total_num_steps: int,
        warmup_min_ratio: float = 0.0,
        warmup_num_steps: int = 1000,
        cos_min_ratio: float = 0.0001,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        self.total_num_steps = _length_of(total_num_steps)
        self.warmup_min_ratio = warmup_min_ratio
        self.cos_min_ratio = cos_min_ratio
        self._set_warm_up(warmup_num_steps, warmup_type)
        self.org_lrs = [float(group["lr"]) for group in groups_of(optimizer)]
        super().__init__(optimizer, last_batch_iteration)

    def ratio(self, t: int) -> float:
        """Return the fraction of a group's own rate."""
        length, first, last = self.warmup_num_steps, self.warmup_min_ratio, self.cos_min_ratio
        if t < length:
            return first + (1.0 - first) * self._warmed_up(t)
        done = min(1.0, (t - length + 1) / max(1, self.total_num_steps - length))
        return max(0.0, last + (1.0 - last) * (1.0 + math.cos(math.pi * done)) / 2.0)

    def get_lr_ratio(self) -> float:
        """Return the current fraction of each group's own rate."""
        return 0.0 if self.last_batch_iteration < 0 else self.ratio(self.last_batch_iteration)

    def rate(self, n: int, group: int) -> float:
        """Return the rate of a param group after `n` steps."""
        return 0.0 if n == 0 else self.org_lrs[group] * self.ratio(n - 1)


class LRRangeTest(Schedule):
    """A growing rate, to find the largest that still trains (Smith 2017)."""

    def __init__(
        self,
        optimizer: Optimizer,
        lr_range_test_min_lr: Rates = 1e-3,
        lr_range_test_step_size: int = 2000,
        lr_range_test_step_rate: float = 1.0,
        lr_range_test_staircase: bool = False,
        last_batch_iteration: int = -1,
    ) -> None:
        self.min_lr = _per_group(optimizer, lr_range_test_min_lr, "lr_range_test_min_lr")
        self._size = _count(lr_range_test_step_size, "lr_range_test_step_size")
        self._growth = lr_range_test_step_rate
        self._stairs = lr_range_test_staircase
        super().__init__(optimizer, last_batch_iteration)

    def rate(self, n: int, group: int) -> float:
        """Return the rate of a param group after `n` steps."""
        interval = n // self._size if self._stairs else n / self._size
        return self.min_lr[group] * (1.0 + self._growth * interval)


class OneCycle(Schedule):
    """Up and down once, with momentum the other way, then a slow decay (Smith 2018)."""

    def __init__(  # noqa: PLR0913 - the section's own keys
        self,
        optimizer: Optimizer,
        cycle_min_lr: Rates,
        cycle_max_lr: Rates,
        decay_lr_rate: float = 0.0,
        cycle_first_step_size: int = 2000,
        cycle_second_step_size: int | None = None,
        cycle_first_stair_count: int = 0,
        cycle_second_stair_count: int | None = None,
        decay_step_size: int = 0,
        cycle_momentum: bool = True,
        cycle_min_mom: Rates = 0.8,
        cycle_max_mom: Rates = 0.9,
        decay_mom_rate: float = 0.0,
        last_batch_iteration: int = -1,
    ) -> None:
        first = _count(cycle_first_step_size, "cycle_first_step_size")
        second = first if cycle_second_step_size is None else cycle_second_step_size
        self._sizes = (first, _count(second, "cycle_second_step_size", least=0))
        self.total_size = sum(self._sizes)
        self.step_ratio = first / self.total_size
        stairs = cycle_second_stair_count
        stairs = cycle_first_stair_count if stairs is None else stairs
        self._stairs = (cycle_first_stair_count, stairs)
        self.min_lrs = _per_group(optimizer, cycle_min_lr, "cycle_min_lr")
        self.max_lrs = _per_group(optimizer, cycle_max_lr, "cycle_max_lr")
        self._low_momentum = _per_group(optimizer, cycle_min_mom, "cycle_min_mom")
        self._high_momentum = _per_group(optimizer, cycle_max_mom, "cycle_max_mom")
        self._decay = (decay_step_size, decay_lr_rate, decay_mom_rate)
        self.cycle_momentum = cycle_momentum
        if cycle_momentum and not all("betas" in group for group in groups_of(optimizer)):
            _log.warning(
                "scheduler.params.cycle_momentum has no effect: %s has no betas; set it to false to"
                " silence this warning",
                type(optimizer).__name__,
            )
            self.cycle_momentum = False
        super().__init__(optimizer, last_batch_iteration)

    def position(self, n: int) -> float:
        """Return the position in the cycle: 0 at both ends, 1 at the peak."""
        first, second = self._sizes
        rising = n <= first
        done, size = (n, first) if rising else (first + second - n, second)
        if n == first + second:
            return 0.0
        stairs = self._stairs[0 if rising else 1]
        return math.floor(done * stairs / size) / stairs if stairs else done / size

    def _decay_intervals(self, n: int) -> float:
        behind = n - sum(self._sizes)
        return behind / self._decay[0] if self._decay[0] else 0.0

    def rate(self, n: int, group: int) -> float:
        """Return the rate of a param group after `n` steps."""
        low, high = self.min_lrs[group], self.max_lrs[group]
        if n > sum(self._sizes):
            return low / (1.0 + self._decay[1] * self._decay_intervals(n))
        return low + (high - low) * self.position(n)

    def momentum(self, n: int, group: int) -> float:
        """Return the first beta of a param group after `n` steps."""
        low, high = self._low_momentum[group], self._high_momentum[group]
        if n > sum(self._sizes):
            return high * (1.0 + self._decay[2] * self._decay_intervals(n))
        return high - (high - low) * self.position(n)

    def _write(self) -> None:
        super()._write()
        pairs = zip(self.optimizer.param_groups, self.get_mom() or (), strict=False)
        for index, (group, (first, second)) in enumerate(pairs):
            # As in DeepSpeed, training starts with the lower one, although `get_mom` differs.
            first = self._low_momentum[index] if self.last_batch_iteration < 0 else first
            group["betas"] = (first, second, *group["betas"][2:])

    def get_mom(self) -> list[tuple[float, float]] | None:
        """Return the current first two betas of each param group; None if they do not vary."""
        if not self.cycle_momentum:
            return None
        n = self.last_batch_iteration + 1
        return [(self.momentum(n, index), _SECOND_BETA) for index in range(self._known)]


_NATIVE: dict[str, type[Schedule]] = {
    cls.__name__: cls for cls in (LRRangeTest, OneCycle, WarmupLR, WarmupDecayLR, WarmupCosineLR)
}


def needs_metric(schedule: object) -> bool:
    """Return whether each step of a schedule takes a metric, such as a validation loss."""
    return isinstance(schedule, torch.optim.lr_scheduler.ReduceLROnPlateau)


def required_arguments(schedule: object) -> tuple[str, ...]:
    """Return the names of the arguments that each step of a schedule needs."""
    kind: Any = type(schedule)
    return _required_by(kind)


@cache
def _required_by(kind: Any) -> tuple[str, ...]:
    try:
        _, *given = inspect.signature(kind.step).parameters.values()
    except (AttributeError, TypeError, ValueError):  # not written in Python
        return ()
    variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return tuple(p.name for p in given if p.default is p.empty and p.kind not in variable)


def check_step_arguments(schedule: Any, given: Mapping[str, Any]) -> None:
    """Check the arguments of a schedule's step before the update that it follows.

    The number of samples (`SAMPLES`) may be missing, and the metric of `needs_metric`.

    Raises:
        UsageError: there is no schedule for them, or its step does not take them or needs others.
    """
    required = () if needs_metric(schedule) else required_arguments(schedule)
    if not given and set(required) <= {SAMPLES}:
        return
    where = f"engine.step() was given {dict(given)!r} for the schedule"
    if schedule is None:
        raise UsageError(f"{where}, but there is no schedule; leave the arguments out")
    try:
        inspect.signature(schedule.step).bind(**given)
    except TypeError as error:
        raise UsageError(
            f"{where}, which does not fit {type(schedule).__name__}.step: {error}. Pass the"
            " arguments of its step as engine.step(schedule_arguments={...})"
        ) from None


def restorer(schedule: Any, state: Mapping[str, Any]) -> Callable[[], None]:
    """Return a function that puts a schedule back into its present state, which is `state`.

    `load_state_dict` alone may not: Megatron's schedule adds the loaded steps to its own.
    """
    own = {k: copy(v) if isinstance(v, (list, dict)) else v for k, v in vars(schedule).items()}

    def restore() -> None:
        schedule.load_state_dict(state)
        vars(schedule).update(own)

    return restore


def build_schedule(
    kind: str, params: Mapping[str, Any], optimizer: Optimizer
) -> Schedule | LRScheduler:
    """Build the schedule that the `scheduler` section names.

    Raises:
        OptimizerError: an unknown schedule, or parameters that it does not accept.
    """
    made: Any = _NATIVE.get(kind) or getattr(torch.optim.lr_scheduler, kind, None)
    if not inspect.isclass(made) or not issubclass(made, (Schedule, LRScheduler)):
        raise OptimizerError(
            f"scheduler.type {kind!r} is unknown; expected one of {', '.join(_NATIVE)} or a class"
            " of torch.optim.lr_scheduler"
        )
    try:
        inspect.signature(made).bind(optimizer, **params)
    except TypeError as error:
        raise OptimizerError(f"scheduler.params does not fit {kind}: {error}") from None
    try:
        schedule: Schedule | LRScheduler = made(optimizer, **params)
    except (TypeError, ValueError) as error:
        if isinstance(error, OptimizerError):
            raise
        raise OptimizerError(f"{kind} cannot be created with {dict(params)}: {error}") from error
    return schedule
