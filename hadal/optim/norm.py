"""The norm of all gradients, and what they are multiplied with to stay below a limit."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from hadal.comm import Ranks
from hadal.comm.collectives import slice_of, sum_
from hadal.zero.gradients import Gradients

# Squares are summed in float32 along rows of so many elements; the rows' sums are added in float64,
# which keeps digits.
_ROW_NUMEL = 1 << 12
# Elements that are cast together: on a CPU so few that they stay in the cache.
_CPU_BLOCK_NUMEL = 1 << 18
_ACCELERATOR_BLOCK_NUMEL = 1 << 25


def global_norm(gradients: Sequence[Gradients], ranks: Ranks) -> float:
    """The L2 norm of all mean gradients, each counted once; one small sum over the ranks."""
    norms: list[Tensor] = []
    for one in gradients:
        # Where the mean is whole on every rank, each rank counts its even cut of it.
        cut = one.bucket.partition.optimizer
        norms += _norms(one.mean if cut else slice_of(one.mean, ranks.rank, ranks))
    total = torch.zeros((), dtype=torch.float64)
    if norms:
        # The host waits once, for all of them.
        total += torch.cat(norms).double().square().sum().cpu()
    sum_(total, ranks, "the sum of the gradient norm")
    return math.sqrt(float(total))


def _norms(values: Tensor) -> Iterator[Tensor]:
    """The norms of parts of `values`, which is 1-D: of each row, and of what is left."""
    exact = torch.promote_types(values.dtype, torch.float32)
    on_cpu = values.device.type == "cpu"
    step = min(_CPU_BLOCK_NUMEL if on_cpu else _ACCELERATOR_BLOCK_NUMEL, values.numel())
    buffer = None
    if on_cpu and values.dtype != exact:
        # There, to cast first takes a tenth of the time that a norm of 16-bit values takes.
        buffer = torch.empty(step, dtype=exact)
    for part in values.split(step):
        block = part if buffer is None else buffer[: part.numel()].copy_(part)
        whole = block.numel() // _ROW_NUMEL * _ROW_NUMEL
        rows = block[:whole].view(-1, _ROW_NUMEL)
        yield torch.linalg.vector_norm(rows, dim=1, dtype=exact)
        yield torch.linalg.vector_norm(block[whole:].view(1, -1), dim=1, dtype=exact)


def clip_coefficient(norm: float, limit: float) -> float:
    """What gradients are multiplied with so that their norm is at most `limit` (0: no limit)."""
    return min(1.0, limit / (norm + 1e-6)) if limit > 0 else 1.0
