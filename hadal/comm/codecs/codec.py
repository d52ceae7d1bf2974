"""The interface of a codec: 1-D values to bytes for the wire, and back; and error feedback."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator

import torch
from torch import Tensor

# Every wire is a multiple of so many bytes, so that slices of a longer one can be viewed as
# any dtype, and be added up as whole words.
WIRE_BYTES = 8

# Elements processed at a time on a CPU: intermediate results stay in the cache.
_CPU_BLOCK_NUMEL = 1 << 16
# An accelerator needs few calls.
_ACCELERATOR_BLOCK_NUMEL = 1 << 24


class Codec(ABC):
    """A conversion of 1-D values to bytes and back. A frozen value that keeps no state.

    Every rank decodes the same wire to the same bits. If a value is infinite or NaN, its decoded
    value, and maybe its neighbours', is not finite either.
    """

    @abstractmethod
    def wire_bytes(self, numel: int) -> int:
        """Return how many bytes `numel` values become: a multiple of `WIRE_BYTES`."""

    @abstractmethod
    def encode(self, values: Tensor, out: Tensor) -> None:
        """Write 1-D `values` of any floating dtype into `out`: `wire_bytes` of uint8."""

    @abstractmethod
    def decoded(self, wire: Tensor, numel: int) -> Iterator[tuple[int, Tensor]]:
        """Yield the `numel` values of a wire, 1-D in parts, and the offset of each part."""

    def decode(self, wire: Tensor, out: Tensor) -> None:
        """Fill 1-D `out`, of any floating dtype, with the values that a wire holds."""
        for start, values in self.decoded(wire, out.numel()):
            out[start : start + values.numel()].copy_(values)

    def decode_add(self, wire: Tensor, out: Tensor, factor: float = 1.0) -> None:
        """Add the values that a wire holds, times `factor`, to 1-D `out`."""
        for start, values in self.decoded(wire, out.numel()):
            out[start : start + values.numel()].add_(values, alpha=factor)


class ErrorFeedback:
    """A codec, and the residual of the messages so far of one bucket in one direction.

    A message is the values plus the residual. With `decay` the residual is a moving average of the
    error (LoCo, Xie 2024): residual = decay x residual + (1 - decay) x (values + residual - their
    decoded values); at 0 it is the whole error of the last message (Seide 2014).
    """

    def __init__(self, codec: Codec, dtype: torch.dtype, decay: float = 0.0) -> None:
        self.codec = codec
        self.residual: Tensor | None = None
        """The values to add, in `dtype`; None: nothing was lost yet."""
        self._dtype = dtype
        self._decay = decay

    def encode(self, values: Tensor, out: Tensor) -> None:
        """Write 1-D `values`, always as many, plus the residual into `out`."""
        if self.residual is None:
            self.residual = torch.zeros_like(values, dtype=self._dtype)
        residual = self.residual.add_(values)
        self.codec.encode(residual, out)
        # In place: decay x (sent - values) + (1 - decay) x (sent - decoded).
        if self._decay:
            residual.sub_(values, alpha=self._decay)
        self.codec.decode_add(out, residual, self._decay - 1.0)
        # An overflowed message leaves the residual alone: its update is skipped.
        residual.nan_to_num_(0.0, 0.0, 0.0)

    def rescale(self, factor: float) -> None:
        """Scale the residual: the next values are `factor` times as large."""
        if self.residual is not None:
            self.residual.mul_(factor)


def working_ranges(numel: int, multiple: int, device: torch.device) -> Iterator[tuple[int, int]]:
    """Divide [0, `numel`) into ranges to work on, each of a `multiple` of elements but the last."""
    block = _CPU_BLOCK_NUMEL if device.type == "cpu" else _ACCELERATOR_BLOCK_NUMEL
    step = max(1, block // multiple) * multiple
    for start in range(0, numel, step):
        yield start, min(start + step, numel)
