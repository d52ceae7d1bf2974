"""1-bit Adam (Tang 2021), 1-bit Lamb (Li 2021) and 0/1 Adam (Lu 2022): their formulas and options.

All of them learn the variance v while gradients are averaged exactly, and keep it from then on.
With a variance that stands still the update is linear in the momentum m, so that m may travel as
signs: what these lose is sent later and cancels out.

    m = beta1 * m + (1 - beta1) * gradient
    v = beta2 * v + (1 - beta2) * gradient^2
    w -= lr * (m / (sqrt(v) + eps) + weight_decay * w)

No moment is corrected for its start at zero. How things travel is the steppers' job; an optimizer
that no engine steps sees all gradients itself, and nothing travels.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hadal.errors import OptimizerError
from hadal.optim.own import Group, OwnOptimizer, State


class SignOptimizer(OwnOptimizer):
    """What the three share: `exp_avg`, `exp_avg_sq` and `step` of each tensor; options of a group.

    A group may hold an `exp_avg_mask` of the shape of each of its parameters (or one that expands
    to it): the momentum is multiplied with it whenever it has travelled. Elements that never get a
    gradient would else be given the others' magnitude, with a sign.

    Raises:
        OptimizerError: `amsgrad`, which they do not have.
    """

    freeze_step: int

    def __init__(
        self,
        params: Any,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        eps_inside_sqrt: bool,
        weight_decay: float,
        amsgrad: bool,
        **more: float,
    ) -> None:
        name = type(self).__name__
        if amsgrad:
            raise OptimizerError(f"{name} has no amsgrad; leave it out or give false")
        settings: dict[str, Any] = {
            "lr": lr,
            "betas": tuple(betas),
            "eps": eps,
            "eps_inside_sqrt": eps_inside_sqrt,
            "weight_decay": weight_decay,
            **more,
        }
        super().__init__(params, settings)

    @property
    def last_of_variance(self) -> int:
        """The last update at which v may be learnt: there is at least one."""
        return max(1, self.freeze_step)

    def learns_variance(self, number: int) -> bool:
        """Whether update `number` (from 1) averages gradients exactly, and learns v of them."""
        return number <= self.last_of_variance

    def step_parameter(self, parameter: nn.Parameter, gradient: Tensor, group: Group) -> None:
        """Make one update of a whole parameter, whose gradient is everybody's."""
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
        """The state that `take` renews, made where it is not there yet."""
        return [state["exp_avg"]]

    def take(self, renewed: Sequence[Tensor], momentum: Tensor, group: Group) -> None:
        """Take over a new momentum while the variance stands still; all are of one shape."""
        renewed[0].copy_(momentum)

    def move_whole(self, values: Tensor, state: State, group: Group, *, learns: bool) -> None:
        """Update the values of a whole parameter; `learns`: the variance has just been learnt."""
        move(values, state["exp_avg"], state["exp_avg_sq"], group)


class OneBitAdam(SignOptimizer):
    """Adam whose momentum travels as signs from update `freeze_step` + 1 on."""

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
        super().__init__(params, lr, betas, eps, eps_inside_sqrt, weight_decay, amsgrad)
        self.freeze_step = freeze_step


class OneBitLamb(SignOptimizer):
    """Lamb whose momentum travels as signs from update `freeze_step` + 1 on.

    From then on a parameter's trust ratio is its running average (`coeff_beta`) of the updates
    before, times a factor: how far the variance has moved since, within [`factor_min`,
    `factor_max`], by at most a share of `factor_threshold` in one update.
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
        bounds = {"max_coeff": max_coeff, "min_coeff": min_coeff}
        super().__init__(params, lr, betas, eps, eps_inside_sqrt, weight_decay, amsgrad, **bounds)
        self.freeze_step = freeze_step
        self.coeff_beta = coeff_beta
        self.factor_max = factor_max
        self.factor_min = factor_min
        self.factor_threshold = factor_threshold

    def step_parameter(self, parameter: nn.Parameter, gradient: Tensor, group: Group) -> None:
        """Make one update of a whole parameter, whose gradient is everybody's."""
        if parameter.numel():
            super().step_parameter(parameter, gradient, group)

    def renewed(self, state: State) -> Sequence[Tensor]:
        """The momentum, and the variance that would be if it were still learnt."""
        if "exp_avg_sq_fresh" not in state:
            state["exp_avg_sq_fresh"] = state["exp_avg_sq"].clone()
        return [state["exp_avg"], state["exp_avg_sq_fresh"]]

    def take(self, renewed: Sequence[Tensor], momentum: Tensor, group: Group) -> None:
        """Take over a new momentum, and learn the fresh variance of the gradient in it."""
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
        """As Lamb does; the ratio goes into its running average."""
        for key in ("exp_avg_sq_fresh", "last_factor"):
            # Of a variance that stood still before: this one begins anew from where it will stand.
            state.pop(key, None)
        update = state["exp_avg"] / divisor_of(state["exp_avg_sq"], group)
        if group["weight_decay"]:
            update.add_(values, alpha=group["weight_decay"])
        weight, length = values.norm(), update.norm()
        ratio = (weight / length).clamp(group["min_coeff"], group["max_coeff"])
        ratio = torch.where((weight > 0) & (length > 0), ratio, 1.0)
        known = _scalar(state, "lamb_coeff_freeze", 0.0, values)
        # 1 stands for no ratio.
        known.copy_(torch.where(ratio == 1, known, torch.lerp(ratio, known, self.coeff_beta)))
        values.sub_(update.mul_(ratio * group["lr"]))

    def _move_by_factor(self, values: Tensor, state: State, group: Group) -> None:
        """As Lamb does with the ratio's average, times how far the variance has moved since."""
        divisor = divisor_of(state["exp_avg_sq"], group)
        factor = (divisor / divisor_of(state["exp_avg_sq_fresh"], group)).amax()
        update = state["exp_avg"] / divisor
        if group["weight_decay"]:
            length = update.norm()
            update.add_(values, alpha=group["weight_decay"])
            # The variance bears on this share of the update alone.
            share = (length / update.norm()).clamp(max=1).nan_to_num(1.0)
            factor = factor * share + (1 - share)
        last = _scalar(state, "last_factor", 1.0, values)
        factor = factor.clamp(self.factor_min, self.factor_max)
        threshold = self.factor_threshold
        last.copy_(factor.clamp(last * (1 - threshold), last * (1 + threshold)))
        ratio = _scalar(state, "lamb_coeff_freeze", 0.0, values) * last
        values.sub_(update.mul_(ratio * group["lr"]))


