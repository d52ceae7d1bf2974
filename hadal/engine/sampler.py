"""Batches of sample indices for each replica: arithmetic on indices, no processes.

A *replica* is a copy of the model that reads its own samples: a rank, or the ranks that share
one sequence. All replicas take turns in one order of the data set: replica r of R reads positions
r, r + R, r + 2R, ... After k batches of B samples each, exactly the first k·B·R positions have been
read, and the remaining ones can be sharded again, over any number of replicas.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from hadal.errors import UsageError


@dataclass(frozen=True, slots=True)
class Sharding:
    """Sharding of a data set over replicas."""

    batch_size: int
    """Samples of one batch of one replica."""
    replicas: int = 1
    replica: int = 0
    drop_last: bool = False
    """True drops a last batch that is not full, on every replica."""

    def __post_init__(self) -> None:
        if self.batch_size < 1 or not 0 <= self.replica < self.replicas:
            raise UsageError(
                "a loader needs batch_size >= 1 and 0 <= replica < replicas, found batch_size"
                f" {self.batch_size}, replica {self.replica}, replicas {self.replicas}"
            )

    @property
    def stride(self) -> int:
        """Samples of one batch on all replicas together."""
        return self.batch_size * self.replicas


def order_of(count: int, seed: int, epoch: int, shuffle: bool) -> Tensor:
    """Return the order of one epoch, the same on every rank: (count,) int64.

    It is the order of `torch.utils.data.DistributedSampler` with the same seed and epoch.
    """
    if not shuffle:
        return torch.arange(count)
    generator = torch.Generator().manual_seed(seed + epoch)
    return torch.randperm(count, generator=generator)


def batches_of(order: Tensor, sharding: Sharding, done: int = 0) -> Iterator[list[int]]:
    """Yield one replica's batches of the positions of `order` from `done` on.

    All replicas get the same number of batches, of the same lengths: none waits for another at the
    end. For this the order is padded with its first positions to a multiple of the replicas, or
    truncated to one if `drop_last` is set.
    """
    rest = order[done:]
    even, odd = divmod(rest.numel(), sharding.replicas)
    mine = rest[sharding.replica :: sharding.replicas]
    if sharding.drop_last:
        mine = mine[:even]
    elif odd and sharding.replica >= odd:
        first = order[(sharding.replica - odd) % order.numel()]
        mine = torch.cat([mine, first.view(1)])
    for batch in mine.split(sharding.batch_size):
        if batch.numel() == sharding.batch_size or (batch.numel() and not sharding.drop_last):
            yield batch.tolist()


def count_batches(samples: int, sharding: Sharding) -> int:
    """Return the batches that each replica gets of `samples` samples."""
    if sharding.drop_last:
        return samples // sharding.replicas // sharding.batch_size
    return -(-samples // sharding.stride)
