"""Analysis of an indexed data set by built-in metrics: the files that a curriculum reads.

The metrics of a row are its length, the rarity of its words, and its loss by a model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
import xxhash
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from hadal.errors import UsageError
from hadal.plugins.data_efficiency.chunks import Arrays, KeptChunks, Span, compute_kept, joined
from hadal.plugins.data_efficiency.indexed import IndexedRows
from hadal.plugins.data_efficiency.metric_files import (
    Distribution,
    Origin,
    write_accumulated,
    write_origin,
    write_single,
)

Whole = npt.NDArray[np.int64]
METRICS = ("length", "rarity", "loss")
"""The names of the metrics."""
MOST_WORDS = 1 << 24
_BATCH_TOKENS = 1 << 13
_LOSS_SCALE = 1000


class RowMetric(Protocol):
    """Measures rows; the results are integers."""

    @property
    def name(self) -> str:
        """Its name."""

    @property
    def in_processes(self) -> bool:
        """False if only the caller's process can measure, as with a model on a device."""

    def values(self, rows: IndexedRows, start: int, stop: int) -> Whole:
        """Return the metric of the rows from `start` to before `stop`."""

    def identity(self) -> str:
        """Return a text that differs if results may differ."""


@dataclass(frozen=True, slots=True)
class Length:
    """Tokens of a row."""

    name: str = "length"
    in_processes: bool = True

    def values(self, rows: IndexedRows, start: int, stop: int) -> Whole:
        """Return the sizes of the rows."""
        return rows.sizes[start:stop].astype(np.int64)

    def identity(self) -> str:
        """Return the name."""
        return self.name


@dataclass(frozen=True, slots=True)
class Rarity:
    """Rarity of a row's words: the sum of -log(share of the word in all data), rounded."""

    costs: npt.NDArray[np.float64]
    """-log(share) of each word; 0 for words that do not occur."""
    name: str = "rarity"
    in_processes: bool = True

    @classmethod
    def of(cls, counts: Whole) -> Rarity:
        """Return the metric for the number of times that each word occurs."""
        shares = np.where(counts > 0, counts, counts.sum()) / max(1, counts.sum())
        return cls(-np.log(shares))

    def values(self, rows: IndexedRows, start: int, stop: int) -> Whole:
        """Return the sums over the rows."""
        costs = self.costs[numbers_of(rows, start, stop)]
        sizes = rows.sizes[start:stop]
        found = np.zeros(stop - start)
        filled = np.flatnonzero(sizes)
        if filled.size:
            starts = np.concatenate([[0], np.cumsum(sizes[filled][:-1], dtype=np.int64)])
            found[filled] = np.add.reduceat(costs, starts)
        return np.rint(found).astype(np.int64)

    def identity(self) -> str:
        """Return the name: the counts follow from the data set."""
        return self.name


