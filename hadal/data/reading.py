"""Orders of samples, sharded over replicas, and the reading of them into batches.

A *replica* is a copy of the model that reads its own samples: a rank, or the ranks that share
one sequence. All replicas take turns in one order of the data set: replica r of R reads positions
r, r + R, r + 2R, ... After k batches of B samples each, exactly the first k·B·R positions have been
read, and the remaining ones can be sharded again, over any number of replicas.

Samples are read in the program itself or in a loader's worker processes. Random numbers of a data
set or a `collate_fn` (torch's, Python's and numpy's generators) depend only on the loader's seed,
the epoch and the batch's position in it: not on the number of workers, nor on a resume in between.
The program's own generators are left as they were.
"""

from __future__ import annotations

import copy
import hashlib
import random
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset, get_worker_info

from hadal.errors import UsageError
from hadal.order import Picked

Collate = Callable[[list[Any]], Any]


def mixed(*parts: int) -> int:
    """Return one 32-bit seed from several numbers."""
    text = ".".join(map(str, parts)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=4).digest(), "little")


@contextmanager
def drawing_from(seed: int) -> Iterator[None]:
    """Draw random numbers from `seed`, and leave the generators of this process as they were."""
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()
    # Not torch.manual_seed: that would reseed the accelerators' generators too.
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)
    try:
        yield
    finally:
        torch.set_rng_state(before[0])
        random.setstate(before[1])
        np.random.set_state(before[2])


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


class Request(NamedTuple):
    """Batch to be made: its samples, and the seed of its random numbers."""

    seed: int
    indices: list[Any]
    epoch: int


class Batches(Dataset[Any]):
    """Batches of a data set: item `request` is the batch of those samples."""

    def __init__(self, dataset: Any, collate: Collate, epoch: int) -> None:
        self._dataset = dataset
        self._collate = collate
        self._epoch = epoch
        """The epoch last passed to this process's data set."""

    def __getitem__(self, request: Request) -> Any:
        """Read the samples and make a batch of them."""
        if request.epoch != self._epoch:  # a persistent worker
            self._epoch = request.epoch
            pass_epoch(self._dataset, request.epoch)
        with drawing_from(request.seed):
            several = getattr(self._dataset, "__getitems__", None)
            if several is not None:
                samples = several(request.indices)
            else:
                samples = [self._dataset[index] for index in request.indices]
            return self._collate(samples)


class HandedBatch(NamedTuple):
    """Batch of a stream, the worker that read it, and the data set's state after it."""

    batch: Any
    worker: int
    state: Any
    is_last: bool
    """True if the worker has seen the end of its part."""


class Trail(NamedTuple):
    """Progress of one worker of a stream: the samples it has returned, not those it has read."""

    batches: int = 0
    state: Any = None
    """The data set's own state; None before the first batch."""
    ended: bool = False


class StreamPlan(NamedTuple):
    """Batching of a stream's workers, and their start positions."""

    sharding: Sharding
    """The replicas that take turns in the samples of one stream."""
    seeds: tuple[int, ...]
    """Equal for these replicas, so that the stream's random numbers are."""
    trails: tuple[Trail, ...]
    """One for each worker, or for the program itself."""
    turn: int = 0
    """The worker of the next batch."""

    def take(self, samples: Iterator[Any]) -> list[Any]:
        """Read a batch of all replicas; return this one's samples.

        All replicas get as many: the last samples, fewer than replicas, are dropped.
        """
        mine, read, replicas = [], 0, self.sharding.replicas
        for read, sample in enumerate(islice(samples, self.sharding.stride), 1):
            if (read - 1) % replicas == self.sharding.replica:
                mine.append(sample)
        return mine[: read // replicas]


class Stream(IterableDataset[HandedBatch | None]):
    """Batches of an `IterableDataset`, each with the state of the data set after it."""

    def __init__(self, dataset: Any, collate: Collate, plan: StreamPlan) -> None:
        self._dataset = dataset
        self._collate = collate
        self._plan = plan

    def __iter__(self) -> Iterator[HandedBatch | None]:
        """Yield this worker's batches; first None if the next batch is another worker's.

        Batches are collected from the workers in turn, worker 0 first.
        """
        plan, info = self._plan, get_worker_info()
        worker = 0 if info is None else info.id
        trail = plan.trails[worker]
        if worker < plan.turn:
            yield None
        if trail.ended:
            return
        if trail.state is not None:
            self._dataset.load_state_dict(trail.state)
        with drawing_from(mixed(*plan.seeds, worker)):
            samples = iter(self._dataset)
        done, is_last = trail.batches, False
        while not is_last:
            with drawing_from(mixed(*plan.seeds, worker, done)):
                some = plan.take(samples)
                is_last = len(some) < plan.sharding.batch_size
                if not some or (is_last and plan.sharding.drop_last):
                    return
                batch = self._collate(some)
            done += 1
            # In the program itself the state is read from the data set on demand.
            yield HandedBatch(batch, worker, info and state_of(self._dataset), is_last)


def state_of(dataset: Any) -> Any:
    """Return a copy of a data set's own state; None if it has none."""
    if not keeps_state(dataset):
        return None
    return copy.deepcopy(dataset.state_dict())


def keeps_state(dataset: Any) -> bool:
    """Return whether a data set can save and load its state."""
    return hasattr(dataset, "state_dict") and hasattr(dataset, "load_state_dict")


def pass_epoch(listener: Any, epoch: int) -> None:
    """Set the epoch of a data set or a sampler that shuffles by itself."""
    if hasattr(listener, "set_epoch"):
        listener.set_epoch(epoch)


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
