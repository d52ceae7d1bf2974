"""The norm of all gradients, and what they are multiplied with to stay below a limit."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from hadal.comm import Ranks
from hadal.comm.collectives import slice_of, sum_
from hadal.zero.gradients import Gradients

# Squares summed in float32 at a time: the blocks' sums are added in float64, which keeps digits. On
# a CPU so few that what is cast for it stays in the cache.
_CPU_BLOCK_NUMEL = 1 << 16
_ACCELERATOR_BLOCK_NUMEL = 1 << 25


def global_norm(gradients: Sequence[Gradients], ranks: Ranks) -> float:
    """The L2 norm of all mean gradients, each counted once; one small sum over the ranks."""
    sums: list[Tensor] = []
    for one in gradients:
        # Where the mean is whole on every rank, each rank counts its even cut of it.
        cut = one.bucket.partition.optimizer
        sums += _square_sums(one.mean if cut else slice_of(one.mean, ranks.rank, ranks))
    # The host waits once, for all of them.
    total = torch.stack(sums).double().sum().cpu() if sums else torch.zeros(()).double()
    sum_(total, ranks, "the sum of the gradient norm")
    return math.sqrt(float(total))


def _square_sums(values: Tensor) -> list[Tensor]:
    """The sum of squares of each block of `values`, which is 1-D."""
    exact = torch.promote_types(values.dtype, torch.float32)
    step = _CPU_BLOCK_NUMEL if values.device.type == "cpu" else _ACCELERATOR_BLOCK_NUMEL
    buffer = None
    if values.dtype != exact:
        buffer = torch.empty(min(step, values.numel()), dtype=exact, device=values.device)
    sums = []
    for part in values.split(step):
        block = part if buffer is None else buffer[: part.numel()].copy_(part)
        sums.append(torch.dot(block, block))
    return sums


def clip_coefficient(norm: float, limit: float) -> float:
    """What gradients are multiplied with so that their norm is at most `limit` (0: no limit)."""
    return min(1.0, limit / (norm + 1e-6)) if limit > 0 else 1.0
