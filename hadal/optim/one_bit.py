"""1-bit Adam (Tang 2021), 1-bit Lamb (Li 2021) and 0/1 Adam (Lu 2022): their formulas and options.

All of them learn the variance v while gradients are averaged exactly, and freeze it from then on.
With a frozen variance the update is linear in the momentum m, so m can be sent as signs: the error
of these is sent later and cancels out.

    m = beta1 * m + (1 - beta1) * gradient
    v = beta2 * v + (1 - beta2) * gradient^2
    w -= lr * (m / (sqrt(v) + eps) + weight_decay * w)

Moments have no bias correction. Communication is the steppers' job; an optimizer that no engine
steps sees all gradients itself and sends nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hadal.errors import OptimizerError
from hadal.optim.elementwise import Group, OwnOptimizer, State


class SignOptimizer(OwnOptimizer):
    """The base of all three: `exp_avg`, `exp_avg_sq` and `step` of each tensor; group options.

    A group may hold an `exp_avg_mask` of the shape of each of its parameters (or one that expands
    to it), by which the momentum is multiplied after each exchange. Otherwise elements that never
    get a gradient would get the others' magnitude, with a sign.

    Raises:
        OptimizerError: `amsgrad` is given, which they do not support.
    """

    freeze_step: int

    def __init__(
        self, params: Any, amsgrad: bool, betas: tuple[float, float], **settings: float
    ) -> None:
        name = type(self).__name__
        if amsgrad:
            raise OptimizerError(f"{name} does not support amsgrad; remove it or set it to false")
        super().__init__(params, {**settings, "betas": tuple(betas)})

    @property
    def last_of_variance(self) -> int:
        """The last update that may learn v: at least the first."""
        return max(1, self.freeze_step)

    def learns_variance(self, number: int) -> bool:
        """Return whether update `number` (from 1) averages gradients exactly, to learn v."""
        return number <= self.last_of_variance

    def step_parameter(self, parameter: nn.Parameter, gradient: Tensor, group: Group) -> None:
        """Make one update of a whole parameter from the averaged gradient."""
        state = begin_state(self.state[parameter], parameter)
        state["step"] += 1
        momentum = state["exp_avg"].lerp(gradient, 1 - group["betas"][0])
        learns = self.learns_variance(int(state["step"]))
        if learns:
            state["exp_avg"].copy_(momentum)
            learn_second(state["exp_avg_sq"], gradient, group)
        else:
            self.take(self.renewed(state), momentum, group)
        self.move_whole(parameter.detach(), state, group, learns=learns)

    def renewed(self, state: State) -> Sequence[Tensor]:
        """Return the state that `take` updates, created if missing."""
        return [state["exp_avg"]]

    def take(self, renewed: Sequence[Tensor], momentum: Tensor, group: Group) -> None:
        """Store a new momentum while the variance is frozen; all tensors have one shape."""
        renewed[0].copy_(momentum)

    def move_whole(self, values: Tensor, state: State, group: Group, *, learns: bool) -> None:
        """Update the values of a whole parameter; `learns`: the variance has just been learnt."""
        move(values, state["exp_avg"], state["exp_avg_sq"], group)


class OneBitAdam(SignOptimizer):
    """Adam whose momentum is sent as signs from update `freeze_step` + 1 on."""

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        freeze_step: int = 100000,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        eps_inside_sqrt: bool = False,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
    ) -> None:
        settings = {"lr": lr, "eps": eps, "eps_inside_sqrt": eps_inside_sqrt}
        super().__init__(params, amsgrad, betas, **settings, weight_decay=weight_decay)
        self.freeze_step = freeze_step


class OneBitLamb(SignOptimizer):
    """Lamb whose momentum is sent as signs from update `freeze_step` + 1 on.

    From then on a parameter's trust ratio is its running average (`coeff_beta`) over the earlier
    updates, times a factor: the change of the variance since then, within [`factor_min`,
    `factor_max`], which changes by at most a fraction `factor_threshold` per update.
    """

    def __init__(  # noqa: PLR0913 - one argument for each key of its section
        self,
        params: Any,
        lr: float = 1e-3,
        freeze_step: int = 100000,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        eps_inside_sqrt: bool = False,
        weight_decay: float = 0.0,
        max_coeff: float = 10.0,
        min_coeff: float = 0.01,
        amsgrad: bool = False,
        coeff_beta: float = 0.9,
        factor_max: float = 4.0,
        factor_min: float = 0.5,
        factor_threshold: float = 0.1,
    ) -> None:
        settings = {"lr": lr, "eps": eps, "eps_inside_sqrt": eps_inside_sqrt}
        settings |= {"weight_decay": weight_decay, "max_coeff": max_coeff, "min_coeff": min_coeff}
        super().__init__(params, amsgrad, betas, **settings)
        self.freeze_step = freeze_step
        self.coeff_beta = coeff_beta
        self.factor_max = factor_max
        self.factor_min = factor_min
        self.factor_threshold = factor_threshold
        self._ratios: dict[int, Tensor] = {}

    def get_lamb_coeffs(self) -> list[float]:
        """Return each parameter's ratio in the last update; programs record their distribution."""
        states = [id(state) for state in self.state.values()]
        return [float(self._ratios[one]) for one in states if one in self._ratios]

    def step_parameter(self, parameter: nn.Parameter, gradient: Tensor, group: Group) -> None:
        """Make one update of a whole parameter from the averaged gradient."""
        if parameter.numel():
            super().step_parameter(parameter, gradient, group)

    def renewed(self, state: State) -> Sequence[Tensor]:
        """Return the momentum, and the variance as it would be without the freeze."""
        if "exp_avg_sq_fresh" not in state:
            state["exp_avg_sq_fresh"] = state["exp_avg_sq"].clone()
        return [state["exp_avg"], state["exp_avg_sq_fresh"]]

    def take(self, renewed: Sequence[Tensor], momentum: Tensor, group: Group) -> None:
        """Store a new momentum, and update the fresh variance with the gradient in it."""
        first, fresh = renewed
        beta1, beta2 = group["betas"]
        gradient = (momentum - beta1 * first).div_(1 - beta1)
        fresh.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        first.copy_(momentum)

    def move_whole(self, values: Tensor, state: State, group: Group, *, learns: bool) -> None:
        """Update the values of a whole parameter; `learns`: the variance has just been learnt."""
        if learns:
            self._move_by_ratio(values, state, group)
        else:
            self._move_by_factor(values, state, group)

    def _move_by_ratio(self, values: Tensor, state: State, group: Group) -> None:
        """Update as Lamb does, and add the ratio to its running average."""
        for key in ("exp_avg_sq_fresh", "last_factor"):
            # These belong to an earlier frozen variance; the next freeze starts over.
            state.pop(key, None)
        update = state["exp_avg"] / divisor_of(state["exp_avg_sq"], group)
        if group["weight_decay"]:
            update.add_(values, alpha=group["weight_decay"])
        weight, length = values.norm(), update.norm()
        ratio = (weight / length).clamp(group["min_coeff"], group["max_coeff"])
        ratio = torch.where((weight > 0) & (length > 0), ratio, 1.0)
        known = _scalar(state, "lamb_coeff_freeze", 0.0, values)
        # A ratio of 1 means there is none.
        known.copy_(torch.where(ratio == 1, known, torch.lerp(ratio, known, self.coeff_beta)))
        self._ratios[id(state)] = ratio
        values.sub_(update.mul_(ratio * group["lr"]))

    def _move_by_factor(self, values: Tensor, state: State, group: Group) -> None:
        """Update as Lamb does with the ratio's average, times the change of the variance since."""
        divisor = divisor_of(state["exp_avg_sq"], group)
        factor = (divisor / divisor_of(state["exp_avg_sq_fresh"], group)).amax()
        update = state["exp_avg"] / divisor
        if group["weight_decay"]:
            length = update.norm()
            update.add_(values, alpha=group["weight_decay"])
            # The variance affects only this part of the update.
            share = (length / update.norm()).clamp(max=1).nan_to_num(1.0)
            factor = factor * share + (1 - share)
        last = _scalar(state, "last_factor", 1.0, values)
        factor = factor.clamp(self.factor_min, self.factor_max)
        threshold = self.factor_threshold
        last.copy_(factor.clamp(last * (1 - threshold), last * (1 + threshold)))
        ratio = _scalar(state, "lamb_coeff_freeze", 0.0, values) * last
        self._ratios[id(state)] = ratio
        values.sub_(update.mul_(ratio * group["lr"]))


