"""Memory for stored inputs: reusable host buffers and preallocated slots."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from hadal.device import Event, host_empty
from hadal.errors import UsageError

_SMALLEST_NBYTES, _GROWTH = 1 << 12, 1.25


@dataclass(slots=True, eq=False)
class LentMemory:
    """Memory lent until the object that stores something in it dies."""

    memory: Tensor
    """1-D, of the dtype that was requested."""
    take_back: Callable[[LentMemory], None]
    free_after: Event = field(default_factory=Event)
    """The last copy to it or from it; the next writer must follow that."""

    def until_death_of(self, user: object) -> None:
        """Return the memory once nothing refers to `user`."""
        weakref.finalize(user, self.take_back, self).atexit = False


class HostMemory:
    """Pinned host memory. Buffers fit any shape, so that batches of all lengths share them."""

    def __init__(self, most: int | None = None) -> None:
        """Set how many free buffers are kept for reuse; None keeps all."""
        self._most = most
        self._free: list[tuple[Tensor, Event]] = []

    def borrow(self, numel: int, dtype: torch.dtype) -> LentMemory:
        """Return 1-D memory: the smallest free buffer that is large enough, or a new one."""
        nbytes = numel * dtype.itemsize
        fitting = [place for place, (each, _) in enumerate(self._free) if each.nbytes >= nbytes]
        if fitting:
            best = min(fitting, key=lambda place: self._free[place][0].nbytes)
            buffer, event = self._free.pop(best)
        else:
            if self._free:
                # All are too small: the new buffer replaces one of them.
                self._free.pop()[1].wait_on_host()
            buffer, event = host_empty(_rounded_up(nbytes), torch.uint8, pinned=True), Event()

        def take_back(loan: LentMemory) -> None:
            if self._most is None or len(self._free) < self._most:
                self._free.append((buffer, loan.free_after))
            else:
                loan.free_after.wait_on_host()

        return LentMemory(buffer[:nbytes].view(dtype), take_back, event)

    def clear(self) -> None:
        """Free all that is not lent."""
        for _, event in self._free:
            event.wait_on_host()
        self._free.clear()


def _rounded_up(nbytes: int) -> int:
    """Return the next size of buffers, each a quarter larger than the one before.

    Pinned memory is expensive to make, and longer batches come one after the other.
    """
    steps = math.ceil(math.log(max(nbytes / _SMALLEST_NBYTES, 1), _GROWTH))
    return max(nbytes, math.ceil(_SMALLEST_NBYTES * _GROWTH**steps))


class SlotKind(NamedTuple):
    """The inputs that share one contiguous buffer."""

    position: int
    """The input's position among those of its call."""
    numel: int
    dtype: torch.dtype
    device: torch.device


class Slots:
    """Contiguous buffers, each with room for the same input of `number` calls."""

    def __init__(self, number: int) -> None:
        self._number = number
        self._free: dict[SlotKind, list[LentMemory]] = {}

    def borrow(self, kind: SlotKind) -> LentMemory:
        """Return a slot of `kind`; the first call allocates all of them.

        Raises:
            UsageError: all slots store inputs that backward has not used yet.
        """
        if kind not in self._free:
            for other in [k for k, free in self._free.items() if len(free) == self._number]:
                if other.position == kind.position:
                    del self._free[other]
            self._free[kind] = self._allocated(kind)
        free = self._free[kind]
        if not free:
            raise UsageError(
                f"activation_checkpointing.number_checkpoints is {self._number}, but"
                f" {self._number + 1} recomputed blocks ran before the backward of any; set it"
                " (num_checkpoints of deepspeed.checkpointing.configure) to the number of"
                " recomputed blocks in all forwards that precede a backward"
            )
        return free.pop()

    def _allocated(self, kind: SlotKind) -> list[LentMemory]:
        numel = self._number * kind.numel
        if kind.device.type == "cpu":
            whole = host_empty(numel, kind.dtype, pinned=True)
        else:
            whole = torch.empty(numel, dtype=kind.dtype, device=kind.device)
        free: list[LentMemory] = []
        free += [LentMemory(slot, free.append) for slot in reversed(whole.split(kind.numel))]
        return free

    def clear(self) -> None:
        """Drop all slots; the memory of those in use is freed with their inputs."""
        self._free.clear()
