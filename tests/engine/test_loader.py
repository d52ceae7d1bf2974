"""The loader over `training_data`: each rank its part, in a new order each epoch."""

from __future__ import annotations

import functools
import itertools
import logging
import os
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from cases import every
from ranks import RankPools, RanksFailed
from torch.utils.data import (
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    TensorDataset,
    get_worker_info,
)

import hadal
from engine.toys import ROWS, config_of, engine_of, model_of
from hadal import comm
from hadal.data.loader import Loading, Reading, RepeatingLoader, ShardedLoader
from hadal.data.reading import Sharding
from hadal.errors import UsageError
from hadal.order import Picked


def numbers(count: int) -> TensorDataset:
    return TensorDataset(torch.arange(count))


def two_epochs(count: int, changes: dict[str, Any]) -> list[list[list[int]]]:
    _, _, loader, _ = hadal.initialize(
        model=model_of(), training_data=numbers(count), config=config_of(1, **changes)
    )
    assert loader.dataset.tensors[0].numel() == count
    epochs = [[batch[0].tolist() for batch in loader] for _ in range(2)]
    assert [len(epoch) for epoch in epochs] == [len(loader)] * 2
    return epochs


def test_ranks_share_an_epoch_and_shuffle_anew(ranks: RankPools) -> None:
    first, second = ranks(2).run(two_epochs, 24, {})
    orders = []
    for epoch in range(2):
        mine = [n for batch in first[epoch] for n in batch]
        theirs = [n for batch in second[epoch] for n in batch]
        assert sorted(mine + theirs) == list(range(24))
        assert [len(batch) for batch in first[epoch]] == [ROWS] * 4
        orders.append(mine)
    assert orders[0] != orders[1]


@pytest.mark.claims("dataloader_drop_last")
@pytest.mark.parametrize(("drop", "lengths"), [(False, [3, 3, 1]), (True, [3, 3])])
def test_the_last_batch_may_be_dropped(drop: bool, lengths: list[int], ranks: RankPools) -> None:
    for epochs in ranks(2).run(two_epochs, 13, {"dataloader_drop_last": drop}):
        assert [len(batch) for batch in epochs[0]] == lengths


class Stream(IterableDataset):
    def __iter__(self) -> Iterator[int]:
        return iter(range(7))


class Drawn(Stream):
    """Numbers in an order that is drawn anew each epoch."""

    def __len__(self) -> int:
        return 23

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(23).tolist())


def stream_and_collate(is_whole: bool | None, data: IterableDataset) -> Any:
    wishes = {"training_data": data, "collate_fn": tuple}
    engine = engine_of(0, wishes=wishes, dataloader_shard_iterable=is_whole)
    loader = engine.training_dataloader
    assert loader is not None
    return list(loader), list(loader), len(loader) if hasattr(data, "__len__") else None


@pytest.mark.claims("dataloader_shard_iterable")
def test_a_stream_is_shared_out_or_shards_itself_or_is_refused(ranks: RankPools) -> None:
    pool = ranks(2)
    whole = [(0, 1, 2), (3, 4, 5), (6,)]
    assert pool.run(stream_and_collate, False, Stream()) == [(whole, whole, None)] * 2
    first, second = [(0, 2, 4)], [(1, 3, 5)]
    assert pool.run(stream_and_collate, True, Stream()) == [
        (first, first, None),
        (second, second, None),
    ]
    with pytest.raises(RanksFailed, match=r"set dataloader_shard_iterable to true .* or to false"):
        pool.run(stream_and_collate, None, Stream())


def test_ranks_share_a_shuffled_stream(ranks: RankPools) -> None:
    (one, again, count), (other, _, _) = ranks(2).run(stream_and_collate, True, Drawn())
    assert [len(batch) for batch in one] == [len(batch) for batch in other] == [3, 3, 3, 2]
    assert count == 4
    assert one != again
    seen = [number for batch in one + other for number in batch]
    assert len(set(seen)) == len(seen) == 22, "the one that is left over is dropped"


# ---- one loader, without an engine ------------------------------------------------------------