class ZeroOneAdam(SignOptimizer):
    """Adam that learns the variance at growing intervals, and then exchanges at growing intervals.

    Up to update `var_freeze_step` some updates average gradients exactly and learn v from them; at
    the others gradients are sent as signs. The interval between the former doubles after each
    `var_update_scaler` of them. After that each rank makes local updates, and the sum of their
    lr * m is sent as signs: at first at every update; the interval doubles after each
    `local_step_scaler` updates, up to `local_step_clipper`.
    """

    def __init__(  # noqa: PLR0913 - one argument for each key of its section
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        eps_inside_sqrt: bool = False,
        weight_decay: float = 0.0,
        var_freeze_step: int = 100000,
        var_update_scaler: int = 16,
        local_step_scaler: int = 32678,
        local_step_clipper: int = 16,
        amsgrad: bool = False,
    ) -> None:
        settings = {"lr": lr, "eps": eps, "eps_inside_sqrt": eps_inside_sqrt}
        super().__init__(params, amsgrad, betas, **settings, weight_decay=weight_decay)
        self.freeze_step = self.var_freeze_step = var_freeze_step
        self.var_update_scaler = var_update_scaler
        self.local_step_scaler = local_step_scaler
        self.local_step_clipper = local_step_clipper

    def learns_variance(self, number: int) -> bool:
        """Return whether an update learns v: some of the first ones do."""
        learns = is_variance_update(number, self.var_update_scaler)
        return super().learns_variance(number) and learns

    def is_local(self, number: int) -> bool:
        """Return whether ranks make a local update."""
        return number > self.last_of_variance

    def synchronizes(self, number: int) -> bool:
        """Return whether an exchange follows a local update."""
        local = number - self.last_of_variance
        return local % local_interval(local, self.local_step_scaler, self.local_step_clipper) == 0


