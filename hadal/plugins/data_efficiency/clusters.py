"""Curriculum over samples: which samples are admitted, and in which order they come.

A cluster is the shuffled set of samples that a change of the difficulty admitted. Each batch draws
the number of samples to take from each cluster, by cluster size, and takes the next ones in order.
Every rank draws from the same generator, so ranks need not communicate.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from hadal.errors import UsageError
from hadal.plugins.data_efficiency.indexed import IndexedRows, smallest_dtype

Ids = npt.NDArray[Any]
"""Indices of samples, in the smallest unsigned type for the data set."""
_PART = 1 << 20


@dataclass(frozen=True, slots=True)
class Metric:
    """One measure of the difficulty of all samples."""

    name: str
    is_percentile: bool
    """True if a difficulty is a percentile of the samples, not a value of the measure."""
    percentiles: int
    """The maximum difficulty: the number of percentiles."""
    rows: IndexedRows | None = None
    """Samples from easy to hard; with values, one row for each. None admits all samples, of any
    difficulty."""
    values: npt.NDArray[Any] | None = None
    """Ascending distinct values of the measure, if difficulties are values."""

    def between(self, before: float, now: float) -> tuple[int, int]:
        """Return the positions in `rows` of the samples with a difficulty in (before, now]."""
        assert self.rows is not None
        if self.is_percentile:
            count = self.rows.count
            each = count // self.percentiles
            stop = count if now >= self.percentiles else each * int(now)
            return each * int(max(before, 0)), stop
        first, last = (self.rows.start(self._place(bound)) for bound in (before, now))
        return first, last

    def _place(self, bound: float) -> int:
        """Return how many values are less or equal."""
        assert self.values is not None
        # In the file's own type: comparing with another type would copy all values.
        kind = np.iinfo(self.values.dtype)
        if bound < kind.min:
            return 0
        if bound >= kind.max:
            return len(self.values)
        return int(np.searchsorted(self.values, self.values.dtype.type(bound), side="right"))


Difficulties = Mapping[str, int]


def admitted(
    metrics: Sequence[Metric],
    count: int,
    before: Difficulties,
    now: Difficulties,
    earlier: Sequence[Ids],
) -> Ids:
    """Return the samples that a change of the difficulties admits.

    The only arrays of all samples are the returned one and, with several metrics, one byte each.

    Args:
        metrics: the measures; a sample must be admitted by all of them.
        count: all samples.
        before: the difficulties until now; a missing metric admitted nothing.
        now: the new ones.
        earlier: the samples of all clusters so far.
    """
    kind = smallest_dtype(0, max(0, count - 1))
    choosing = [metric for metric in metrics if metric.rows is not None]
    if not choosing:
        return np.arange(0 if earlier else count, dtype=kind)
    if len(choosing) == 1:
        (metric,) = choosing
        assert metric.rows is not None
        first, stop = metric.between(before.get(metric.name, -math.inf), now[metric.name])
        found = np.empty(max(0, stop - first), kind)
        for start in range(0, len(found), _PART):
            found[start : start + _PART] = metric.rows.read(
                first + start, min(first + start + _PART, stop)
            )
        return found
    wanted = np.ones(count, np.bool_)
    for metric in choosing:
        assert metric.rows is not None
        own = np.zeros(count, np.bool_)
        first, stop = metric.between(-math.inf, now[metric.name])
        for start in range(first, stop, _PART):
            own[metric.rows.read(start, min(start + _PART, stop))] = True
        wanted &= own
    for cluster in earlier:
        wanted[cluster] = False
    found, place = np.empty(np.count_nonzero(wanted), kind), 0
    for start in range(0, count, _PART):
        some = np.flatnonzero(wanted[start : start + _PART])
        found[place : place + len(some)] = some + start
        place += len(some)
    return found


def state_of_generator(generator: np.random.Generator) -> tuple[Any, ...]:
    """Return a PCG64 generator's state as plain values."""
    state: Any = generator.bit_generator.state
    inner = state["state"]
    return (inner["state"], inner["inc"], state["has_uint32"], state["uinteger"])


def generator_of(state: Sequence[Any]) -> np.random.Generator:
    """Return a generator with a state of `state_of_generator`."""
    value, increment, has_half, half = state
    made = np.random.PCG64()
    made.state = {
        "bit_generator": "PCG64",
        "state": {"state": int(value), "inc": int(increment)},
        "has_uint32": int(has_half),
        "uinteger": int(half),
    }
    return np.random.Generator(made)


