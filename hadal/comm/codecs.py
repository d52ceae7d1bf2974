"""Codecs: 1-D values to bytes for the wire, and back; and error feedback. Nothing is sent here.

`Blockwise` has integers of few bits with a scale for each block, `Sign` one bit for each value.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import torch
from torch import Tensor

from hadal.units import rounded_up

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


# ---- integers of few bits, with one scale for each block of values -------------------------------

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
    the first half of a block and one from the second. Values are off by half a scale at most. If a
    value is not finite, no value of its block is.
    """

    bits: Literal[4, 8] = 8
    block_numel: int = 256
    """Values with one scale: an even number."""

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
            self._put(rows.round_(), numbers)

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


# ---- signs with one scale for each block of values -----------------------------------------------

_SIGNS_PER_BYTE = 8
# Eight bytes of 0 and 1, viewed as one number and multiplied by this, have their eight bits side
# by side in the topmost byte: the first byte's bit lowest.
_PACK = 0x0102040810204080
_TOP_BYTE = 56


@dataclass(frozen=True, slots=True)
class Sign(Codec):
    """Signs with the mean magnitude of their block as the decoded value; 0 is plus.

    Among all such blocks these values have the least squared error, so the error of a block is
    never longer than the block. The wire holds the scales, then the signs.

    `block_numel` is a multiple of 8.
    """

    block_numel: int = 1024

    def wire_bytes(self, numel: int) -> int:
        """Return how many bytes `numel` values become."""
        used = self._scales_nbytes(numel) + -(-numel // _SIGNS_PER_BYTE)
        return rounded_up(used, WIRE_BYTES)

    def encode(self, values: Tensor, out: Tensor) -> None:
        """Write scales and signs of 1-D `values` into `out`."""
        numel, block = values.numel(), self.block_numel
        scales, signs = self._parts(out, numel)
        for start, stop in working_ranges(numel, block, values.device):
            cut = values[start:stop].to(torch.float32)
            first, last = start // block, -(-stop // block)
            _put_scales(cut, block, scales[first:last])
            _put_signs(cut, signs[start // _SIGNS_PER_BYTE : -(-stop // _SIGNS_PER_BYTE)])
        signs[-(-numel // _SIGNS_PER_BYTE) :].zero_()

    def decoded(self, wire: Tensor, numel: int) -> Iterator[tuple[int, Tensor]]:
        """Yield the values of a wire, some blocks at a time, and the offset of each."""
        block = self.block_numel
        scales, signs = self._parts(wire, numel)
        table = _table(wire.device)
        for start, stop in working_ranges(numel, block, wire.device):
            packed = signs[start // _SIGNS_PER_BYTE : -(-stop // _SIGNS_PER_BYTE)]
            values = table[packed.long()].view(-1)[: stop - start]
            whole = (stop - start) // block * block
            first = start // block
            of_blocks = scales[first : first + whole // block]
            values[:whole].view(-1, block).mul_(of_blocks[:, None])
            if whole < stop - start:
                values[whole:].mul_(scales[first + whole // block])
            yield start, values

    def _scales_nbytes(self, numel: int) -> int:
        return -(-numel // self.block_numel) * torch.float32.itemsize

    def _parts(self, wire: Tensor, numel: int) -> tuple[Tensor, Tensor]:
        """Return the scales, and the bytes of signs with their padding."""
        nbytes = self._scales_nbytes(numel)
        return wire[:nbytes].view(torch.float32), wire[nbytes : self.wire_bytes(numel)]


def _put_scales(values: Tensor, block: int, scales: Tensor) -> None:
    whole = values.numel() // block * block
    # Divided first: a sum of large values must not pass for an overflow.
    if whole:
        torch.sum((values[:whole].abs() / block).view(-1, block), 1, out=scales[: whole // block])
    if whole < values.numel():
        rest = values[whole:]
        scales[-1] = (rest.abs() / rest.numel()).sum()


def _put_signs(values: Tensor, packed: Tensor) -> None:
    bits = torch.ge(values, 0)
    lacking = packed.numel() * _SIGNS_PER_BYTE - bits.numel()
    if lacking:
        bits = torch.nn.functional.pad(bits, (0, lacking))
    words = bits.view(torch.int64)
    packed.copy_((words * _PACK >> _TOP_BYTE) & 0xFF)


@lru_cache
def _table(device: torch.device) -> Tensor:
    """Return a (256, 8) table of the signs that each byte encodes."""
    bytes_ = torch.arange(256, device=device)[:, None]
    bits = bytes_ >> torch.arange(_SIGNS_PER_BYTE, device=device) & 1
    return bits.to(torch.float32) * 2 - 1