class Drawing(Dataset):
    """Samples with noise of every generator that there is; counts what is read."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.read: list[int] = []

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[Any, ...]:
        self.read.append(index)
        return index, float(torch.rand(())), random.random(), float(np.random.random())


def drawing_collate(samples: list[Any]) -> tuple[Any, ...]:
    return (*samples, float(torch.rand(())))


class Counting(IterableDataset):
    """Numbers dealt out to the workers; remembers the next one."""

    def __init__(self, count: int = 17) -> None:
        self.count = count
        self.next: int | None = None
        self.reads = 0

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        first, step = (0, 1) if info is None else (info.id, info.num_workers)
        if self.next is None:
            self.next = first
        while self.next < self.count:
            self.next += step
            self.reads += 1
            yield self.next - step, random.random()
        self.next = None

    def state_dict(self) -> dict[str, Any]:
        return {"next": self.next}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.next = state["next"]


class Stateless(IterableDataset):
    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        first, step = (0, 1) if info is None else (info.id, info.num_workers)
        return ((number, random.random()) for number in range(first, 17, step))


class Tensors(IterableDataset):
    def __iter__(self) -> Iterator[Any]:
        return iter([(torch.ones(1),)] * 6)


def loader_of(kind: Callable[[], Any], workers: int = 0, **reading: Any) -> ShardedLoader:
    return ShardedLoader(
        kind(),
        Sharding(2, replicas=1),
        Reading(collate_fn=drawing_collate, workers=workers, **reading),
    )


def items() -> Drawing:
    return Drawing(15)


@functools.cache
def three_epochs(kind: Callable[[], Any], workers: int) -> list[list[Any]]:
    unbroken = loader_of(kind, workers)
    return [list(unbroken) for _ in range(3)]


def global_generators() -> tuple[Any, ...]:
    return torch.rand(()).item(), random.random(), np.random.random()


@pytest.mark.fast_cells(
    "0-0-items",
    "0-0-Stateless",
    "1-0-Stateless",
    "7-0-items",
    "7-0-Counting",
    "8-0-items",
    "9-0-Counting",
    "9-0-Stateless",
)
@every(taken=[0, 1, 7, 8, 9], workers=[0, 2], kind=[items, Counting, Stateless])
def test_a_loader_resumes_in_the_middle_of_an_epoch(
    kind: Callable[[], Any], workers: int, taken: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Same samples, same order, same random numbers, regardless of what was read ahead."""
    batches = three_epochs(kind, workers)
    assert batches[0] != batches[1]
    assert len(batches[0]) == (8 if kind is items else 9)

    broken = loader_of(kind, workers)
    broken.load_state_dict({**broken.state_dict(), "epoch": 1})
    iterator = iter(broken)
    first = list(itertools.islice(iterator, taken))
    state = broken.state_dict()
    assert state["epoch"] == 1 + (taken > len(batches[1]))

    again = loader_of(kind, workers)
    again.load_state_dict(state)
    assert again.state_dict() == state  # before the first batch, too
    rest = list(again)
    if state["epoch"] == 1:
        assert first + rest == batches[1]
        assert list(again) == batches[2]
    else:
        assert first == batches[1]
        assert rest == batches[2]
    told = kind is Stateless and taken in range(1, 10) and state["epoch"] == 1
    assert ("read again" in caplog.text) == told


@pytest.mark.parametrize("workers", [0, 2])
def test_a_shared_stream_resumes_on_each_rank(workers: int) -> None:
    def of_rank(replica: int) -> ShardedLoader:
        reading = Reading(collate_fn=tuple, workers=workers, shards_stream=True)
        return ShardedLoader(Counting(), Sharding(2, 2, replica), reading)

    seen: list[int] = []
    for replica in range(2):
        whole = list(of_rank(replica))
        broken, again = of_rank(replica), of_rank(replica)
        first = list(itertools.islice(broken, 3))
        again.load_state_dict(broken.state_dict())
        assert first + list(again) == whole
        seen += [number for batch in whole for number, _ in batch]
    assert len(set(seen)) == len(seen) == 16


def test_nothing_is_read_that_was_handed_out() -> None:
    first = loader_of(items)
    iterator = iter(first)
    next(iterator), next(iterator)
    again = loader_of(items)
    again.load_state_dict(first.state_dict())
    list(again)
    assert len(again.dataset.read) == 15 - 4
    stream = loader_of(Counting)
    iterator = iter(stream)
    next(iterator), next(iterator)
    again = loader_of(Counting)
    again.load_state_dict(stream.state_dict())
    list(again)
    assert again.dataset.reads == 17 - 4


def test_workers_and_the_programs_generators_change_nothing() -> None:
    torch.manual_seed(1), random.seed(1), np.random.seed(1)
    expected = global_generators()
    found = []
    for workers in (0, 1, 2):
        torch.manual_seed(1), random.seed(1), np.random.seed(1)
        found.append(list(loader_of(items, workers)))
        assert global_generators() == expected
    assert found[0] == found[1] == found[2]