@dataclass(slots=True)
class Cluster:
    """Samples in order, and how many of them this round has used."""

    before: dict[str, int]
    """The difficulties before it was created."""
    now: dict[str, int]
    """The difficulties that created it."""
    ids: Ids
    shuffles: tuple[tuple[Any, ...], ...] = ()
    """The generator's states before each shuffle: with the difficulties, they give the order."""
    position: int = 0

    @property
    def key(self) -> tuple[Any, ...]:
        """The values that determine its samples and their order."""
        return (tuple(self.before.items()), tuple(self.now.items()), self.shuffles)

    @property
    def name(self) -> str:
        """The name of its file."""
        return "cluster" + "".join(f"_{name}{value}" for name, value in self.now.items())

    def shuffle(self, generator: np.random.Generator) -> None:
        """Shuffle, and start over."""
        self.shuffles = (*self.shuffles, state_of_generator(generator))
        shuffle(self.ids, generator)
        self.position = 0

    def next(self, count: int, generator: np.random.Generator) -> Ids:
        """Return the next samples; a cluster that runs out is shuffled as often as needed."""
        found = [self.ids[self.position : self.position + count].copy()]
        self.position += len(found[0])
        while (rest := count - sum(map(len, found))) > 0:
            self.shuffle(generator)
            found.append(self.ids[:rest].copy())
            self.position = len(found[-1])
        return np.concatenate(found)


