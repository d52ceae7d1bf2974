"""Reading of samples into batches, in the program itself or in a loader's worker processes.

Random numbers of a data set or a `collate_fn` (torch's, Python's and numpy's generators) depend
only on the loader's seed, the epoch and the batch's position in it: not on the number of
workers, nor on a resume in between. The program's own generators are left as they were.
"""

from __future__ import annotations

import copy
import hashlib
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import Dataset, IterableDataset, get_worker_info

from hadal.errors import UsageError

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


@dataclass(frozen=True, slots=True)
class Trail:
    """Progress of one worker of a stream: the samples it has returned, not those it has read."""

    batches: int = 0
    state: Any = None
    """The data set's own state; None before the first batch."""
    ended: bool = False


@dataclass(frozen=True, slots=True)
class StreamPlan:
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
