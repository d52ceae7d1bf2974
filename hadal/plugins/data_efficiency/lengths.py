"""Lengths of a data set's samples (measured, given or read from files), and packs of samples.

A *pack* is a list of samples of different lengths that are read together, of a limited number of
tokens. Packs are stored end to end.
"""

from __future__ import annotations

import heapq
import logging
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from hadal.errors import UsageError
from hadal.plugins.data_efficiency.indexed import idx_path
from hadal.plugins.data_efficiency.metric_files import read_rows, write_values

_log = logging.getLogger(__name__)
_PATH = "data_efficiency.data_sampling.dynamic_batching"
_WHERE = f"{_PATH}.metrics_path"
_NAMES = ("input_ids", "tokens")
_GIVEN = ("lengths", "sizes")


def length_of(sample: Any) -> int:
    """Return the number of tokens of a sample.

    This is the length of `input_ids` or `tokens`, or of the first part with a length; for a
    tensor, an array or a list of numbers, its own length.

    Raises:
        UsageError: it has no length.
    """
    found = _sequence(sample)
    if found is None:
        raise UsageError(
            f"{_PATH}: cannot find the length of a sample, which is {type(sample).__name__}; give"
            " the data set an attribute `lengths` with the tokens of each sample"
        )
    return len(found)


def _sequence(value: Any) -> Any:
    if isinstance(value, Mapping):
        named = (value[name] for name in _NAMES if name in value)
        return next(named, None) if any(name in value for name in _NAMES) else _first(value)
    if isinstance(value, tuple | list):
        is_plain = not value or isinstance(value[0], int | float)
        return value if is_plain else _first(dict(enumerate(value)))
    shape = getattr(value, "shape", None)
    return value if shape is not None and len(shape) else None


def _first(parts: Mapping[Any, Any]) -> Any:
    found = (_sequence(each) for each in parts.values())
    return next((each for each in found if each is not None), None)


def path_of(folder: str | Path) -> Path:
    """Return the file of the lengths in a directory of metrics, without its suffix."""
    return Path(folder) / "seqlen" / "seqlen_sample_to_metric"


def is_measured(folder: str | Path) -> bool:
    """Return whether a folder of metrics has lengths."""
    return idx_path(path_of(folder)).exists()


def read_lengths(folder: str | Path) -> Ids:
    """Return the lengths in a folder of metrics.

    Raises:
        UsageError: the file is damaged.
    """
    return read_rows(str(path_of(folder)), _WHERE).numbers.astype(np.int64)


def lengths_of(dataset: Sequence[Any], folder: str | None, *, writes: bool) -> Ids:
    """Return the tokens of each sample of a data set: (samples,) int64.

    They come from the data set's attribute `lengths` or `sizes`, else from the directory of
    metrics, else from reading and measuring each sample.

    Args:
        dataset: a data set with a length and items.
        folder: `metrics_path`.
        writes: whether to write measured lengths into the directory.

    Raises:
        UsageError: the attribute or file belongs to another data set or holds no lengths, samples
            have no length, or the directory cannot be created.
    """
    count = len(dataset)
    for name in _GIVEN:
        given = getattr(dataset, name, None)
        if given is not None:
            what = f"{_PATH}: the attribute {name} of {type(dataset).__name__}"
            return _checked(np.asarray(given), count, what)
    if folder is not None and is_measured(folder):
        return _checked(read_lengths(folder), count, f"{_WHERE}: {path_of(folder)}")
    found = measured(dataset, length_of)
    if folder is not None and writes:
        write_lengths(folder, found)
    return found


def measured(dataset: Sequence[Any], measure: Callable[[Any], int]) -> Ids:
    """Return the result of `measure` for each sample."""
    return np.fromiter((measure(dataset[i]) for i in range(len(dataset))), np.int64, len(dataset))


def write_lengths(folder: str | Path, lengths: Ids) -> None:
    """Write the file that `lengths_of` reads: one row for each sample."""
    path = path_of(folder)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(
            f"{_WHERE}: {path.parent} cannot be created: {error.strerror}; choose a directory"
        ) from error
    write_values(path, lengths)
    _log.info("the lengths of %d samples are in %s", len(lengths), path)


