"""Loaders: `initialize(training_data=...)` and `engine.deepspeed_io` return a `ShardedLoader`.

A loader counts the samples that it has returned to the program. It saves that number; samples that
workers have read ahead do not count.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate

from hadal.data.reading import (
    Batches,
    Collate,
    GivenOrder,
    HandedBatch,
    Request,
    ShardedOrder,
    Sharding,
    Stream,
    StreamPlan,
    Trail,
    count_batches,
    mixed,
    pass_epoch,
    state_of,
)
from hadal.errors import UsageError
from hadal.order import Order, Picked

_log = logging.getLogger(__name__)
PostProcess = Callable[[Any, Mapping[str, Any]], Any]


class Reading(NamedTuple):
    """Options of a loader."""

    collate_fn: Collate | None = None
    """Makes a batch of a list of samples; None: torch's `default_collate`."""
    workers: int = 0
    """Worker processes that read ahead; 0: the program reads."""
    pin_memory: bool = False
    """True puts batches in pinned host memory, from which copies to a device overlap."""
    shuffle: bool = True
    sampler: Iterable[Any] | Order | None = None
    """An order, or this replica's samples in order, in place of the shuffled and sharded one."""
    seed: int | None = None
    """Seed of the order and of random numbers; None: the engine's, or 0."""
    prefetch_factor: int | None = None
    """Batches that each worker reads ahead; None: torch's default."""
    persistent_workers: bool = False
    """True keeps workers from one epoch to the next."""
    worker_init_fn: Callable[[int], None] | None = None
    """Called in each worker with its number before it reads."""
    shards_stream: bool | None = None
    """True shards an `IterableDataset`; False: it gives each replica its own samples."""