def is_variance_update(number: int, scaler: int) -> bool:
    """Return whether update `number` (from 1) learns v: `scaler` intervals each of 1, 2, 4, ..."""
    interval = 1
    while number > scaler * interval:
        number -= scaler * interval
        interval *= 2
    return number % interval == 0


def local_interval(number: int, scaler: int, longest: int) -> int:
    """Return the updates between two exchanges at local update `number` (from 1)."""
    return int(min(longest, 2 ** min((number - 1) // scaler, longest.bit_length())))


def begin_state(state: State, values: Tensor) -> State:
    """Return the state of a tensor, created on first use."""
    if "step" not in state:
        state["step"] = torch.zeros(())
    for key in ("exp_avg", "exp_avg_sq"):
        if key not in state:
            state[key] = torch.zeros_like(values.detach())
    return state


def learn_second(second: Tensor, gradient: Tensor, group: Group) -> None:
    """Update the variance with a gradient."""
    beta2 = group["betas"][1]
    second.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)


def divisor_of(second: Tensor, group: Group) -> Tensor:
    """Return the divisor of a momentum."""
    if group["eps_inside_sqrt"]:
        return second.add(group["eps"]).sqrt_()
    return second.sqrt().add_(group["eps"])


def move(values: Tensor, first: Tensor, second: Tensor, group: Group) -> None:
    """Make Adam's update without bias correction."""
    divisor = divisor_of(second, group)
    values.mul_(1 - group["lr"] * group["weight_decay"])
    values.addcdiv_(first, divisor, value=-group["lr"])


def _scalar(state: State, key: str, first: float, values: Tensor) -> Tensor:
    """Return a scalar of the state on the device of the values, created if missing."""
    known = state.get(key)
    known = torch.tensor(first) if known is None else known
    made: Tensor = known.to(values.device, values.dtype)
    state[key] = made
    return made
