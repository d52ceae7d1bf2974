"""Where blocks of a run are cast, scaled and stepped while they lie in the cache."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import reduce
from itertools import accumulate
from operator import is_not
from typing import NamedTuple

import torch
from torch import Tensor

from hadal.offload.crossing import Crossing
from hadal.optim.elementwise import Block, Scaling, Update

# Elements that are cast, scaled, stepped and written back together: on a CPU so few that a gradient
# in float32 stays in the cache between these, on an accelerator enough to keep it busy.
_CPU_BLOCK_NUMEL = 1 << 19
_ACCELERATOR_BLOCK_NUMEL = 1 << 25
# Several threads wait for each other at the end of each of these. What they wait grows with their
# number, and much more where they share cores with others; so blocks grow with it, up to a bound.
_LARGEST_GROWTH = 8


def block_numel(device: torch.device) -> int:
    """How many elements are worked on at a time: the same in every tier, for the same bits."""
    return _CPU_BLOCK_NUMEL * growth() if device.type == "cpu" else _ACCELERATOR_BLOCK_NUMEL


def growth() -> int:
    """How many times as many elements are worked on at a time on a CPU as by one thread."""
    threads = torch.get_num_threads()
    return 1 if threads == 1 else min(2 << (threads.bit_length() - 1), _LARGEST_GROWTH)


def blocks(start: int, stop: int, numel: int) -> Iterator[tuple[int, int]]:
    """[start, stop) cut at the multiples of `numel`.

    Kernels round the last few elements of a block as they do single ones. So blocks must end at the
    same elements wherever these are stored, for the same bits.
    """
    while start < stop:
        end = min(stop, (start // numel + 1) * numel)
        yield start, end
        start = end


# Copies of several blocks lie side by side, each where kernels like it.
_ALIGNED_NUMEL = 64

Multiplier = float | Tensor
"""The factor of gradients in an update: a number, or a float64 scalar of the accelerator that
updates are made on, which the host does not read."""


def scale_(gradient: Tensor, multiplier: Multiplier) -> Tensor:
    """Multiply a gradient in place, in float32 or wider, and return it."""
    if isinstance(multiplier, Tensor):
        exact = torch.promote_types(gradient.dtype, torch.float32)
        multiplier = multiplier.to(exact)
        if gradient.dtype != exact:
            return gradient.copy_(gradient.to(exact).mul_(multiplier))
    return gradient.mul_(multiplier)


class Item(NamedTuple):
    """One block to be updated, as it is stored: its tensors may be of several dtypes."""

    update: Update
    gradient: Tensor
    owned: Sequence[Tensor]
    """Its values and the state."""


class Desk:
    """Where the blocks of one update are worked on: a buffer for each that must be cast."""

    def __init__(
        self, device: torch.device, multiplier: Multiplier, overflowed: Tensor | None = None
    ) -> None:
        self.numel = block_numel(device)
        self._device = device
        self._multiplier = multiplier
        # 0 stands for a gradient that is infinite: x / inf is what x * 0 is.
        self._divisor: Tensor
        if isinstance(multiplier, Tensor):
            self._divisor = multiplier.reciprocal().to(torch.float32)
        else:
            inverse = 1 / multiplier if multiplier else float("inf")
            self._divisor = torch.full((), inverse, dtype=torch.float32, device=device)
        self._overflowed = None if overflowed is None else overflowed.to(torch.float32)
        self._buffers: dict[tuple[int, torch.dtype], Tensor] = {}

    def apply(self, items: Sequence[Item]) -> None:
        """Make updates, each of one block: updates of one rule by one call of its kernel."""
        alike: dict[tuple[object, torch.dtype], list[Item]] = {}
        for item in items:
            exact = reduce(torch.promote_types, [one.dtype for one in (item.gradient, *item.owned)])
            if item.update.in_float32:
                exact = torch.promote_types(exact, torch.float32)
            alike.setdefault((item.update.apply, exact), []).append(item)
        for (_, exact), some in alike.items():
            self._apply(some, exact)

    def _apply(self, items: Sequence[Item], dtype: torch.dtype) -> None:
        gradients, divisor = self._lay_gradients([item.gradient for item in items], dtype)
        owned = list(zip(*(item.owned for item in items), strict=True))
        work = [self._lay(place, runs, dtype) for place, runs in enumerate(owned)]
        blocks = [
            Block(values, gradient, state, item.update.number)
            for item, gradient, (values, *state) in zip(
                items, gradients, zip(*work, strict=True), strict=True
            )
        ]
        items[0].update.apply(blocks, Scaling(divisor, self._overflowed))
        for runs, laid in zip(owned, work, strict=True):
            if any(map(is_not, runs, laid)):
                torch._foreach_copy_(list(runs), laid)

    def _lay(self, place: int, blocks: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
        """The blocks in `dtype`: themselves, or copies that last until the next of this place."""
        if all(block.dtype == dtype for block in blocks):
            return list(blocks)
        stops = [*accumulate(_aligned(block.numel()) for block in blocks)]
        buffer = self._buffers.get((place, dtype))
        if buffer is None or buffer.numel() < stops[-1]:
            buffer = torch.empty(stops[-1], dtype=dtype, device=self._device)
            self._buffers[place, dtype] = buffer
        starts = [0, *stops[:-1]]
        laid = [buffer[s : s + b.numel()] for s, b in zip(starts, blocks, strict=True)]
        torch._foreach_copy_(laid, list(blocks))
        return laid

    def _lay_gradients(
        self, blocks: Sequence[Tensor], dtype: torch.dtype
    ) -> tuple[list[Tensor], Tensor | None]:
        """Gradients in `dtype`, and what they are still to be divided by."""
        laid = self._lay(-1, blocks, dtype)
        if not isinstance(self._multiplier, Tensor) and self._multiplier == 1.0:
            return laid, None
        if dtype == torch.float64:
            # A divisor of float32 would be too coarse.
            return [scale_(one, self._multiplier) for one in laid], None
        return laid, self._divisor


def _aligned(numel: int) -> int:
    return -(-numel // _ALIGNED_NUMEL) * _ALIGNED_NUMEL


class Desks:
    """The desks of one update, one for each memory that updates are made in."""

    def __init__(
        self,
        multiplier: Multiplier,
        sending: Crossing | None = None,
        overflowed: Tensor | None = None,
    ) -> None:
        self._multiplier = multiplier
        self._overflowed = overflowed
        self.sending = sending
        """The way of new weights to the device, where that is not where they are made."""
        self._desks: dict[torch.device, Desk] = {}

    def on(self, device: torch.device) -> Desk:
        """The desk of a device."""
        if device not in self._desks:
            self._desks[device] = Desk(device, self._multiplier, self._overflowed)
        return self._desks[device]
