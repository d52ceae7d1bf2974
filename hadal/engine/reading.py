"""What reads samples and makes batches, in the program itself or in a loader's worker processes.

What a data set or a `collate_fn` draws at random (torch's, Python's and numpy's generators) hangs
on the loader's seed, the epoch and the place of the batch in it alone: not on the number of
workers, nor on a break in between. The program's own generators are left as they were.
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

Collate = Callable[[list[Any]], Any]


def mixed(*parts: int) -> int:
    """One seed of 32 bits from several numbers."""
    text = ".".join(map(str, parts)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=4).digest(), "little")


@contextmanager
def drawing_from(seed: int) -> Iterator[None]:
    """Draw random numbers from `seed`, and leave the generators of this process as they were."""
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()
    # Not torch.manual_seed: that would start the accelerators' generators anew too.
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)
    try:
        yield
    finally:
        torch.set_rng_state(before[0])
        random.setstate(before[1])
        np.random.set_state(before[2])


class Request(NamedTuple):
    """A batch that is to be made: its samples, and what it draws from."""

    seed: int
    indices: list[Any]
    epoch: int


class Batches(Dataset[Any]):
    """A data set's batches: item `request` is the batch of those samples."""

    def __init__(self, dataset: Any, collate: Collate, epoch: int) -> None:
        self._dataset = dataset
        self._collate = collate
        self._epoch = epoch
        """The one that this process's data set was told."""

    def __getitem__(self, request: Request) -> Any:
        """Read the samples and make a batch of them."""
        if request.epoch != self._epoch:  # a worker that has lived on
            self._epoch = request.epoch
            tell_epoch(self._dataset, request.epoch)
        with drawing_from(request.seed):
            several = getattr(self._dataset, "__getitems__", None)
            if several is not None:
                samples = several(request.indices)
            else:
                samples = [self._dataset[index] for index in request.indices]
            return self._collate(samples)


class HandedBatch(NamedTuple):
    """What a stream hands over: a batch, who read it, and where its data set stands after it."""

    batch: Any
    worker: int
    state: Any
    is_last: bool
    """Whether the worker has seen the end of its part."""


@dataclass(frozen=True, slots=True)
class Trail:
    """How far one worker of a stream has come: what it has handed over, not what it has read."""

    batches: int = 0
    state: Any = None
    """The data set's own state; None before the first batch."""
    ended: bool = False


@dataclass(frozen=True, slots=True)
class StreamPlan:
    """How the workers of a stream make batches, and where they begin."""

    batch_size: int
    drop_last: bool
    seeds: tuple[int, ...]
    trails: tuple[Trail, ...]
    """One for each worker, or for the program itself."""
    turn: int = 0
    """Whose batch is the next one."""


class Stream(IterableDataset[HandedBatch | None]):
    """The batches of an `IterableDataset`, each with the state of the data set behind it."""

    def __init__(self, dataset: Any, collate: Collate, plan: StreamPlan) -> None:
        self._dataset = dataset
        self._collate = collate
        self._plan = plan

    def __iter__(self) -> Iterator[HandedBatch | None]:
        """This worker's batches; first None where the next batch is another worker's.

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
                some = list(islice(samples, plan.batch_size))
                is_last = len(some) < plan.batch_size
                if not some or (is_last and plan.drop_last):
                    return
                batch = self._collate(some)
            done += 1
            # In the program itself the data set is asked when its state is wanted.
            yield HandedBatch(batch, worker, info and state_of(self._dataset), is_last)


def state_of(dataset: Any) -> Any:
    """A copy of a data set's own state; None where it keeps none."""
    if not keeps_state(dataset):
        return None
    return copy.deepcopy(dataset.state_dict())


def keeps_state(dataset: Any) -> bool:
    """Whether a data set can be put back where it was."""
    return hasattr(dataset, "state_dict") and hasattr(dataset, "load_state_dict")


def tell_epoch(listener: Any, epoch: int) -> None:
    """Tell the epoch to a data set or a sampler that shuffles by itself."""
    if hasattr(listener, "set_epoch"):
        listener.set_epoch(epoch)