def test_another_seed_is_another_order() -> None:
    one, other = loader_of(items), loader_of(items, seed=1)
    first, second = list(one), list(other)
    assert first != second
    one = loader_of(items)
    one.seed = 1
    assert list(one) == second
    again = loader_of(items)
    iterator = iter(other)
    next(iterator)
    again.load_state_dict(other.state_dict())  # the seed goes along
    assert list(again) == list(iterator)


def test_leaving_early_begins_the_next_epoch() -> None:
    loader, whole = loader_of(items), loader_of(items)
    epochs = [list(whole) for _ in range(2)]
    for batch in loader:
        assert batch == epochs[0][0]
        break
    assert loader.state_dict()["samples"] == 2  # a checkpoint would go on in that epoch
    assert list(loader) == epochs[1]


def test_an_iteration_in_progress_is_reset_with_its_loader() -> None:
    loader = loader_of(items)
    iterator = iter(loader)
    first = [next(iterator) for _ in range(2)]
    state = loader.state_dict()
    more = [next(iterator) for _ in range(3)]
    loader.load_state_dict(state)
    assert [next(iterator) for _ in range(3)] == more
    assert len(first + more + list(iterator)) == len(loader)


def test_the_rest_of_an_epoch_is_dealt_to_other_replicas() -> None:
    def loader(replicas: int, replica: int, rows: int) -> ShardedLoader:
        return ShardedLoader(numbers(40), Sharding(rows, replicas, replica))

    seen = []
    for replica in range(2):
        one = loader(2, replica, 3)
        seen += [n for batch in itertools.islice(one, 4) for n in batch[0].tolist()]
        state = one.state_dict()
    for replica in range(4):
        one = loader(4, replica, 2)
        one.load_state_dict(state)
        seen += [n for batch in one for n in batch[0].tolist()]
    assert sorted(seen) == list(range(40))


def test_a_changed_data_set_begins_its_epoch_anew(caplog: pytest.LogCaptureFixture) -> None:
    one, other = loader_of(items), loader_of(lambda: Drawing(9))
    list(itertools.islice(one, 3))
    with caplog.at_level(logging.WARNING, "hadal"):
        other.load_state_dict(one.state_dict())
    assert "had 15 samples" in caplog.text
    assert list(other) == list(loader_of(lambda: Drawing(9)))


def test_a_stream_of_other_workers_is_read_again(caplog: pytest.LogCaptureFixture) -> None:
    one = loader_of(Counting)
    iterator = iter(one)
    list(itertools.islice(iterator, 3))
    other = loader_of(Counting, workers=1)
    other.load_state_dict(one.state_dict())
    assert [batch[:2] for batch in other] == [batch[:2] for batch in iterator]
    assert "read again" in caplog.text


@pytest.mark.parametrize("can_pin", [False, True])
def test_batches_are_pinned_where_there_is_a_device(can_pin: bool) -> None:
    loading = Loading(Sharding(2), None, can_pin)
    assert loading.loader(numbers(4)).pin_memory is can_pin
    assert loading.loader(numbers(4), reading=Reading(pin_memory=False)).pin_memory is False


@pytest.mark.gpu
@pytest.mark.skipif(not torch.accelerator.is_available(), reason="no accelerator")
@pytest.mark.parametrize("kind", [lambda: numbers(6), Tensors], ids=["items", "stream"])
@pytest.mark.parametrize("workers", [0, 2])
def test_pinned_batches_lie_in_pinned_memory(kind: Callable[[], Any], workers: int) -> None:
    reading = Reading(workers=workers, pin_memory=True)
    for batch in ShardedLoader(kind(), Sharding(2), reading):
        assert batch[0].is_pinned()


# ---- samplers, and what is no data set --------------------------------------------------------


