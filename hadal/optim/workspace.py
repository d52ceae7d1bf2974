"""Block-wise updates: blocks are cast, scaled and stepped while they are in the cache."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from itertools import accumulate
from operator import is_not
from typing import NamedTuple

import torch
from torch import Tensor

from hadal.offload.crossing import Crossing
from hadal.optim.elementwise import Block, Scaling, SliceUpdate
from hadal.units import rounded_up

# The number of elements cast, scaled, stepped and written back together: on a CPU few enough that a
# float32 gradient stays in the cache in between, on an accelerator enough to keep it busy.
_CPU_BLOCK_NUMEL = 1 << 19
_ACCELERATOR_BLOCK_NUMEL = 1 << 25
# Threads wait for each other at the end of each block. The wait grows with their number, and much
# more if they share cores with other processes; so blocks grow with it, up to a bound.
_LARGEST_GROWTH = 8


def block_numel(device: torch.device) -> int:
    """Return the number of elements in a block: the same in every tier, for the same bits.

    Blocks end at its multiples. Kernels round the last few elements of a block as they round single
    elements, so blocks must end at the same elements in every tier to get the same bits.
    """
    return _CPU_BLOCK_NUMEL * growth() if device.type == "cpu" else _ACCELERATOR_BLOCK_NUMEL


def growth() -> int:
    """Return the factor by which blocks grow on a CPU with the number of threads."""
    threads = torch.get_num_threads()
    return 1 if threads == 1 else min(2 << (threads.bit_length() - 1), _LARGEST_GROWTH)


# Copies of several blocks are placed side by side with this alignment, which kernels prefer.
_ALIGNED_NUMEL = 64

Multiplier = float | Tensor
"""The factor of gradients in an update: a number, or a float64 scalar on the updating
accelerator, which the host does not read."""


def scale_(gradient: Tensor, multiplier: Multiplier) -> Tensor:
    """Multiply a gradient in place, in float32 or wider, and return it."""
    if isinstance(multiplier, Tensor):
        exact = torch.promote_types(gradient.dtype, torch.float32)
        multiplier = multiplier.to(exact)
        if gradient.dtype != exact:
            return gradient.copy_(gradient.to(exact).mul_(multiplier))
    return gradient.mul_(multiplier)


class Item(NamedTuple):
    """One block to update, in its storage dtypes, which may differ."""

    update: SliceUpdate
    gradient: Tensor
    owned: Sequence[Tensor]
    """The block's values and state."""


class Workspace:
    """The workspace of one update, with a buffer for each tensor that must be cast.

    `sending` is the path of new weights to the device, if updates are made on the host.
    """

    def __init__(
        self,
        multiplier: Multiplier,
        sending: Crossing | None = None,
        overflowed: Tensor | None = None,
    ) -> None:
        self.sending = sending
        self._multiplier = multiplier
        self._divisors: dict[torch.device, Tensor] = {}
        self._overflowed = None if overflowed is None else overflowed.to(torch.float32)
        self._buffers: dict[tuple[torch.device, int, torch.dtype], Tensor] = {}

    def apply(self, items: Sequence[Item]) -> None:
        """Make the updates of some blocks; those with the same rule share one kernel call."""
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
        """Return the blocks in `dtype`, perhaps as copies valid until the next for `place`."""
        if all(block.dtype == dtype for block in blocks):
            return list(blocks)
        stops = [*accumulate(rounded_up(block.numel(), _ALIGNED_NUMEL) for block in blocks)]
        key = blocks[0].device, place, dtype
        buffer = self._buffers.get(key)
        if buffer is None or buffer.numel() < stops[-1]:
            buffer = self._buffers[key] = blocks[0].new_empty(stops[-1], dtype=dtype)
        starts = [0, *stops[:-1]]
        laid = [buffer[s : s + b.numel()] for s, b in zip(starts, blocks, strict=True)]
        torch._foreach_copy_(laid, list(blocks))
        return laid

    def _lay_gradients(
        self, blocks: Sequence[Tensor], dtype: torch.dtype
    ) -> tuple[list[Tensor], Tensor | None]:
        """Return gradients in `dtype`, and the divisor that is still to be applied."""
        laid = self._lay(-1, blocks, dtype)
        if not isinstance(self._multiplier, Tensor) and self._multiplier == 1.0:
            return laid, None
        if dtype == torch.float64:
            # A float32 divisor would be too coarse.
            return [scale_(one, self._multiplier) for one in laid], None
        return laid, self._divisor_on(laid[0].device)

    def _divisor_on(self, device: torch.device) -> Tensor:
        if device not in self._divisors:
            factor = self._multiplier
            if isinstance(factor, Tensor):
                inverse = factor.reciprocal().to(torch.float32)
            else:
                # 0 means an infinite norm: x / inf equals x * 0.
                number = 1 / factor if factor else float("inf")
                inverse = torch.full((), number, dtype=torch.float32, device=device)
            self._divisors[device] = inverse
        return self._divisors[device]
