"""The steppers of 1-bit Lamb and 0/1 Adam, derived from 1-bit Adam's."""

from __future__ import annotations

import torch
from torch import Tensor

from hadal.comm.collectives import sum_
from hadal.optim.elementwise import Group
from hadal.optim.exchanging import ExchangingStepper, Lane, Slice
from hadal.optim.one_bit import OneBitLamb, ZeroOneAdam, divisor_of
from hadal.optim.step import refresh
from hadal.optim.workspace import Multiplier


class OneBitLambStepper(ExchangingStepper[OneBitLamb]):
    """A stepper of 1-bit Lamb on whole parameters, each of which has a trust ratio."""

    def _is_whole(self, group: int) -> bool:
        return True

    def _move(self, *, learns: bool) -> None:
        for _, part in self._all_parts():
            if part.values.numel():
                values, state = part.held.values.detach(), self._state(part)
                self._optimizer.move_whole(values, state, self._group_of(part), learns=learns)


class ZeroOneAdamStepper(ExchangingStepper[ZeroOneAdam]):
    """A stepper of 0/1 Adam: at first, between the updates that learn the variance, ranks send
    gradients as signs; later they send the sum of their local updates.

    If ranks do not exchange after every update, `_anchors` hold the weights of the last exchange,
    with weight decay applied since. All ranks then start from them and add the local updates of all
    ranks, so that they get the same bits.
    """

    _anchors: dict[Slice, Tensor]
    _rates: dict[int, float]
    """The sum of learning rates since the last exchange, by param group; empty: ranks agree."""

    def _update(self, number: int, multiplier: Multiplier) -> None:
        if self._optimizer.is_local(number):
            self._step_locally(number, multiplier)
        else:
            super()._update(number, multiplier)

    def _owe_block(self, debt: Tensor, first: Tensor, gradient: Tensor, group: Group) -> None:
        """Add the gradient to the residual."""
        debt.add_(gradient)

    def _take(self, part: Slice, cut: slice, mean: Tensor) -> None:
        first = part.flat(self._state(part)["exp_avg"])[cut]
        first.lerp_(mean.to(first.dtype), 1 - self._group_of(part)["betas"][0])

    def _step_locally(self, number: int, multiplier: Multiplier) -> None:
        if not self._optimizer.is_local(number - 1):
            # The debt so far is of gradients; from now on it is of updates.
            for lane in self._lanes:
                lane.sending().forget()
        follows = self._optimizer.synchronizes(number)
        if not self._rates and not follows:
            self._anchors = {part: part.values.clone() for _, part in self._all_parts()}
        for lane, part in self._all_parts():
            self._step_part(lane, part, multiplier)
        for index, group in enumerate(self._optimizer.param_groups):
            self._rates[index] = self._rates.get(index, 0.0) + group["lr"]
        if follows:
            self._synchronize()

    def _step_part(self, lane: Lane, part: Slice, multiplier: Multiplier) -> None:
        """Make a local update and owe it. Without an anchor the values serve as the anchor."""
        group, owed = self._group_of(part), part.cut(lane.sending().owed.mine)
        rate, decay = group["lr"], 1 - group["lr"] * group["weight_decay"]
        anchor = [self._anchors[part]] if part in self._anchors else []
        for block, gradient in self._with_gradients(lane, part, multiplier, owed, *anchor):
            values, first, second, debt, *anchored = block
            first.lerp_(gradient, 1 - group["betas"][0])
            first.masked_fill_(second == 0, 0.0)
            debt.add_(first, alpha=rate)
            for decayed in (values, *anchored):
                decayed.mul_(decay)
            if anchored:
                values.addcdiv_(first, divisor_of(second, group), value=-rate)

    def _share(self, part: Slice) -> float:
        """Return a part's sum of learning rates since the last exchange, over the largest sum."""
        largest = max(self._rates.values())
        return self._rates[part.held.group] / largest if largest else 1.0

    def _synchronize(self) -> None:
        """Set the weights to the anchors plus the movement of all ranks since.

        Groups are sent as if they had one learning rate. Otherwise a group that shares a block with
        another would get signs scaled to the other's updates, even at a learning rate of 0.
        """
        shares = [(lane, part, self._share(part)) for lane, part in self._all_parts()]
        uneven = [(lane, part, share) for lane, part, share in shares if share != 1.0]
        for lane, part, share in uneven:
            lane.rescale(part, 1 / share if share else 0.0)
        self._exchange(self._take_update)
        for lane, part, share in uneven:
            lane.rescale(part, share)
        for lane, part in self._all_parts():
            if not self._rates[part.held.group]:
                # Nothing was moved from which the momentum could be derived.
                first = self._state(part)["exp_avg"]
                sum_(first, lane.bucket.ranks, "the sum of momenta at a learning rate of 0")
                first.div_(lane.bucket.ranks.size)
        self._rates.clear()
        self._anchors.clear()

    def _take_update(self, part: Slice, cut: slice, mean: Tensor) -> None:
        group, state = self._group_of(part), self._state(part)
        first, second = (part.flat(state[key])[cut] for key in ("exp_avg", "exp_avg_sq"))
        moved, rate = mean.to(first.dtype).mul_(self._share(part)), self._rates[part.held.group]
        if rate:
            torch.div(moved, rate, out=first)
        values = part.values[cut]
        if part in self._anchors:
            values.copy_(self._anchors[part][cut])
        values.addcdiv_(moved, divisor_of(second, group), value=-1.0)

    @torch.no_grad()
    def bring_together(self) -> None:
        """Exchange now, ahead of schedule, if ranks have made local updates."""
        if self._rates:
            self._synchronize()
            refresh(self._gradients)

    def _kind_owed(self) -> str:
        return "updates" if self._optimizer.is_local(self._count) else "gradients"

    def begin_anew(self) -> None:
        """Forget all debts, as weights and state have been replaced."""
        self._anchors, self._rates = {}, {}
        super().begin_anew()
