"""Orders of samples, sharded over replicas: the shuffled one, and the caller's sampler.

A *replica* is a copy of the model that reads its own samples: a rank, or the ranks that share
one sequence. All replicas take turns in one order of the data set: replica r of R reads positions
r, r + R, r + 2R, ... After k batches of B samples each, exactly the first k·B·R positions have been
read, and the remaining ones can be sharded again, over any number of replicas.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from hadal.data.reading import Sharding, drawing_from, keeps_state, mixed, pass_epoch, state_of
from hadal.order import Picked


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


class ShardedOrder:
    """Order of the data set in which all replicas take turns."""

    is_own = False

    def __init__(self, count: int, sharding: Sharding, seed: int, *, shuffle: bool) -> None:
        self._count = count
        self._sharding = sharding
        self._seed = seed
        self._shuffle = shuffle

    def __len__(self) -> int:
        return count_batches(self._count, self._sharding)

    def batches(self, epoch: int, done: int) -> Iterator[Picked]:
        """Yield this replica's batches."""
        order = order_of(self._count, self._seed, epoch, self._shuffle)
        for indices in batches_of(order, self._sharding, done):
            yield Picked(indices, self._sharding.stride)

    def load_state_dict(self, state: Any) -> None:
        """Do nothing: seed, epoch and samples are all."""


class GivenOrder:
    """Order of the caller's sampler, which shards by itself: its indices in batches.

    Its state is the sampler's at the start of the epoch, if it has one. Indices that were handed
    out are drawn again and skipped, not read.
    """

    is_own = True

    def __init__(self, sampler: Iterable[Any], sharding: Sharding, seed: int) -> None:
        self._sampler = sampler
        self._sharding = sharding
        self._seed = seed
        self._start: Any = None

    def __len__(self) -> int:
        alone = Sharding(self._sharding.batch_size, drop_last=self._sharding.drop_last)
        return count_batches(len(self._sampler), alone)  # type: ignore[arg-type]

    def batches(self, epoch: int, done: int) -> Iterator[Picked]:
        """Yield batches of the sampler's indices, without those that are done."""
        sampler: Any = self._sampler
        pass_epoch(sampler, epoch)
        if keeps_state(sampler):
            if self._start is None:
                self._start = state_of(sampler)
            else:
                sampler.load_state_dict(self._start)
        chunk: list[Any] = []
        for number, index in enumerate(self._drawn(epoch)):
            if number < done // self._sharding.replicas:
                continue
            chunk.append(index)
            if len(chunk) == self._sharding.batch_size:
                yield Picked(chunk, self._sharding.stride, self._start)
                chunk = []
        if chunk and not self._sharding.drop_last:
            yield Picked(chunk, self._sharding.stride, self._start)

    def _drawn(self, epoch: int) -> Iterator[Any]:
        """Yield its indices; torch's samplers draw their shuffle before the first one."""
        with drawing_from(mixed(self._seed, epoch)):
            indices = iter(self._sampler)
            first = next(indices, None)
        if first is not None:
            yield first
            yield from indices

    def load_state_dict(self, state: Any) -> None:
        """Start from the sampler's state at the start of the epoch."""
        self._start = state
