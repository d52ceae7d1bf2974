"""The stepper of 1-bit Adam, which sends signs of momenta, and the base of similar ones."""

from __future__ import annotations

import logging
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hadal.comm.codecs import Sign
from hadal.comm.coded import CompressedMean
from hadal.comm.collectives import sum_
from hadal.comm.pending import Pending
from hadal.errors import NotBuiltYetError, OptimizerError
from hadal.optim.elementwise import Group, State
from hadal.optim.on_disk import DiskSteps
from hadal.optim.one_bit import (
    OneBitLamb,
    SignOptimizer,
    ZeroOneAdam,
    begin_state,
    divisor_of,
    learn_second,
    move,
)
from hadal.optim.pieces import HeldTensor
from hadal.optim.step import DISK_STEPS, OptimizerStepper, as_one_step, refresh, refuse_disk
from hadal.optim.workspace import Multiplier, block_numel, scale_
from hadal.zero.bucket import Bucket
from hadal.zero.gradients import Gradients
from hadal.zero.sharing import ModelParts
from hadal.zero.views import flattened

_log = logging.getLogger(__name__)
_CODEC = Sign()

OptimizerT = TypeVar("OptimizerT", bound=SignOptimizer)


@dataclass(slots=True, eq=False)
class Slice:
    """The tensor of one bucket in one of the optimizer's param groups."""

    held: HeldTensor
    values: Tensor
    """The tensor's values, 1-D."""
    _mask: tuple[Tensor, int, Tensor] | None = None

    @property
    def start(self) -> int:
        """The first element, counted from the bucket's start."""
        return self.held.start

    def flat(self, values: Tensor) -> Tensor:
        """Return state of the tensor's shape as 1-D."""
        return _view_of(self.held, values)

    def cut(self, whole: Tensor) -> Tensor:
        """Return this slice's elements of a tensor laid out like the bucket."""
        return whole[self.start : self.start + self.values.numel()]

    def mask(self, group: Group) -> Tensor | None:
        """Return the group's `exp_avg_mask` for this slice's elements, or None.

        Raises:
            OptimizerError: the mask does not fit a parameter.
        """
        given = group.get("exp_avg_mask")
        if given is None:
            return None
        if self._mask is None or self._mask[0] is not given or self._mask[1] != given._version:
            self._mask = (given, given._version, self._lay_mask(given))
        return self._mask[2]

    def _lay_mask(self, given: Tensor) -> Tensor:
        layout, stop = self.held.bucket.layout, self.start + self.values.numel()
        laid = torch.zeros_like(self.values)
        for part in layout.fragments(self.start, stop):
            slot = layout.slots[part.slot]
            try:
                whole = flattened(given.detach().expand(slot.shape), slot)
            except RuntimeError as error:
                raise OptimizerError(
                    f"exp_avg_mask of param group {self.held.group} has shape"
                    f" {tuple(given.shape)}, but {slot.name} in that group has {slot.shape}; put"
                    " the parameters that need a mask into a separate group"
                ) from error
            laid[part.offset : part.offset + part.numel].copy_(whole)
        return laid


def _view_of(held: HeldTensor, values: Tensor) -> Tensor:
    """Return a 1-D view, in memory order, of a tensor of the shape of `held`."""
    order = () if held.slot is None else held.bucket.layout.slots[held.slot].order
    return (values.permute(order) if order else values).view(-1)


Block = Sequence[Tensor]
"""A block of a slice: its values, both moments, and other requested tensors."""


