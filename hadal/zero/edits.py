"""Detection of the user's edits of weights, which are then put into the masters.

A write through `parameter.data` leaves no trace but the values themselves.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from hadal.device import is_host_memory, same_bytes

# Elements compared at a time on a CPU: their cast copy stays in the cache.
_CPU_BLOCK_NUMEL = 1 << 18
_ROW_NUMEL = 1 << 12
_SEED = 1


def digest(values: Tensor) -> Tensor:
    """Return a 0-dim int64 sum over all words of a 1-D tensor (4 bytes each), weighted by place.

    One changed word always changes it; of other changes about one in 2^32 goes unnoticed. It makes
    two passes over the values, and never waits for the device.
    """
    columns, rows = _odd_numbers(values.device)
    # Half as wide as the sums: signs that change in pairs do not cancel out.
    words = values.view(torch.int32)
    whole = words.numel() // _ROW_NUMEL * _ROW_NUMEL
    table, rest = words[:whole].view(-1, _ROW_NUMEL), words[whole:]
    total = (table.sum(0, dtype=torch.int64) * columns).sum() + (rest * rows[: rest.numel()]).sum()
    by_row = table.sum(1, dtype=torch.int64)
    for block in by_row.split(_ROW_NUMEL):
        total = total * rows[-1] + (block * rows[: block.numel()]).sum()
    return total


@cache
def _odd_numbers(device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the odd factor of each column and of each row of words."""
    generator = torch.Generator().manual_seed(_SEED)
    limits = torch.iinfo(torch.int64)
    drawn = torch.randint(limits.min, limits.max, (2, _ROW_NUMEL + 2), generator=generator)
    odd = drawn.bitwise_or(1).to(device)
    return odd[0, :_ROW_NUMEL], odd[1]


def absorb_into(master: Tensor, weights: Tensor, *, looks: bool = True) -> bool:
    """Put edited weights into a master, both 1-D; return whether there were any.

    Without `looks` the host does not wait for the device, and True means there may be some.
    """
    is_changed = False
    block = _CPU_BLOCK_NUMEL if master.device.type == "cpu" else weights.numel()
    buffer = torch.empty(min(block, weights.numel()), dtype=weights.dtype, device=master.device)
    for start in range(0, weights.numel(), max(block, 1)):
        present = weights[start : start + block].to(master.device)
        values = master[start : start + block]
        cast = buffer[: present.numel()].copy_(values)
        if not looks or not same_bits(cast, present):
            # Elements that the user left alone keep the master's full precision.
            edited = present.to(values.dtype)
            values.copy_(torch.where(cast == present, values, edited))
            is_changed = True
    return is_changed


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Return True if two 1-D tensors of one dtype, of a multiple of 8 bytes, have the same bits."""
    if is_host_memory(one.device):
        return same_bytes(one, other)
    # Compared as words: 16-bit floats are compared one by one, four times as slow.
    return torch.equal(one.view(torch.int64), other.view(torch.int64))


def shard_with_edits(shard: Tensor, arrived: Tensor, present: Tensor) -> Tensor:
    """Return the shard with the user's edits: current values that differ from the `arrived` ones.

    `arrived` is overwritten with the current values.
    """
    is_same = (present == arrived) | (present.isnan() & arrived.isnan())
    arrived.copy_(present)
    return torch.where(is_same, shard.to(present.device), present)
