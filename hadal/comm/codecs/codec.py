"""What a codec is: how 1-D values become bytes for the wire, and values again."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator

import torch
from torch import Tensor

# Every wire is a multiple of so many bytes, so that stretches of a longer one can be looked at as
# numbers of any dtype, and be added up as whole words.
WIRE_BYTES = 8

# Elements that are worked on at a time on a CPU: what is computed for them stays in the cache.
_CPU_BLOCK_NUMEL = 1 << 16
# On an accelerator, calls are to be few.
_ACCELERATOR_BLOCK_NUMEL = 1 << 24


class Codec(ABC):
    """How 1-D values become bytes, and values again. A frozen value that keeps no state.

    The same wire gives the same bits on every rank. Where a value is infinite or not a number, so
    is what is decoded in its place, and maybe in its neighbours': never a finite number.
    """

    @abstractmethod
    def wire_bytes(self, numel: int) -> int:
        """How many bytes `numel` values become: a multiple of `WIRE_BYTES`."""

    @abstractmethod
    def encode(self, values: Tensor, out: Tensor) -> None:
        """Write 1-D `values` of any floating dtype into `out`: `wire_bytes` of uint8."""

    @abstractmethod
    def decoded(self, wire: Tensor, numel: int) -> Iterator[tuple[int, Tensor]]:
        """Yield the `numel` values that a wire holds, 1-D in parts, and where each part begins."""

    def decode(self, wire: Tensor, out: Tensor) -> None:
        """Fill 1-D `out`, of any floating dtype, with the values that a wire holds."""
        for start, values in self.decoded(wire, out.numel()):
            out[start : start + values.numel()].copy_(values)

    def decode_add(self, wire: Tensor, out: Tensor, factor: float = 1.0) -> None:
        """Add the values that a wire holds, times `factor`, to 1-D `out`."""
        for start, values in self.decoded(wire, out.numel()):
            out[start : start + values.numel()].add_(values, alpha=factor)


def whole_words(nbytes: int) -> int:
    """The next multiple of `WIRE_BYTES`."""
    return -(-nbytes // WIRE_BYTES) * WIRE_BYTES


def stretches(numel: int, multiple: int, device: torch.device) -> Iterator[tuple[int, int]]:
    """Cut [0, `numel`) into stretches to work on, each of a `multiple` of elements but the last."""
    block = _CPU_BLOCK_NUMEL if device.type == "cpu" else _ACCELERATOR_BLOCK_NUMEL
    step = max(1, block // multiple) * multiple
    for start in range(0, numel, step):
        yield start, min(start + step, numel)