class Shuffled:
    """A sampler with a generator of its own, and a state."""

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(4)

    def __len__(self) -> int:
        return 15

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(15, generator=self.generator).tolist())

    def state_dict(self) -> dict[str, Any]:
        return {"generator": self.generator.get_state().tolist()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.generator.set_state(torch.tensor(state["generator"], dtype=torch.uint8))


SAMPLERS = [
    Shuffled,
    lambda: RandomSampler(range(15)),
    lambda: DistributedSampler(range(15), 1, 0),
    lambda: list(range(14, -1, -1)),
]


@pytest.mark.fast_cells("0-stateful", "0-random", "0-epochs", "0-list")
@pytest.mark.parametrize("sampler", SAMPLERS, ids=["stateful", "random", "epochs", "list"])
@pytest.mark.parametrize("workers", [0, 2])
def test_the_callers_sampler_resumes(sampler: Callable[[], Any], workers: int) -> None:
    unbroken = loader_of(items, workers, sampler=sampler())
    assert len(unbroken) == 8
    batches = [list(unbroken) for _ in range(3)]
    if not isinstance(sampler(), list):
        assert [sample[0] for sample in batches[0]] != [sample[0] for sample in batches[1]]
    broken = loader_of(items, workers, sampler=sampler())
    list(broken)
    first = list(itertools.islice(broken, 3))
    again = loader_of(items, workers, sampler=sampler())
    again.load_state_dict(broken.state_dict())
    assert first + list(again) == batches[1]
    assert len(again.dataset.read) == (0 if workers else 15 - 6)
    assert list(again) == batches[2]


@pytest.mark.parametrize(
    ("given", "reading", "told"),
    [
        (lambda: DataLoader(numbers(3)), {}, "DataLoader, which has no __getitem__"),
        (lambda: (n for n in range(3)), {}, "no __len__"),
        (Counting, {"sampler": [0]}, "its own order"),
        (items, {"sampler": iter([0])}, "no length"),
    ],
)
def test_data_without_samples_are_refused(given, reading, told) -> None:
    with pytest.raises(UsageError, match=told):
        loader_of(given, **reading)


@pytest.mark.parametrize("state", [{}, {"epoch": 1}, {"epoch": None, "samples": 1, "seed": 0}])
def test_invalid_states_are_refused(state: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="not a loader's state"):
        loader_of(items).load_state_dict(state)


# ---- orders -----------------------------------------------------------------------------------


class Growing:
    """Growing batches of samples drawn by a generator that continues from epoch to epoch."""

    is_own = False

    def __init__(self, replicas: int = 1, replica: int = 0) -> None:
        self.replicas, self.replica = replicas, replica
        self.generator, self.step = torch.Generator().manual_seed(5), 0

    def __len__(self) -> int:
        return 3

    def batches(self, epoch: int, done: int) -> Iterator[Picked]:
        while done < 12:
            self.step += 1
            size = self.step % 4 + 1
            chosen = torch.randint(15, (size * self.replicas,), generator=self.generator)
            done += size * self.replicas
            state = {"generator": self.generator.get_state().tolist(), "step": self.step}
            yield Picked(
                chosen.view(self.replicas, -1)[self.replica].tolist(), size * self.replicas, state
            )

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.generator.set_state(torch.tensor(state["generator"], dtype=torch.uint8))
        self.step = state["step"]


@pytest.mark.fast_cells("1-0", "3-0", "5-0", "7-0")
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("taken", [1, 3, 5, 7])
def test_an_order_resumes_after_the_last_returned_batch(workers: int, taken: int) -> None:
    whole = loader_of(items, sampler=Growing())
    batches = [batch for _ in range(3) for batch in whole]
    assert len({len(batch) for batch in batches}) > 2
    broken, found = loader_of(items, workers, sampler=Growing()), []
    state: dict[str, Any] = {}
    while not state:
        for batch in broken:
            found.append(batch)
            if len(found) == taken:
                state = broken.state_dict()
                break
    assert state["order"] == broken.state_dict()["order"]
    again = loader_of(items, workers, sampler=Growing())
    again.load_state_dict(state)
    while len(found) < len(batches):
        found += again
    assert found == batches


def test_replicas_share_an_order() -> None:
    mine, theirs = (loader_of(items, sampler=Growing(2, replica)) for replica in range(2))
    pairs = list(zip(mine, theirs, strict=True))
    assert all(len(one) == len(other) for one, other in pairs)
    assert mine.state_dict() == theirs.state_dict()
    assert [len(mine), len(theirs)] == [3, 3]


# ---- workers ----------------------------------------------------------------------------------


class Telling(Dataset):
    """Its samples say who reads them, in which epoch."""

    epoch = -1

    def __len__(self) -> int:
        return 8

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __getitem__(self, index: int) -> tuple[int, int, int, float]:
        return index, self.epoch, os.getpid(), float(torch.rand(()))


def test_workers_that_live_on_give_the_same_batches() -> None:
    def epochs(**reading: Any) -> list[list[Any]]:
        loader = loader_of(Telling, 2, **reading)
        next(iter(loader))  # left early: what was read ahead is thrown away
        return [list(loader) for _ in range(3)]

    def of(found: list[list[Any]], *columns: int) -> list[Any]:
        return [[sample[n] for n in columns] for e in found for b in e for sample in b[:-1]]

    anew = epochs()
    lasting = epochs(persistent_workers=True, prefetch_factor=1)
    assert of(anew, 0, 1, 3) == of(lasting, 0, 1, 3)
    assert [epoch for (epoch,) in of(lasting, 1)] == [1] * 8 + [2] * 8 + [3] * 8
    assert len({pid for (pid,) in of(lasting, 2)}) == 2
    assert len({pid for (pid,) in of(anew, 2)}) == 6


class Marked(Drawing):
    mark = -1

    def __getitem__(self, index: int) -> tuple[Any, ...]:
        return (Marked.mark,)


def mark_worker(worker: int) -> None:
    Marked.mark = 10 + worker


def test_workers_are_initialised_and_read_as_far_ahead_as_wished() -> None:
    def read_ahead(loader: ShardedLoader) -> int:
        drawn = 0

        class Counted(list[int]):
            def __iter__(self) -> Iterator[int]:
                nonlocal drawn
                for drawn, index in enumerate(range(15), 1):  # noqa: B007
                    yield index

        loader._reading = loader._reading._replace(sampler=Counted(range(15)))
        next(iter(loader))
        return drawn

    made = [
        loader_of(lambda: Marked(15), 2, worker_init_fn=mark_worker, prefetch_factor=ahead)
        for ahead in (1, 3)
    ]
    assert {sample for batch in made[0] for (sample,) in batch[:-1]} == {10, 11}
    assert [read_ahead(loader) for loader in made] == [2 * 3, 2 * 7]


@pytest.mark.parametrize(
    ("kind", "workers", "reading", "told"),
    [
        (items, 0, {"prefetch_factor": 2}, "num_local_io_workers"),
        (items, 0, {"persistent_workers": True}, "num_local_io_workers"),
        (Counting, 1, {"persistent_workers": True}, "leave persistent_workers out"),
    ],
)
def test_unsupported_work_of_workers_is_refused(kind, workers, reading, told) -> None:
    with pytest.raises(UsageError, match=told):
        loader_of(kind, workers, **reading)


def seeds() -> list[int]:
    found = []
    for seed in (7 + comm.get_rank(), torch.Generator().initial_seed()):
        model = model_of()
        torch.manual_seed(seed)
        engine = engine_of(0, model, {"training_data": numbers(9)})
        loader = engine.deepspeed_io(numbers(9), num_local_io_workers=1, prefetch_factor=1)
        assert loader.seed == engine.training_dataloader.seed
        found.append(loader.seed)
        engine.destroy()
    return found


def test_loaders_follow_the_programs_seed(ranks: RankPools) -> None:
    assert ranks(2).run(seeds) == [[7, 0]] * 2


# ---- for ever ---------------------------------------------------------------------------------


def test_repeating_begins_anew() -> None:
    epochs = loader_of(items)
    expected = [batch for _ in range(3) for batch in epochs]
    loader = RepeatingLoader(loader_of(items))
    assert len(loader) == 8
    assert [next(loader) for _ in range(11)] == expected[:11]
    state = loader.state_dict()
    again = hadal.RepeatingLoader(loader_of(items))
    again.load_state_dict(state)
    assert [next(again) for _ in range(13)] == expected[11:24]
    again.load_state_dict(state)
    assert next(iter(again)) == expected[11]
    # A checkpoint that an engine loads reaches the loader inside.
    loader.loader.load_state_dict(epochs.state_dict())
    assert next(loader) == next(iter(epochs))


def test_repeating_at_the_end_of_an_epoch() -> None:
    epochs = loader_of(items)
    expected = [batch for _ in range(2) for batch in epochs]
    loader = RepeatingLoader(loader_of(items))
    for _ in range(8):
        next(loader)
    again = RepeatingLoader(loader_of(items))
    again.load_state_dict(loader.state_dict())
    assert next(again) == expected[8]


def test_repeating_tells_torchs_sampler_the_epoch() -> None:
    data = range(12)
    sampler = DistributedSampler(data, 1, 0)
    loader = RepeatingLoader(DataLoader(data, 4, sampler=sampler))
    batches = [next(loader).tolist() for _ in range(6)]
    assert batches[:3] != batches[3:]


def test_repeating_nothing_is_an_error(caplog: pytest.LogCaptureFixture) -> None:
    loader = ShardedLoader(numbers(3), Sharding(2, 2, 0, drop_last=True))
    assert "gives no batch" in caplog.text
    with pytest.raises(UsageError, match="gives no batch"):
        next(RepeatingLoader(loader))