class ShardedLoader:
    """Loader over each replica's own shard of a data set, reshuffled each epoch.

    One iteration is one epoch; the next iteration starts the next epoch. All replicas get the same
    number of batches. `state_dict` records how much of the epoch was consumed, also inside a `for`
    loop or after an early exit. The first iteration after `load_state_dict` yields the remaining
    batches of that epoch (none at its end); an iteration under way continues there.

    An `IterableDataset` is sharded as `dataloader_shard_iterable` says: either the loader takes
    every n-th sample of it and drops the last fewer than n, or the data set shards its samples
    itself. It resumes by its own `state_dict` and `load_state_dict`; if it has none, its first
    samples are read again and dropped. If it shards them itself, as a sampler that the caller
    passes does, it must return as many batches on every rank: the other ranks wait for one whose
    data has ended.

    The order, and all random numbers of the data set and `collate_fn`, depend only on `seed`, not
    on the number of workers or on resuming. It may be set before the first epoch. An engine's
    loaders use the seed that rank 0 passed to `torch.manual_seed` before `initialize`.
    """

    def __init__(
        self, dataset: Dataset[Any], sharding: Sharding, reading: Reading | None = None
    ) -> None:
        reading = Reading() if reading is None else reading
        self.dataset = dataset
        self.sharding = sharding
        self.seed = reading.seed or 0
        self._reading = reading
        self._collate: Collate = reading.collate_fn or default_collate
        self._is_stream = isinstance(dataset, IterableDataset)
        self._check()
        self._epoch = 0
        self._handed = 0
        # Whether the next iteration continues the epoch, and how often a state was loaded.
        self._resumes = False
        self._loads = 0
        self._order_state: Any = None
        self._kept: tuple[DataLoader[Any], _Feed] | None = None
        self._trails = self._fresh_trails()
        self._in_turn = True
        self._post_process: PostProcess | None = None
        self.on_batch: Callable[[Any], None] | None = None
        """Called with the order's note for each batch that is returned, and with None when an
        iteration begins."""
        if not self._is_stream and len(self) == 0:
            _log.warning(
                "a loader gives no batch: %d samples on %d replicas, %d to a batch, drop_last %s",
                self._count(),
                sharding.replicas,
                sharding.batch_size,
                sharding.drop_last,
            )

    def _check(self) -> None:
        reading, replicas = self._reading, self.sharding.replicas
        if not reading.workers and (reading.persistent_workers or reading.prefetch_factor):
            raise UsageError(
                "prefetch_factor and persistent_workers require workers, and there are none; set"
                " num_local_io_workers too"
            )
        if self._is_stream:
            if reading.sampler is not None:
                raise UsageError(
                    "an IterableDataset has its own order of samples; leave data_sampler out"
                )
            if replicas > 1 and reading.shards_stream is None:
                raise UsageError(
                    f"{type(self.dataset).__name__} is an IterableDataset, and {replicas} ranks"
                    " read it; set dataloader_shard_iterable to true if it is the same on all"
                    " ranks, each of which then takes every n-th sample, or to false if it gives"
                    " each rank its own samples"
                )
            if reading.persistent_workers:
                raise UsageError(
                    "the workers of an IterableDataset start each epoch with the data set as it is"
                    " in the program; leave persistent_workers out"
                )
            return
        for method in ("__len__", "__getitem__"):
            if not hasattr(self.dataset, method):
                raise UsageError(
                    f"a loader takes a data set, with a length and items or an IterableDataset; got"
                    f" {type(self.dataset).__name__}, which has no {method}"
                )
        if not hasattr(self._reading.sampler or (), "__len__"):
            raise UsageError("data_sampler has no length; pass a sampler of one epoch's indices")

    @property
    def batch_size(self) -> int:
        """Samples of one batch on this rank."""
        return self.sharding.batch_size

    @property
    def epoch(self) -> int:
        """The number of the epoch under way, or of the next one; the first is 0."""
        return self._epoch

    @property
    def epochs(self) -> float | None:
        """Epochs read so far, as 1.25; None if the data set has no length."""
        try:
            return self._epoch + min(1.0, self._handed / self._count())
        except (TypeError, ZeroDivisionError):
            return None

    @property
    def num_workers(self) -> int:
        """Worker processes that read ahead."""
        return self._reading.workers

    @property
    def pin_memory(self) -> bool:
        """True if batches are in pinned host memory."""
        return self._reading.pin_memory

    def __len__(self) -> int:
        """Return the micro-batches of one whole epoch on this rank.

        Raises:
            TypeError: an `IterableDataset` without a length.
        """
        if self._is_stream:
            sharding = self._sharding_of_stream
            alone = replace(sharding, replicas=1, replica=0)
            return count_batches(self._count() // sharding.replicas, alone)
        return len(self._order)

    @property
    def _order(self) -> Order:
        given = self._reading.sampler
        if isinstance(given, Order):
            return given
        if given is not None:
            return GivenOrder(given, self.sharding, self.seed)
        return ShardedOrder(self._count(), self.sharding, self.seed, shuffle=self._reading.shuffle)

    @property
    def given_order(self) -> Order | None:
        """The order that the loader was given, if it was."""
        given = self._reading.sampler
        return given if isinstance(given, Order) else None

    def _order_note(self) -> Mapping[str, Any]:
        return self._order_state if isinstance(self._order_state, Mapping) else {}

    def set_post_process(self, change: PostProcess) -> None:
        """Change each batch before it is handed out.

        Args:
            change: a function of the batch and a dict that describes it. With
                `data_sampling.curriculum_learning`, that has `current_difficulties` by metric and
                `curriculum_step`, of this very batch, also if workers read ahead.

        Raises:
            UsageError: this is no function.
        """
        if not callable(change):
            raise UsageError(
                "set_post_process: expected a function of the batch and its state, got"
                f" {type(change).__name__}"
            )
        self._post_process = change

    def _count(self) -> int:
        given = self._reading.sampler
        counted: Any = self.dataset if given is None or isinstance(given, Order) else given
        return len(counted)

    def __iter__(self) -> Iterator[Any]:
        """Yield one epoch's micro-batches, or the remaining ones after `load_state_dict`."""
        if not self._resumes and self._handed:
            self._next_epoch()
        while True:
            loads, self._resumes = self._loads, False
            for batch in self._stream() if self._is_stream else self._batches():
                yield batch if self._post_process is None else self._processed(batch)
                if self._loads != loads:
                    break
            if self._loads == loads:
                break
        self._next_epoch()

    def _processed(self, batch: Any) -> Any:
        assert self._post_process is not None
        changed = self._post_process(batch, self._order_note())
        if changed is None:
            raise UsageError("the function given to set_post_process returned None, not a batch")
        return changed

    def _next_epoch(self) -> None:
        self._epoch += 1
        self._handed = 0
        if self._is_stream or self._order.is_own:
            self._order_state = None
        self._trails, self._in_turn = self._fresh_trails(), True

    def _fresh_trails(self) -> tuple[Trail, ...]:
        return (Trail(),) * max(1, self._reading.workers)

    # ---- data sets with indices ------------------------------------------------------------------

    def _batches(self) -> Iterator[Any]:
        pass_epoch(self.dataset, self._epoch)
        order, picks = self._order, deque[Picked]()
        if self._order_state is not None:
            order.load_state_dict(self._order_state)
        if self.on_batch is not None:
            self.on_batch(None)
        batches = Batches(self.dataset, self._collate, self._epoch)
        for batch in self._loader(batches, self._requests(order, picks)):
            picked = picks.popleft()
            self._handed += picked.samples
            self._order_state = picked.state
            if self.on_batch is not None:
                self.on_batch(picked.note)
            yield batch

    def _requests(self, order: Order, picks: deque[Picked]) -> Iterator[Request]:
        place = self._handed + self.sharding.replica
        for picked in order.batches(self._epoch, self._handed):
            picks.append(picked)
            yield Request(mixed(self.seed, self._epoch, place), picked.indices, self._epoch)
            place += picked.samples

    # ---- streams ---------------------------------------------------------------------------------

    @property
    def _sharding_of_stream(self) -> Sharding:
        """The replicas that read the same stream as this one."""
        if self._reading.shards_stream:
            return self.sharding
        return replace(self.sharding, replicas=1, replica=0)

    def _stream(self) -> Iterator[Any]:
        pass_epoch(self.dataset, self._epoch)
        trails, turn, skipped = self._start_of_stream()
        own = 0 if self._reading.shards_stream else self.sharding.replica
        seeds = (self.seed, self._epoch, own)
        plan = StreamPlan(self._sharding_of_stream, seeds, trails, turn)
        self._trails, self._in_turn = trails, True
        number = sum(trail.batches for trail in trails)
        for handed in self._loader(Stream(self.dataset, self._collate, plan)):
            if handed is None:
                continue
            self._follow(handed, number)
            number += 1
            if number > skipped:
                self._handed += self.sharding.stride
                yield handed.batch

    def _start_of_stream(self) -> tuple[tuple[Trail, ...], int, int]:
        """Return where the workers start, the worker to read first, and the batches to drop."""
        done = self._handed // self.sharding.stride
        known = all(trail.state is not None or not trail.batches for trail in self._trails)
        if known and self._in_turn and sum(trail.batches for trail in self._trails) == done:
            return self._trails, done % len(self._trails), 0
        _log.warning(
            "%s has no state to resume from: its first %d batches are read again and dropped",
            type(self.dataset).__name__,
            done,
        )
        return self._fresh_trails(), 0, done

    def _follow(self, handed: HandedBatch, number: int) -> None:
        """Note a worker's progress, and whether workers still take turns."""
        self._in_turn &= handed.worker == number % len(self._trails)
        trails = list(self._trails)
        batches = trails[handed.worker].batches + 1
        trails[handed.worker] = Trail(batches, handed.state, handed.is_last)
        self._trails = tuple(trails)

    # ---- both ------------------------------------------------------------------------------------

    def _loader(self, dataset: Any, requests: Iterator[Request] | None = None) -> Iterable[Any]:
        """Return a loader of whole batches that draws no random numbers from the program."""
        if self._kept is not None:
            made, feed = self._kept
            feed.requests = requests
            return made
        reading, feed = self._reading, _Feed(requests)
        made = DataLoader(
            dataset,
            batch_size=None,
            sampler=None if self._is_stream else feed,
            num_workers=reading.workers,
            collate_fn=_as_it_is,
            pin_memory=reading.pin_memory,
            generator=torch.Generator().manual_seed(mixed(self.seed, self._epoch)),
            worker_init_fn=reading.worker_init_fn,
            prefetch_factor=reading.prefetch_factor,
            persistent_workers=reading.persistent_workers,
        )
        if reading.persistent_workers:
            self._kept = made, feed
        return made

    def state_dict(self) -> dict[str, Any]:
        """Return the epoch and how much of it was consumed: plain values, equal on all ranks.

        The state of an `IterableDataset` or a sampler may differ between ranks.
        """
        state: dict[str, Any] = {
            "epoch": self._epoch,
            "samples": self._handed,
            "seed": self.seed,
            "dataset_samples": None if self._is_stream else self._count(),
        }
        if self._order_state is not None:
            state["sampler" if self._order.is_own else "order"] = self._order_state
        if self._is_stream:
            state["stream"] = self._stream_state()
        return state

    def _stream_state(self) -> dict[str, Any]:
        trails = self._trails
        if not self._reading.workers and not self._resumes:
            trails = (trails[0]._replace(state=state_of(self.dataset)),)
        rows = [[trail.batches, trail.state, trail.ended] for trail in trails]
        return {"workers": self._reading.workers, "in_turn": self._in_turn, "trails": rows}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from the position in `state`, with any batch size and number of replicas.

        If the data set now has another length, the epoch is restarted, with a warning.

        Raises:
            UsageError: `state` was not returned by `state_dict`.
        """
        try:
            epoch, samples, seed = (int(state[key]) for key in ("epoch", "samples", "seed"))
        except (KeyError, TypeError, ValueError) as error:
            raise UsageError(f"this is not a loader's state ({error!r}): {state!r}") from error
        count = None if self._is_stream else self._count()
        if state.get("dataset_samples") != count:
            _log.warning(
                "the data set had %s samples when the loader was saved, and has %s now: epoch %d is"
                " restarted",
                state.get("dataset_samples"),
                count,
                epoch,
            )
            samples = 0
        self._epoch, self._handed, self.seed = epoch, samples, seed
        self._order_state = state.get("sampler", state.get("order"))
        self._trails, self._in_turn = self._fresh_trails(), True
        stream = state.get("stream") or {}
        if stream.get("workers") == self._reading.workers:
            self._trails = tuple(Trail(*row) for row in stream["trails"])
            self._in_turn = bool(stream["in_turn"])
        self._resumes = True
        self._loads += 1


class ChosenOrder(NamedTuple):
    """The order of the training data, if the configuration requests one."""

    path: str
    """The JSON path of the section that does."""
    make: Callable[[Dataset[Any]], Order]
    """Makes it for a data set with a length and items."""
    workers: int
    pin_memory: bool
    on_batch: Callable[[Any], None] | None = None
    """Follows the loader, as `ShardedLoader.on_batch`."""
    collate_fn: Collate | None = None
    """Collate function if the program passes none; None: torch's `default_collate`."""


class Loading(NamedTuple):
    """Options that the loaders of one engine share."""

    sharding: Sharding
    collate_fn: Collate | None
    can_pin: bool
    """True if there is a device to which pinned memory is copied faster."""
    seed: int = 0
    shards_stream: bool | None = None
    """True shards an `IterableDataset`; None: one over several replicas is refused."""
    chosen: ChosenOrder | None = None
    """The order of training data, if the configuration has one."""

    def training_loader(
        self, dataset: Dataset[Any], reading: Reading, batch_size: int | None = None
    ) -> ShardedLoader:
        """Return the loader of training, in the configuration's order unless one is given.

        Raises:
            UsageError: the configuration has an order, and the data set no indices; or its files do
                not belong to the data set.
        """
        chosen = self.chosen
        if chosen is None or reading.sampler is not None:
            return self.loader(dataset, batch_size, reading)
        if batch_size not in (None, self.sharding.batch_size):
            raise UsageError(
                f"deepspeed_io(batch_size={batch_size}): {chosen.path} makes the micro-batches"
                f" (train_micro_batch_size_per_gpu {self.sharding.batch_size}); leave batch_size"
                " out"
            )
        if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__"):
            raise UsageError(
                f"{chosen.path} chooses samples by their index; {type(dataset).__name__} has none."
                " Give a data set with a length and items"
            )
        reading = reading._replace(
            sampler=chosen.make(dataset),
            collate_fn=reading.collate_fn or self.collate_fn or chosen.collate_fn,
            workers=reading.workers or chosen.workers,
            pin_memory=chosen.pin_memory,
        )
        made = self.loader(dataset, None, reading)
        made.on_batch = chosen.on_batch
        return made

    def loader(
        self, dataset: Dataset[Any], batch_size: int | None = None, reading: Reading | None = None
    ) -> ShardedLoader:
        """Return a loader over `dataset`; missing arguments come from the configuration."""
        reading = Reading(pin_memory=True) if reading is None else reading
        sharding = self.sharding
        return ShardedLoader(
            dataset,
            sharding if batch_size is None else replace(sharding, batch_size=batch_size),
            reading._replace(
                collate_fn=reading.collate_fn or self.collate_fn,
                pin_memory=reading.pin_memory and self.can_pin,
                seed=self.seed if reading.seed is None else reading.seed,
                shards_stream=self.shards_stream,
            ),
        )


def _as_it_is(batch: Any) -> Any:
    return batch


class _Feed:
    """Requests of the current epoch, for a loader that outlives it."""

    def __init__(self, requests: Iterator[Request] | None) -> None:
        self.requests = requests

    def __iter__(self) -> Iterator[Request]:
        assert self.requests is not None  # a stream has none, and no feed
        return self.requests


class RepeatingLoader:
    """Endless iterator over a loader, which restarts at its end.

    `len`, `state_dict` and `load_state_dict` are the loader's. If the loader's sampler has
    `set_epoch`, it is called at each epoch (torch's `DistributedSampler` would otherwise repeat
    one order).
    """

    def __init__(self, loader: Any) -> None:
        self.loader = loader
        self._iterator: Iterator[Any] | None = None
        self._epoch = -1

    def __len__(self) -> int:
        """Return the batches of one epoch."""
        return len(self.loader)

    def __iter__(self) -> RepeatingLoader:
        return self

    def __next__(self) -> Any:
        """Return the next batch.

        Raises:
            UsageError: the loader returns no batch at all.
        """
        # One epoch may be empty, if the checkpoint was saved at its end.
        for _ in range(3):
            if self._iterator is None:
                self._iterator = self._begin()
            for batch in self._iterator:
                return batch
            self._iterator = None
        raise UsageError(
            f"RepeatingLoader: {type(self.loader).__name__} gives no batch; is the data set empty,"
            " or smaller than one batch on all ranks with dataloader_drop_last?"
        )

    def _begin(self) -> Iterator[Any]:
        self._epoch += 1
        set_epoch = getattr(getattr(self.loader, "sampler", None), "set_epoch", None)
        if set_epoch is not None:
            set_epoch(self._epoch)
        return iter(self.loader)

    def state_dict(self) -> Any:
        """Return the loader's state."""
        return self.loader.state_dict()

    def load_state_dict(self, state: Any) -> None:
        """Resume the loader from a saved state."""
        self._iterator = None
        self.loader.load_state_dict(state)