@dataclass(slots=True)
class SampleStream:
    """The samples of all ranks, batch by batch."""

    metrics: Sequence[Metric]
    count: int
    """All samples of the data set."""
    batch: int
    """Samples of one update."""
    generator: np.random.Generator
    step: int = 0
    """Batches so far."""
    difficulties: dict[str, int] = field(default_factory=dict)
    """The difficulties of the last batch."""
    clusters: list[Cluster] = field(default_factory=list)
    path: str = ""
    """The JSON path of the curriculum, for messages."""

    def next(self, difficulties: dict[str, int]) -> tuple[list[int], Cluster | None]:
        """Return the samples of the next batch, and the new cluster if there is one.

        Raises:
            UsageError: no sample is admitted yet, or a difficulty that admits samples falls.
        """
        self.step += 1
        made = None
        if difficulties != self.difficulties:
            self._expect_no_fall(difficulties)
            made = self._admit(difficulties)
            self.difficulties = difficulties
        sizes = np.array([len(cluster.ids) for cluster in self.clusters], dtype=np.int64)
        if not len(sizes):
            told = ", ".join(f"{name} {value}" for name, value in difficulties.items())
            raise UsageError(
                f"{self.path}: no sample of {self.count} is admitted by the difficulties of step"
                f" {self.step} ({told}); raise min_difficulty"
                + (
                    ", or lower max_difficulty, the number of percentiles"
                    if any(metric.is_percentile for metric in self.metrics)
                    else ""
                )
            )
        drawn = self.generator.choice(len(sizes), self.batch, replace=True, p=sizes / sizes.sum())
        shares = np.bincount(drawn, minlength=len(sizes))
        taken = [
            cluster.next(int(share), self.generator)
            for cluster, share in zip(self.clusters, shares, strict=True)
        ]
        found = np.concatenate(taken)
        self.generator.shuffle(found)
        return found.tolist(), made

    def _expect_no_fall(self, difficulties: Difficulties) -> None:
        """Refuse a falling difficulty, which would admit samples twice once it rises again."""
        for metric in self.metrics:
            now = difficulties[metric.name]
            before = self.difficulties.get(metric.name, now)
            if metric.rows is not None and now < before:
                raise UsageError(
                    f"{self.path}.curriculum_metrics.{metric.name}: the difficulty falls from"
                    f" {before} to {now} in step {self.step}; return one that does not fall, since"
                    ' samples stay admitted, or choose the clustering_type "single_cluster"'
                )

    def _admit(self, difficulties: dict[str, int]) -> Cluster | None:
        ids = self._admitted(self.difficulties, difficulties)
        if not len(ids):
            return None
        made = Cluster(self.difficulties, difficulties, ids)
        made.shuffle(self.generator)
        self.clusters.append(made)
        return made

    def _admitted(self, before: Difficulties, now: Difficulties) -> Ids:
        earlier = [cluster.ids for cluster in self.clusters]
        return admitted(self.metrics, self.count, before, now, earlier)

    def state(self) -> dict[str, Any]:
        """Return the state as plain values; it is small, as clusters are recreated from it."""
        return {
            "np_rng_state": list(state_of_generator(self.generator)),
            "curriculum_step": self.step,
            "current_difficulties": self.difficulties,
            "clusters": [
                {
                    "before": cluster.before,
                    "now": cluster.now,
                    "samples": len(cluster.ids),
                    "shuffles": [list(shuffle) for shuffle in cluster.shuffles],
                    "position": cluster.position,
                }
                for cluster in self.clusters
            ],
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Restore a state: recreate the clusters, and shuffle them as before.

        Raises:
            UsageError: the files of the metrics admit other samples than those of the state.
        """
        self.step = int(state["curriculum_step"])
        self.difficulties = dict(state["current_difficulties"])
        wanted = [_cluster_of(saved) for saved in state["clusters"]]
        keys = {cluster.key for cluster in wanted}
        # Release unused clusters before creating others.
        known = {cluster.key: cluster.ids for cluster in self.clusters if cluster.key in keys}
        self.clusters = []
        for made, saved in zip(wanted, state["clusters"], strict=True):
            ids = known.get(made.key)
            made.ids = self._again(made, int(saved["samples"])) if ids is None else ids
            self.clusters.append(made)
        self.generator = generator_of(state["np_rng_state"])

    def _again(self, made: Cluster, count: int) -> Ids:
        """Return the samples of a cluster in the order of its last shuffle."""
        ids = self._admitted(made.before, made.now)
        if len(ids) != count:
            raise UsageError(
                f"{self.path}: the files of the metrics admit {len(ids)} samples to {made.name},"
                f" but the checkpoint has {count}; resume with the metric files and the data set of"
                " that run"
            )
        for state in made.shuffles:
            shuffle(ids, generator_of(state))
        return ids


def _cluster_of(saved: Mapping[str, Any]) -> Cluster:
    shuffles = tuple(tuple(state) for state in saved["shuffles"])
    return Cluster(
        dict(saved["before"]),
        dict(saved["now"]),
        np.empty(0, np.uint8),
        shuffles,
        int(saved["position"]),
    )


# ---- shuffling -----------------------------------------------------------------------------------

# Saved runs rely on the order of `numpy.random.Generator.shuffle`, Fisher and Yates's: from
# the last place down, the number at each place is swapped with the one at a place drawn at random.
# With 100 million numbers nearly every swap waits for memory, and numpy makes one after another.
# Here thousands of positions are drawn at once, and swapped together as long as none repeats.

_FEW = 1 << 24
"""Below this size numpy is as fast, as positions within a block repeat too often."""
_BLOCK = 1 << 13
"""Draws at a time: their positions fit into a processor's own cache."""
_LIMIT = 1 << 32
"""Positions beyond it are drawn from 64 bits; no data set has them."""


def shuffle(numbers: npt.NDArray[Any], generator: np.random.Generator) -> None:
    """Shuffle in place, as `generator.shuffle` does: the same order, and the same state after it.

    Args:
        numbers: one dimension, any dtype of integers.
        generator: advanced as by its own `shuffle`.
    """
    if len(numbers) > _LIMIT:
        generator.shuffle(numbers)
        return
    last = len(numbers) - 1
    while last >= _FEW:
        last -= _swap_block(numbers[: last + 1], generator)
    # numpy swaps numbers of 8 bytes faster than any others.
    rest = numbers[: last + 1]
    wide = rest.astype(np.int64)
    generator.shuffle(wide)
    rest[:] = wide


def _swap_block(numbers: npt.NDArray[Any], generator: np.random.Generator) -> int:
    """Make the next swaps from the end of the numbers down; return how many."""
    last = len(numbers) - 1
    # A position is drawn from the fewest bits that hold the last one, and redrawn until it is not
    # beyond the position to swap with.
    bits = (1 << last.bit_length()) - 1
    draws = min(_BLOCK, last - (bits >> 1))
    drawn = _drawn(generator, draws)
    drawn &= np.uint32(bits)
    lowest = last - draws
    taken = drawn <= lowest
    # Numbers that are not beyond the lowest wrap around, and are large.
    near = np.flatnonzero(drawn - np.uint32(lowest + 1) < np.uint32(draws))
    for index in near.tolist():
        # Whether it is beyond depends on the swaps before it.
        taken[index] = int(drawn[index]) <= last - np.count_nonzero(taken[:index])
    small = drawn.take(np.flatnonzero(taken))
    places = small.astype(np.int64)
    start = 0
    for alone in [*_alone(small, lowest if len(near) else last), len(places)]:
        part = places[start:alone]
        top = numbers[last - alone + 1 : last - start + 1][::-1]
        found = numbers.take(part)
        numbers[part] = top
        top[:] = found
        if alone < len(places):
            pair = [last - alone, int(places[alone])]
            numbers[pair] = numbers[pair[::-1]]
        start = alone + 1
    return len(places)


def _drawn(generator: np.random.Generator, count: int) -> npt.NDArray[np.uint32]:
    """Return `count` numbers of 32 bits, as the generator would draw them one by one."""
    source = generator.bit_generator
    is_whole = isinstance(source, np.random.PCG64) and count % 2 == 0 and sys.byteorder == "little"
    if is_whole and not source.state["has_uint32"]:
        # It draws 64 bits, and returns their lower half first.
        raw: npt.NDArray[np.uint64] = source.random_raw(count // 2)
        return raw.view(np.uint32)
    return generator.integers(0, _LIMIT, count, dtype=np.uint32)


def _alone(places: npt.NDArray[np.uint32], lowest: int) -> list[int]:
    """Return which swaps cannot be done together with those before them.

    These are the swaps with a position above `lowest`, which another swap of the block may change,
    and those with a repeated position.
    """
    ordered = np.sort(places)
    twice = ordered[1:][ordered[1:] == ordered[:-1]].tolist()
    found = set(np.flatnonzero(places > np.uint32(lowest)).tolist())
    for place in twice:
        found.update(np.flatnonzero(places == place)[1:].tolist())
    return sorted(found)
