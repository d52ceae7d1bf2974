"""Detection of the user's edits of weights, which are then put into the masters.

A write through `parameter.data` leaves no trace but the values themselves.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hadal.device import is_host_memory, same_bytes

# Elements compared at a time on a CPU: their cast copy stays in the cache.
_CPU_BLOCK_NUMEL = 1 << 18
# Odd: if the highest bit of every word changes, as signs do, the changes do not cancel out.
_ADDENDS = 255
_FACTOR = 0x9E3779B97F4A7C15 - (1 << 64)  # odd, its bits without a pattern
_LOW_HALF = (1 << 32) - 1


def digest(values: Tensor) -> Tensor:
    """Return a 0-dim int64 sum over all 8-byte words of a 1-D tensor, weighted by place.

    One changed word always changes it; of other changes about one in 2^64 goes unnoticed. In a long
    tensor, words that are a multiple of `numel / 255` apart are added before, so that exchanging
    them goes unnoticed, too: each byte is read once, without temporaries of the tensor's size. It
    never waits for the device.
    """
    sums = values.view(torch.int64)
    if sums.numel() > _ADDENDS**2:
        whole = sums.numel() // _ADDENDS * _ADDENDS
        sums = torch.cat([sums[:whole].view(_ADDENDS, -1).sum(0), sums[whole:]])
    # An odd factor leaves the highest bit where it is, so two changes of it would cancel out.
    mixed = sums ^ ((sums >> 32) & _LOW_HALF)
    odd = torch.arange(sums.numel(), device=sums.device).mul_(2).add_(1).mul_(_FACTOR)
    return (mixed * odd).sum()


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