class ZeroOneAdam(SignOptimizer):
    """Adam that learns the variance ever more rarely, and then exchanges ever more rarely.

    Up to update `var_freeze_step` v is learnt at some updates, of gradients that are averaged
    exactly; at the others gradients travel as signs. The interval between the former doubles after
    each `var_update_scaler` of them. From then on each rank makes updates of its own, and the sum
    of their lr * m travels as signs: at every update at first; the interval doubles after each
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
        super().__init__(params, lr, betas, eps, eps_inside_sqrt, weight_decay, amsgrad)
        self.var_freeze_step = var_freeze_step
        self.var_update_scaler = var_update_scaler
        self.local_step_scaler = local_step_scaler
        self.local_step_clipper = local_step_clipper

    @property
    def last_of_variance(self) -> int:
        """The last update at which v may be learnt: there is at least one."""
        return max(1, self.var_freeze_step)

    def learns_variance(self, number: int) -> bool:
        """Some of the first updates."""
        learns = is_variance_update(number, self.var_update_scaler)
        return super().learns_variance(number) and learns

    def is_local(self, number: int) -> bool:
        """Whether ranks make an update of their own."""
        return number > self.last_of_variance

    def synchronizes(self, number: int) -> bool:
        """Whether a local update is followed by an exchange."""
        local = number - self.last_of_variance
        return local % local_interval(local, self.local_step_scaler, self.local_step_clipper) == 0


def is_variance_update(number: int, scaler: int) -> bool:
    """Whether update `number` (from 1) learns v: intervals of 1, 2, 4, ..., `scaler` of each."""
    interval = 1
    while number > scaler * interval:
        number -= scaler * interval
        interval *= 2
    return number % interval == 0


def local_interval(number: int, scaler: int, longest: int) -> int:
    """Updates between two exchanges, at local update `number` (from 1)."""
    return int(min(longest, 2 ** min((number - 1) // scaler, longest.bit_length())))


def begin_state(state: State, values: Tensor) -> State:
    """The state of a tensor, made on first use."""
    if "step" not in state:
        state["step"] = torch.zeros(())
    for key in ("exp_avg", "exp_avg_sq"):
        if key not in state:
            state[key] = torch.zeros_like(values.detach())
    return state


def learn_second(second: Tensor, gradient: Tensor, group: Group) -> None:
    """Put a gradient into the variance."""
    beta2 = group["betas"][1]
    second.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)


def divisor_of(second: Tensor, group: Group) -> Tensor:
    """What a momentum is divided by."""
    if group["eps_inside_sqrt"]:
        return second.add(group["eps"]).sqrt_()
    return second.sqrt().add_(group["eps"])


def move(values: Tensor, first: Tensor, second: Tensor, group: Group) -> None:
    """Make Adam's update, without a correction."""
    divisor = divisor_of(second, group)
    values.mul_(1 - group["lr"] * group["weight_decay"])
    values.addcdiv_(first, divisor, value=-group["lr"])


def _scalar(state: State, key: str, first: float, values: Tensor) -> Tensor:
    """A number of one parameter, where its values are."""
    known = state.get(key)
    known = torch.tensor(first) if known is None else known
    made: Tensor = known.to(values.device, values.dtype)
    state[key] = made
    return made
