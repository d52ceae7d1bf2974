"""The orders that need no feature: the sharded shuffle, and a sampler of the caller's."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from hadal.engine.reading import drawing_from, keeps_state, mixed, state_of, tell_epoch
from hadal.engine.sampler import Sharding, batches_of, count_batches, order_of
from hadal.order import Picked


class ShardedOrder:
    """All replicas look at one order of the data set, and take turns in it."""

    is_own = False

    def __init__(self, count: int, sharding: Sharding, seed: int, *, shuffle: bool) -> None:
        self._count = count
        self._sharding = sharding
        self._seed = seed
        self._shuffle = shuffle

    def __len__(self) -> int:
        return count_batches(self._count, self._sharding)

    def batches(self, epoch: int, done: int) -> Iterator[Picked]:
        """This replica's turns."""
        order = order_of(self._count, self._seed, epoch, self._shuffle)
        for indices in batches_of(order, self._sharding, done):
            yield Picked(indices, self._sharding.stride)

    def load_state_dict(self, state: Any) -> None:
        """Nothing: seed, epoch and samples say all."""


class GivenOrder:
    """A sampler of the caller's, which shards by itself: its indices in batches.

    Its state is the sampler's at the beginning of the epoch, if it has one. What was handed out is
    drawn again and skipped, not read.
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
        """The sampler's indices from its beginning, without those that are done."""
        sampler: Any = self._sampler
        tell_epoch(sampler, epoch)
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
        """Its indices; torch's samplers draw what they shuffle by before the first one."""
        with drawing_from(mixed(self._seed, epoch)):
            indices = iter(self._sampler)
            first = next(indices, None)
        if first is not None:
            yield first
            yield from indices

    def load_state_dict(self, state: Any) -> None:
        """Begin where the sampler stood at the beginning of the epoch."""
        self._start = state