@dataclass(slots=True, eq=False)
class BucketExchange:
    """One bucket with its stepped slices and its exchange."""

    gradients: Gradients
    parts: list[Slice]
    mean: CompressedMean | None = None
    """The compressed mean; None before the first one."""

    @property
    def bucket(self) -> Bucket:
        """The bucket whose momenta are exchanged."""
        return self.gradients.bucket

    @property
    def lies(self) -> str:
        """An identifier of the bucket's layout."""
        layout = self.bucket.layout
        places = [
            (slot.offset, slot.shape, slot.order if slot.is_reordered else ())
            for slot in layout.slots
        ]
        return f"{zlib.crc32(repr((places, layout.numel)).encode()):08x}"

    def sending(self) -> CompressedMean:
        """Return the compressed exchange, created if missing."""
        if self.mean is None:
            bucket = self.bucket
            self.mean = CompressedMean(bucket.layout.numel, bucket.ranks, _CODEC, bucket.steps_on)
        return self.mean

    def clear_gaps(self) -> None:
        """Clear the error feedback of padding, which has no values.

        That of the mean too: each sender's signs of it start over, always with a plus, so the
        mean's debt would only grow, and with it the scale of the block.
        """
        for start, stop in self.bucket.layout.gaps:
            for owed in self._owed(start, stop):
                owed.zero_()

    def rescale(self, part: Slice, factor: float) -> None:
        """Multiply a part's residuals by `factor`."""
        for owed in self._owed(part.start, part.start + part.values.numel()):
            owed.mul_(factor)

    def _owed(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Return the residuals of elements [start, stop): this rank's, and part of the mean's."""
        owed = self.sending().owed
        first = self.bucket.ranks.rank * owed.of_mean.numel()
        mean = owed.of_mean[max(0, start - first) : max(0, stop - first)]
        return owed.mine[start:stop], mean

    def overlaps(self, start: int, values: Tensor) -> Iterator[tuple[Slice, slice, Tensor]]:
        """Yield the elements of each part in `values`, which start at `start` of the bucket."""
        for part in self.parts:
            low = max(part.start, start)
            high = min(part.start + part.values.numel(), start + values.numel())
            if low < high:
                mine = slice(low - part.start, high - part.start)
                yield part, mine, values[low - start : high - start]


class ExchangingStepper(OptimizerStepper, Generic[OptimizerT]):
    """A stepper of an optimizer that exchanges momenta instead of gradients.

    For an update that learns the variance, the ZeRO mechanism averages the gradients; otherwise
    they stay on their ranks, and each rank sends its momentum.
    """

    _optimizer: OptimizerT

    def __init__(
        self,
        optimizer: OptimizerT,
        gradients: Sequence[Gradients],
        parameters: Sequence[Sequence[nn.Parameter]],
        steps: DiskSteps = DISK_STEPS,
        parts: ModelParts | None = None,
    ) -> None:
        self._exchanges: list[BucketExchange] = []
        refuse_disk(optimizer, gradients)
        _refuse_parts(optimizer, gradients, parts)
        if any(one.bucket.partition.optimizer for one in gradients):
            raise OptimizerError(
                f"{type(optimizer).__name__} needs zero_optimization.stage 0: each rank makes"
                " the whole update from the exchanged signs, which saves the gather of weights;"
                " use stage 0, or another optimizer"
            )
        super().__init__(optimizer, gradients, parameters, steps)
        self.begin_anew()

    def add(self, gradients: Sequence[Gradients], members: Sequence[nn.Parameter]) -> None:
        """Add the buckets of the newest param group, whose parameters are `members`.

        Raises:
            OptimizerError: the next update does not learn their variance.
        """
        if not self._optimizer.learns_variance(self._count + 1):
            raise OptimizerError(
                f"a param group was added after update {self._count}, but"
                f" {type(self._optimizer).__name__} learns no variance for it in the next one; add"
                " groups while it does, or set a later freeze_step (var_freeze_step)"
            )
        super().add(gradients, members)
        self._follow()

    def step(self, multiplier: Multiplier) -> None:
        """Make one update with the gradients times `multiplier`."""
        with as_one_step(self._optimizer):
            self._count += 1
            for _, part in self._all_parts():
                self._state(part)["step"].fill_(self._count)
            if self._count == self._optimizer.last_of_variance + 1:
                self._warn_still()
            self._update(self._count, multiplier)
            refresh(self._gradients)
        self._follow()

    def _update(self, number: int, multiplier: Multiplier) -> None:
        """Make update `number` of all masters."""
        learns = self._optimizer.learns_variance(number)
        if learns:
            self._learn(multiplier)
        else:
            # Add this update's message to the residuals
            for exchange, part in self._all_parts():
                owed, group = part.cut(exchange.sending().owed.mine), self._group_of(part)
                for (_, first, _, debt), gradient in self._with_gradients(
                    exchange, part, multiplier, owed
                ):
                    self._owe_block(debt, first, gradient, group)
            self._exchange(self._take)
        self._move(learns=learns)

    # ---- layout ----------------------------------------------------------------------------------

    def _take_up(
        self,
        gradients: Sequence[Gradients],
        groups: Sequence[int],
        parameters: Sequence[Sequence[nn.Parameter]],
    ) -> None:
        super()._take_up(gradients, groups, parameters)
        exchanges = {one.bucket: BucketExchange(one, []) for one in gradients}
        for held in self.held():
            if held.bucket in exchanges:
                exchanges[held.bucket].parts.append(
                    Slice(held, _view_of(held, held.values.detach()))
                )
        self._exchanges += exchanges.values()

    def _all_parts(self) -> Iterator[tuple[BucketExchange, Slice]]:
        for exchange in self._exchanges:
            for part in exchange.parts:
                yield exchange, part

    def _group_of(self, part: Slice) -> Group:
        return self._optimizer.param_groups[part.held.group]

    def _state(self, part: Slice) -> State:
        """Return the optimizer's state of a part, created on first use."""
        return begin_state(self._optimizer.state[part.held.values], part.held.values)

    def _blocks(self, part: Slice, *rest: Tensor) -> Iterator[Block]:
        """Yield a part in blocks; `rest` are further 1-D tensors of the part's length."""
        state = self._state(part)
        first, second = part.flat(state["exp_avg"]), part.flat(state["exp_avg_sq"])
        numel = block_numel(part.values.device)
        for start in range(0, part.values.numel(), numel):
            cut = slice(start, start + numel)
            yield [one[cut] for one in (part.values, first, second, *rest)]

    # ---- arithmetic ------------------------------------------------------------------------------

    def _learn(self, multiplier: Multiplier) -> None:
        """Update both moments with averaged gradients."""
        for exchange, part in self._all_parts():
            group = self._group_of(part)
            for (_, first, second), gradient in self._with_gradients(exchange, part, multiplier):
                first.lerp_(gradient, 1 - group["betas"][0])
                learn_second(second, gradient, group)

    def _move(self, *, learns: bool) -> None:
        """Make Adam's update of all values; `learns`: the variance has just been learnt."""
        for _, part in self._all_parts():
            for values, first, second in self._blocks(part):
                move(values, first, second, self._group_of(part))

    # ---- communication ---------------------------------------------------------------------------

    def _follow(self) -> None:
        """Set whether the next update's gradients are reduced or stay on their ranks."""
        stays = not self._optimizer.learns_variance(self._count + 1)
        for one in self._gradients:
            one.reduction = one.reduction._replace(stays=stays)

    def _with_gradients(
        self, exchange: BucketExchange, part: Slice, multiplier: Multiplier, *rest: Tensor
    ) -> Iterator[tuple[Block, Tensor]]:
        """Yield a part in blocks, each with its (disposable) gradient times `multiplier`."""
        for *block, mean in self._blocks(part, *rest, part.cut(exchange.gradients.mean)):
            yield block, scale_(mean.to(block[0].dtype, copy=True), multiplier)

    def _owe_block(self, debt: Tensor, first: Tensor, gradient: Tensor, group: Group) -> None:
        """Add to `debt` the momentum `first` with this rank's own gradient."""
        beta1 = group["betas"][0]
        debt.add_(first, alpha=beta1).add_(gradient, alpha=1 - beta1)

    def _take(self, part: Slice, cut: slice, mean: Tensor) -> None:
        """Store the mean of the messages for some elements of a part."""
        renewed = [part.flat(one)[cut] for one in self._optimizer.renewed(self._state(part))]
        self._optimizer.take(renewed, mean, self._group_of(part))

    def _exchange(self, take: Callable[[Slice, slice, Tensor], None]) -> None:
        """Average all that is owed; `take` gets the mean for some elements of a part.

        It may overwrite the mean, which is zero for elements that must not move (see `_still`).
        """

        def put(exchange: BucketExchange, start: int, values: Tensor) -> None:
            for part, cut, mean in exchange.overlaps(start, values):
                self._still(part, cut, mean)
                take(part, cut, mean)

        def start(exchange: BucketExchange) -> Pending:
            exchange.clear_gaps()
            label = f"the exchange of signs of {exchange.bucket.name}"
            return exchange.sending().start(lambda at, values: put(exchange, at, values), label)

        for pending in [start(exchange) for exchange in self._exchanges]:
            pending.wait()

    def _still(self, part: Slice, cut: slice, mean: Tensor) -> None:
        """Zero elements that are masked or have no variance, whose step size is undefined."""
        mean.masked_fill_(part.flat(self._state(part)["exp_avg_sq"])[cut] == 0, 0.0)
        mask = part.mask(self._group_of(part))
        if mask is not None:
            mean.mul_(mask[cut])

    def _warn_still(self) -> None:
        """Log a warning when the variance is frozen, if some elements have none."""
        count, first = 0, None
        for exchange, part in self._all_parts():
            second = part.flat(self._state(part)["exp_avg_sq"])
            for one in exchange.bucket.layout.fragments(part.start, part.start + second.numel()):
                without = int((second[one.offset : one.offset + one.numel] == 0).sum())
                count += without
                if without and first is None:
                    first = exchange.bucket.layout.slots[one.slot].name
        if count and self._exchanges[0].bucket.ranks.rank == 0:
            _log.warning(
                "%s freezes its variance now, but %d elements (first in %s) have had no gradient"
                " so far: without a variance they will not change. A later freeze_step"
                " (var_freeze_step) may include them",
                type(self._optimizer).__name__,
                count,
                first,
            )

    # ---- interface to zero/ ----------------------------------------------------------------------

    def bring_together(self) -> None:
        """Do nothing: weights are the same on all ranks after each update."""

    def begin_anew(self) -> None:
        """Forget all debts, as weights and state have been replaced."""
        known = self._optimizer.state
        states = [known.get(part.held.values, {}) for _, part in self._all_parts()]
        self._count = max((int(state.get("step", 0)) for state in states), default=0)
        for exchange in self._exchanges:
            exchange.mean = None
        self._follow()

    def memory(self) -> dict[str, Any] | None:
        """Return each bucket's residuals, with its layout; None if nothing was ever sent."""
        if all(exchange.mean is None for exchange in self._exchanges):
            return None
        owed = [list(exchange.sending().owed) for exchange in self._exchanges]
        lies = [exchange.lies for exchange in self._exchanges]
        return {"lies": lies, "owed": owed, "of": self._kind_owed()}

    def _kind_owed(self) -> str:
        """Return the kind of values that are owed now."""
        return "momenta"

    def fits(self, memory: Any) -> bool:
        """Return whether the saved buckets have the same layout as those here."""
        return bool(memory["lies"] == [exchange.lies for exchange in self._exchanges])

    def remember(self, memory: Any) -> None:
        """Restore the residuals, unless values of that kind are no longer sent."""
        if memory.get("of", self._kind_owed()) != self._kind_owed():
            return
        for exchange, saved in zip(self._exchanges, memory["owed"], strict=True):
            for owed, values in zip(exchange.sending().owed, saved, strict=True):
                owed.copy_(values)


def _refuse_parts(
    optimizer: Optimizer, gradients: Sequence[Gradients], parts: ModelParts | None
) -> None:
    """Raise if signs would make parameters that all parts of a model hold drift apart."""
    for one in gradients:
        if one.bucket.sharing.everyone != one.bucket.ranks:
            raise NotBuiltYetError(
                f"optimizer.type: {type(optimizer).__name__} is not built yet for experts that are"
                f" spread over ranks ({one.bucket.name}); choose Adam, AdamW or Lamb"
            )
    if parts is not None and parts.ranks.size > 1:
        raise NotBuiltYetError(
            f"optimizer.type: {type(optimizer).__name__} is not built yet for model-parallel"
            " models: parameters that all parts hold would get each part's magnitudes and drift"
            " apart; choose Adam, AdamW or Lamb"
        )


# ---- 1-bit Lamb and 0/1 Adam ---------------------------------------------------------------------


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
            for exchange in self._exchanges:
                exchange.sending().forget()
        follows = self._optimizer.synchronizes(number)
        if not self._rates and not follows:
            self._anchors = {part: part.values.clone() for _, part in self._all_parts()}
        for exchange, part in self._all_parts():
            self._step_part(exchange, part, multiplier)
        for index, group in enumerate(self._optimizer.param_groups):
            self._rates[index] = self._rates.get(index, 0.0) + group["lr"]
        if follows:
            self._synchronize()

    def _step_part(self, exchange: BucketExchange, part: Slice, multiplier: Multiplier) -> None:
        """Make a local update and owe it. Without an anchor the values serve as the anchor."""
        group, owed = self._group_of(part), part.cut(exchange.sending().owed.mine)
        rate, decay = group["lr"], 1 - group["lr"] * group["weight_decay"]
        anchor = [self._anchors[part]] if part in self._anchors else []
        for block, gradient in self._with_gradients(exchange, part, multiplier, owed, *anchor):
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
        shares = [(exchange, part, self._share(part)) for exchange, part in self._all_parts()]
        uneven = [(exchange, part, share) for exchange, part, share in shares if share != 1.0]
        for exchange, part, share in uneven:
            exchange.rescale(part, 1 / share if share else 0.0)
        self._exchange(self._take_update)
        for exchange, part, share in uneven:
            exchange.rescale(part, share)
        for exchange, part in self._all_parts():
            if not self._rates[part.held.group]:
                # Nothing was moved from which the momentum could be derived.
                first = self._state(part)["exp_avg"]
                sum_(first, exchange.bucket.ranks, "the sum of momenta at a learning rate of 0")
                first.div_(exchange.bucket.ranks.size)
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
