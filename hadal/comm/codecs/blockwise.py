"""Integers of few bits, with one scale for each block of values."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from hadal.comm.codecs.codec import WIRE_BYTES, Codec, working_ranges
from hadal.units import rounded_up

_SCALE_BYTES = 4
# Two 4-bit numbers in a byte, low + 16 x high: the low one is at most 7 either way, so that
# rounding recovers the high one.
_BASE = 16
# A value that would need a smaller scale becomes zero: the inverse may be infinite, and devices
# convert that to different integers.
_SMALLEST_SCALE = torch.finfo(torch.float32).tiny


@dataclass(frozen=True, slots=True)
class Blockwise(Codec):
    """Symmetric integers: a block's largest magnitude becomes the largest integer of `bits`.

    The wire holds the scales in float32, then the numbers: a byte each, or two in a byte, one from
    the first half of a block and one from the second. Values are off by half a scale at most; with
    `is_stochastic` by one, up or down at random and right on average (drawn from torch's default
    generator of the device). If a value is not finite, no value of its block is.
    """

    bits: Literal[4, 8] = 8
    block_numel: int = 256
    """Values with one scale: an even number."""
    is_stochastic: bool = False

    @property
    def limit(self) -> int:
        """The largest integer."""
        return int(2 ** (self.bits - 1)) - 1

    def wire_bytes(self, numel: int) -> int:
        """Return how many bytes `numel` values become."""
        return rounded_up(self._used(numel), WIRE_BYTES)

    def encode(self, values: Tensor, out: Tensor) -> None:
        """Write `values` into `out`."""
        numel = values.numel()
        out[self._used(numel) :].zero_()
        for start, stop in self._working_ranges(numel, values.device):
            scales, numbers = self._parts(out, numel, start, stop)
            rows = values[start:stop].view(len(scales), -1).to(torch.float32, copy=True)
            torch.mul(rows.abs().amax(1, keepdim=True), 1.0 / self.limit, out=scales)
            rows.mul_(scales.reciprocal().masked_fill_(scales < _SMALLEST_SCALE, 0.0))
            if self.is_stochastic:
                rows.add_(torch.rand_like(rows)).floor_().clamp_(-self.limit, self.limit)
            else:
                rows.round_()
            self._put(rows, numbers)

    def decoded(self, wire: Tensor, numel: int) -> Iterator[tuple[int, Tensor]]:
        """Yield the values of a wire, some blocks at a time, and the offset of each."""
        for start, stop in self._working_ranges(numel, wire.device):
            scales, numbers = self._parts(wire, numel, start, stop)
            rows = self._taken(numbers, (stop - start) // len(scales)).mul_(scales)
            yield start, rows.reshape(-1)

    def _used(self, numel: int) -> int:
        """Return how many bytes of a wire hold data."""
        return self._blocks(numel) * _SCALE_BYTES + self._bytes_of(numel)

    def _blocks(self, numel: int) -> int:
        return -(-numel // self.block_numel)

    def _bytes_of(self, numel: int) -> int:
        return -(-numel * self.bits // 8)

    def _working_ranges(self, numel: int, device: torch.device) -> Iterator[tuple[int, int]]:
        """Yield ranges to work on: whole blocks, and the short one at the end by itself."""
        whole = numel // self.block_numel * self.block_numel
        yield from working_ranges(whole, self.block_numel, device)
        if whole < numel:
            yield whole, numel

    def _parts(self, wire: Tensor, numel: int, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Return the scales of values [start, stop), and their numbers, a row for each block."""
        first, last = start // self.block_numel, self._blocks(stop)
        scales = wire[first * _SCALE_BYTES : last * _SCALE_BYTES].view(torch.float32)
        begin = self._blocks(numel) * _SCALE_BYTES
        numbers = wire[begin + self._bytes_of(start) : begin + self._bytes_of(stop)]
        return scales.view(-1, 1), numbers.view(last - first, -1)

    def _put(self, rows: Tensor, numbers: Tensor) -> None:
        """Write integers into their bytes."""
        if self.bits == 8:
            numbers.view(torch.int8).copy_(rows)
            return
        half = numbers.shape[1]
        low, high = rows[:, :half], rows[:, half:]
        low[:, : high.shape[1]].add_(high, alpha=_BASE)
        numbers.view(torch.int8).copy_(low)

    def _taken(self, numbers: Tensor, numel: int) -> Tensor:
        """Return the integers of bytes as float32, `numel` in a row."""
        if self.bits == 8:
            return numbers.view(torch.int8).to(torch.float32)
        half = numbers.shape[1]
        rows = torch.empty(len(numbers), 2 * half, dtype=torch.float32, device=numbers.device)
        low, high = rows[:, :half], rows[:, half:]
        low.copy_(numbers.view(torch.int8))
        torch.mul(low, 1.0 / _BASE, out=high).round_()
        low.sub_(high, alpha=_BASE)
        return rows[:, :numel]