def _checked(found: Any, count: int, what: str) -> Ids:
    if found.shape != (count,):
        raise UsageError(
            f"{what} has {found.size} lengths, but the data set {count} samples; measure this data"
            " set"
        )
    is_number = found.dtype.kind in "iuf"
    wrong = np.flatnonzero((found < 0) | (found % 1 != 0)) if is_number else range(count)
    if len(wrong):
        raise UsageError(
            f"{what} has {found[wrong[0]].item()!r} for sample {wrong[0]}; expected integers,"
            " 0 or more: the tokens of each sample"
        )
    return found.astype(np.int64)  # type: ignore[no-any-return]


Ids: TypeAlias = npt.NDArray[np.int64]
Picking: TypeAlias = Literal["dataloader", "random", "seqlen"]


@dataclass(frozen=True, slots=True)
class PackLimits:
    """Limits of one pack."""

    tokens: int
    least: int = 1
    """The fewest samples."""
    most: int | None = None
    """The most samples; None means as many as the tokens allow."""


def _nothing() -> Ids:
    return np.empty(0, np.int64)


@dataclass(frozen=True, slots=True, eq=False)
class Packs:
    """Packs, and the samples that are left out."""

    ids: Ids
    """The samples, pack after pack."""
    starts: Ids
    """The offset of each pack's first sample, and the number of samples at the end."""
    too_long: Ids = field(default_factory=_nothing)
    """Samples that are longer than the limit."""
    left_over: Ids = field(default_factory=_nothing)
    """Samples that did not fill a pack, or whose pack was one too many."""

    def __len__(self) -> int:
        return len(self.starts) - 1

    def __getitem__(self, number: int) -> Ids:
        """Return the samples of a pack."""
        return self.ids[self.starts[number] : self.starts[number + 1]]

    def __iter__(self) -> Iterator[Ids]:
        for start, stop in pairwise(self.starts.tolist()):
            yield self.ids[start:stop]

    @property
    def sizes(self) -> Ids:
        """The number of samples of each pack."""
        return np.diff(self.starts)

    def tokens(self, lengths: npt.NDArray[Any]) -> Ids:
        """Return the tokens of each pack."""
        ends = np.zeros(len(self.ids) + 1, np.int64)
        np.cumsum(lengths[self.ids], out=ends[1:])
        return np.diff(ends[self.starts])


def picked(
    lengths: npt.NDArray[Any], picking: Picking, seed: int | None, ids: Ids | None = None
) -> Ids:
    """Return samples in the order in which they are packed.

    Args:
        lengths: the tokens of each sample of the data set.
        picking: "dataloader" keeps the order; "random" shuffles by `seed`, as DeepSpeed does;
            "seqlen" sorts by length, then by number.
        seed: the seed of a shuffle.
        ids: the samples to take; None takes all.
    """
    ids = np.arange(len(lengths)) if ids is None else np.asarray(ids, np.int64)
    if picking == "random":
        shuffled = ids.tolist()
        random.Random(seed).shuffle(shuffled)
        return np.array(shuffled, np.int64)
    if picking == "seqlen":
        return ids[np.lexsort((ids, lengths[ids]))]
    return ids


def pack(lengths: npt.NDArray[Any], order: Ids, limits: PackLimits) -> Packs:
    """Return packs of consecutive samples of `order`, each as large as the limits allow.

    If no pack of enough samples can begin at a sample, that sample is left over. The time is linear
    in the number of samples.
    """
    fits = lengths[order] <= limits.tokens
    ids = order[fits]
    count = len(ids)
    ends = np.zeros(count + 1, np.int64)
    np.cumsum(lengths[ids], out=ends[1:])
    # The end of the largest pack that begins at each position.
    stops = np.searchsorted(ends, ends[:-1] + limits.tokens, side="right") - 1
    if limits.most is not None:
        stops = np.minimum(stops, np.arange(count) + limits.most)
    after = stops.tolist()
    starts, left_over, place = [0], [], 0
    while place < count:
        stop = after[place]
        if stop - place < limits.least:
            left_over.append(place)
            place += 1
            continue
        place = stop
        starts.append(place - len(left_over))
    kept = np.delete(ids, left_over)
    return Packs(kept, np.array(starts, np.int64), order[~fits], ids[left_over])


