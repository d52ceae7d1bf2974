"""Which samples each replica reads, batch by batch: arithmetic on indices, no processes.

A *replica* is a copy of the model that reads samples of its own: a rank, or the ranks that share
one sequence. All replicas look at one order of the data set and take turns in it: replica r of R
reads places r, r + R, r + 2R, ... So after k batches of B samples each, exactly the first k·B·R
places have been read, whoever asks, and the rest can be dealt out anew: to other numbers too.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from hadal.errors import UsageError


@dataclass(frozen=True, slots=True)
class Sharding:
    """How a data set is dealt out to replicas."""

    batch_size: int
    """Samples of one batch of one replica."""
    replicas: int = 1
    replica: int = 0
    drop_last: bool = False
    """Whether a last batch that is not full is left out, on every replica."""

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
    """The order of one epoch, the same wherever it is asked: (count,) int64.

    It is the order of `torch.utils.data.DistributedSampler` with the same seed and epoch.
    """
    if not shuffle:
        return torch.arange(count)
    generator = torch.Generator().manual_seed(seed + epoch)
    return torch.randperm(count, generator=generator)


def batches_of(order: Tensor, sharding: Sharding, done: int = 0) -> Iterator[list[int]]:
    """One replica's batches of the places of `order` from `done` on.

    All replicas get as many batches, of the same lengths: no one waits for another at the end. To
    this end the order is filled up with its first places to a multiple of the replicas, or cut to
    one where `drop_last` is set.
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
    """How many batches each replica gets of `samples` samples."""
    if sharding.drop_last:
        return samples // sharding.replicas // sharding.batch_size
    return -(-samples // sharding.stride)
