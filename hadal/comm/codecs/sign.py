"""Signs with a scale: one bit for each value, and one float32 for each block of values."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from hadal.comm.codecs.codec import WIRE_BYTES, Codec, working_ranges
from hadal.units import rounded_up

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
