"""What a user has written into weights: whether they have changed, and into their masters with it.

A write through `parameter.data` leaves no trace but the values themselves.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

# Elements compared at a time on a CPU: what is cast for it stays in the cache.
_CPU_BLOCK_NUMEL = 1 << 18
_ROW_NUMEL = 1 << 12
_SEED = 1


def digest(values: Tensor) -> Tensor:
    """A 0-dim int64 sum over all bits of a 1-D tensor of a multiple of 8 bytes, each by its place.

    Of values that differ in one word of 8 bytes the sums differ; of others they are equal once in
    2^64 times. Nothing waits for the device.
    """
    columns, rows = _odd_numbers(values.device)
    words = values.view(torch.int64)
    total = torch.zeros((), dtype=torch.int64, device=values.device)
    for block in words.split(_ROW_NUMEL * _ROW_NUMEL):
        # Products keep low bits apart, not high ones: these are put among the low ones too.
        mixed = (block >> 31).bitwise_xor_(block)
        whole = mixed.numel() // _ROW_NUMEL * _ROW_NUMEL
        sums = mixed[:whole].view(-1, _ROW_NUMEL).mul_(columns).sum(1)
        rest = mixed[whole:] * columns[: mixed.numel() - whole]
        total = total * rows[-1] + (sums * rows[: sums.numel()]).sum() + rest.sum() * rows[-2]
    return total


@cache
def _odd_numbers(device: torch.device) -> tuple[Tensor, Tensor]:
    """What words are multiplied with, by column and by row."""
    generator = torch.Generator().manual_seed(_SEED)
    limits = torch.iinfo(torch.int64)
    drawn = torch.randint(limits.min, limits.max, (2, _ROW_NUMEL + 2), generator=generator)
    odd = drawn.bitwise_or(1).to(device)
    return odd[0, :_ROW_NUMEL], odd[1]


def absorb_into(master: Tensor, weights: Tensor) -> bool:
    """Put edited weights into a master, both 1-D; tell whether there were any."""
    is_changed = False
    block = _CPU_BLOCK_NUMEL if master.device.type == "cpu" else weights.numel()
    buffer = torch.empty(min(block, weights.numel()), dtype=weights.dtype, device=master.device)
    for start in range(0, weights.numel(), max(block, 1)):
        present = weights[start : start + block].to(master.device)
        values = master[start : start + block]
        cast = buffer[: present.numel()].copy_(values)
        if not same_bits(cast, present):
            # Elements that the user left alone keep the master's full precision.
            edited = present.to(values.dtype)
            values.copy_(torch.where(cast == present, values, edited))
            is_changed = True
    return is_changed


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Whether two 1-D tensors of one dtype, of a multiple of 8 bytes, hold the same bits."""
    # Compared as words: 16-bit floats are compared one by one, four times as slow.
    return torch.equal(one.view(torch.int64), other.view(torch.int64))


def shard_with_edits(shard: Tensor, arrived: Tensor, present: Tensor) -> Tensor:
    """A shard, but for what is present in place of what has `arrived` of it.

    `arrived` becomes what is present.
    """
    is_same = (present == arrived) | (present.isnan() & arrived.isnan())
    arrived.copy_(present)
    return torch.where(is_same, shard.to(present.device), present)