def pack_alike(lengths: npt.NDArray[Any], order: Ids, limits: PackLimits, count: int) -> Packs:
    """Return packs such that each `count` consecutive ones have equally many samples.

    Their samples are dealt out in turn. For pipelines, which need micro-batches of one shape.
    """
    fits = lengths[order] <= limits.tokens
    ids, sizes = order[fits].tolist(), lengths[order[fits]].tolist()
    made: list[list[int]] = []
    left_over: list[int] = []
    place = 0
    while place < len(ids):
        sums, rows = [0] * count, 0
        while limits.most is None or rows < limits.most:
            first = place + rows * count
            row = sizes[first : first + count]
            if len(row) < count or any(
                had + more > limits.tokens for had, more in zip(sums, row, strict=True)
            ):
                break
            sums = [had + more for had, more in zip(sums, row, strict=True)]
            rows += 1
        if rows < max(1, limits.least):
            left_over.append(ids[place])
            place += 1
            continue
        taken = ids[place : place + rows * count]
        made += [taken[number::count] for number in range(count)]
        place += rows * count
    starts = np.cumsum([0, *map(len, made)])
    flat = np.array([one for each in made for one in each], np.int64)
    return Packs(flat, starts, order[~fits], np.array(left_over, np.int64))


def evened(packs: Packs, multiple: int, least: int, *, may_split: bool) -> Packs:
    """Return packs whose number is a multiple of `multiple`.

    With `may_split`, the largest packs are halved until there are enough, so that no sample is left
    out. If that is impossible, or without `may_split`, the last packs are left over.
    """
    lacking = -len(packs) % multiple
    if not lacking:
        return packs
    cuts = _cuts(packs.sizes, lacking, least) if may_split else None
    if cuts is not None:
        places = np.array([packs.starts[number] + offset for number, offset in cuts], np.int64)
        starts = np.sort(np.concatenate([packs.starts, places]))
        return Packs(packs.ids, starts, packs.too_long, packs.left_over)
    kept = len(packs) - len(packs) % multiple
    stop = int(packs.starts[kept])
    left_over = np.concatenate([packs.left_over, packs.ids[stop:]])
    return Packs(packs.ids[:stop], packs.starts[: kept + 1], packs.too_long, left_over)


def _cuts(sizes: Ids, count: int, least: int) -> list[tuple[int, int]] | None:
    """Return the packs to split and the positions; None if they cannot make `count` more."""
    # (minus the samples, the pack, position in it): the largest comes first, then the earliest.
    parts = [(-size, number, 0) for number, size in enumerate(sizes.tolist())]
    heapq.heapify(parts)
    cuts = []
    for _ in range(count):
        if not parts:
            return None
        size, number, start = -parts[0][0], *parts[0][1:]
        half = size // 2
        if half < max(1, least):
            return None
        heapq.heapreplace(parts, (-half, number, start))
        heapq.heappush(parts, (half - size, number, start + half))
        cuts.append((number, start + half))
    return cuts


def shuffled(packs: Packs, seed: int, epoch: int) -> Packs:
    """Return the same packs in an order determined by `seed` and `epoch`."""
    order = np.random.default_rng([seed, epoch]).permutation(len(packs))
    sizes = packs.sizes[order]
    starts = np.zeros(len(packs) + 1, np.int64)
    np.cumsum(sizes, out=starts[1:])
    # For each position, the old position of its sample.
    old = np.repeat(packs.starts[order] - starts[:-1], sizes) + np.arange(len(packs.ids))
    return Packs(packs.ids[old], starts, packs.too_long, packs.left_over)


def scale_of(base: float, size: float, method: str | None) -> float:
    """Return the factor of the learning rate for a batch of `size` instead of `base` samples."""
    if method == "linear":
        return size / base
    if method == "sqrt":
        return float((size / base) ** 0.5)
    if method in (None, "none", "None"):
        return 1.0
    raise ValueError(f"Unknown scaling method: {method}")