@dataclass(frozen=True, slots=True)
class ModelLoss:
    """A model's mean loss over the tokens of a row after the first, times 1000, rounded.

    The model returns logits `[rows, length, words]`, or an object that has them, for ids `[rows,
    length]`; a model of transformers is given the mask of the padding, too.
    """

    model: nn.Module
    name: str = "loss"
    in_processes: bool = False

    def values(self, rows: IndexedRows, start: int, stop: int) -> Whole:
        """Return the losses of the rows; 0 for one with less than two tokens.

        Raises:
            UsageError: the model fails on these rows.
        """
        found = np.zeros(stop - start, np.int64)
        training = self.model.training
        self.model.eval()
        with torch.no_grad():
            for numbers in self._batches(rows, start, stop):
                try:
                    losses = self._losses([rows[start + int(number)] for number in numbers])
                except (IndexError, RuntimeError) as error:
                    raise UsageError(
                        f"the model {type(self.model).__name__} of the loss failed on rows of"
                        f" {rows.prefix} ({error}); pass a model whose vocabulary has all of its"
                        " tokens, and which returns logits [rows, length, words]"
                    ) from error
                found[numbers] = np.rint(_LOSS_SCALE * losses.cpu().numpy()).astype(np.int64)
        self.model.train(training)
        return found

    def _batches(self, rows: IndexedRows, start: int, stop: int) -> Iterator[Whole]:
        """Yield rows of about the same length, `_BATCH_TOKENS` at a time."""
        sizes = np.minimum(rows.sizes[start:stop], self._longest())
        order = np.argsort(sizes, kind="stable")[::-1]
        order = order[sizes[order] > 1]
        first = 0
        while first < len(order):
            count = max(1, _BATCH_TOKENS // int(sizes[order[first]]))
            yield order[first : first + count]
            first += count

    def _longest(self) -> int:
        told = getattr(getattr(self.model, "config", None), "max_position_embeddings", None)
        return int(told) if told else 2**31 - 1

    def _losses(self, rows: list[npt.NDArray[Any]]) -> Tensor:
        longest = min(max(map(len, rows)), self._longest())
        ids = torch.zeros(len(rows), longest, dtype=torch.int64)
        mask = torch.zeros_like(ids)
        for number, row in enumerate(rows):
            known = torch.from_numpy(row[:longest].astype(np.int64))
            ids[number, : len(known)] = known
            mask[number, : len(known)] = 1
        device = next(self.model.parameters()).device
        ids, mask = ids.to(device), mask.to(device)
        told = {"attention_mask": mask} if hasattr(self.model, "config") else {}
        result = self.model(ids, **told)
        logits = getattr(result, "logits", result)
        losses = cross_entropy(logits[:, :-1].transpose(1, 2).float(), ids[:, 1:], reduction="none")
        weights = mask[:, 1:].float()
        mean: Tensor = (losses * weights).sum(1) / weights.sum(1)
        return mean

    def identity(self) -> str:
        """Return a checksum of samples of the weights."""
        digest = xxhash.xxh3_128()
        for name, weight in self.model.state_dict().items():
            some = weight.flatten()[:4096].detach().float().cpu().numpy()
            digest.update(f"{name} {tuple(weight.shape)}".encode() + some.tobytes())
        return f"{self.name} {digest.hexdigest()}"


def numbers_of(rows: IndexedRows, start: int, stop: int) -> npt.NDArray[Any]:
    """Return the numbers of consecutive rows, without a copy."""
    return rows.numbers[rows.start(start) : rows.start(stop)]


def count_words(rows: IndexedRows, start: int, stop: int) -> Whole:
    """Return how often each number occurs in rows.

    Raises:
        UsageError: the numbers are not words of a vocabulary.
    """
    numbers = numbers_of(rows, start, stop)
    if numbers.dtype.kind not in "iu":
        raise UsageError(f"{rows.prefix} holds {numbers.dtype}; the rarity requires integers")
    if numbers.size and (int(numbers.min()) < 0 or int(numbers.max()) >= MOST_WORDS):
        raise UsageError(
            f"{rows.prefix} has numbers from {numbers.min()} to {numbers.max()}; the rarity needs"
            f" words from 0 to {MOST_WORDS - 1}"
        )
    return np.bincount(numbers).astype(np.int64)


WORDS = "vocabulary"
"""The accumulated metric from which the rarity is computed: how often each word occurs."""
_NUMBERS, _ROWS = 1 << 21, 1 << 17
_VALUES, _COUNTS = "values", "counts"
Progress = Callable[[int], None]


def analyze(
    prefix: str | Path,
    folder: str | Path,
    metrics: Sequence[str] = ("length", "rarity"),
    *,
    model: nn.Module | None = None,
    workers: int = 0,
    progress: Progress | None = None,
) -> dict[str, Distribution]:
    """Measure every row, and write the files of each metric below `folder`/<metric>/.

    An analysis that was killed computes only the missing chunks when it runs again.

    Args:
        prefix: the indexed data set, without .bin and .idx.
        folder: directory for the files.
        metrics: names of built-in metrics: length, rarity, loss.
        model: the model of the loss.
        workers: processes that measure; 0 and 1 use this process. The loss always does.
        progress: called with the number of rows of each chunk; rarity counts every row twice.

    Returns:
        The distribution of each metric.

    Raises:
        UsageError: no metric is given, one is unknown or has no model, the model cannot take the
            data set's tokens, or the data set cannot be read or the folder written.
    """
    if not metrics:
        raise UsageError(f"no metric is given; expected some of {', '.join(METRICS)}")
    unknown = [name for name in metrics if name not in METRICS]
    if unknown:
        raise UsageError(f"unknown metric {unknown[0]}; expected {', '.join(METRICS)}")
    if "loss" in metrics and model is None:
        raise UsageError("the metric loss needs a model; pass one, or leave the metric out")
    rows = IndexedRows(prefix)
    if not len(rows):
        raise UsageError(f"{prefix} has no rows; there is nothing to measure")
    run = _RowAnalysis(rows, Path(folder), Origin.of(rows), chunks_of(rows), workers, progress)
    return {name: run.measured(run.metric(name, model)) for name in dict.fromkeys(metrics)}


def passes(metrics: Sequence[str]) -> int:
    """Return how often every row is read: twice for the rarity."""
    return sum(2 if name == "rarity" else 1 for name in dict.fromkeys(metrics))


def chunks_of(rows: IndexedRows) -> list[Span]:
    """Return spans of rows, each with about 2 million numbers and not too many rows."""
    places = np.arange(0, len(rows.numbers), _NUMBERS) * rows.dtype.itemsize
    by_numbers = np.searchsorted(rows.offsets, places)
    edges = {0, len(rows), *by_numbers.tolist(), *range(0, len(rows), _ROWS)}
    ordered = sorted(edges)
    return [Span(*each) for each in pairwise(ordered)]


def _row_values(rows: IndexedRows, metric: RowMetric, start: int, stop: int) -> Arrays:
    """Return the measure of a chunk."""
    return {_VALUES: metric.values(rows, start, stop)}


def _word_counts(rows: IndexedRows, start: int, stop: int) -> Arrays:
    """Return the words of a chunk."""
    return {_COUNTS: count_words(rows, start, stop)}


@dataclass(frozen=True, slots=True)
class _RowAnalysis:
    rows: IndexedRows
    folder: Path
    origin: Origin
    spans: list[Span]
    workers: int
    progress: Progress | None

    def metric(self, name: str, model: nn.Module | None) -> RowMetric:
        """Return a metric by its name."""
        if name == "length":
            return Length()
        if name == "rarity":
            return Rarity.of(self._words())
        assert model is not None
        return ModelLoss(model)

    def _words(self) -> npt.NDArray[np.int64]:
        kept = self._kept(WORDS, WORDS)
        counts = partial(_word_counts, self.rows)
        compute_kept(counts, self.spans, kept, self.workers, self.progress)
        total = np.zeros(0, np.int64)
        for span in self.spans:
            found = kept.load(span)[_COUNTS]
            if len(found) > len(total):
                total, found = found, total
            total[: len(found)] += found
        write_accumulated(self.folder, WORDS, total)
        write_origin(self.folder, WORDS, self.origin)
        kept.remove()
        return total

    def measured(self, metric: RowMetric) -> Distribution:
        """Measure all rows, and write the files."""
        kept = self._kept(metric.name, metric.identity())
        workers = self.workers if metric.in_processes else 0
        values_of = partial(_row_values, self.rows, metric)
        compute_kept(values_of, self.spans, kept, workers, self.progress)
        values: Any = joined(kept, self.spans, _VALUES)
        found = write_single(self.folder, metric.name, values)
        write_origin(self.folder, metric.name, self.origin)
        kept.remove()
        return found

    def _kept(self, name: str, identity: str) -> KeptChunks:
        told = {"data_set": self.origin.checksum, "metric": identity, "chunks": len(self.spans)}
        return KeptChunks(self.folder / f".unfinished_{name}", told)
