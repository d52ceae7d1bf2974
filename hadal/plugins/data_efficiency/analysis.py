"""Analysis of an indexed data set by built-in metrics: the files that a curriculum reads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import nn

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
from hadal.plugins.data_efficiency.metrics import (
    METRICS,
    Length,
    ModelLoss,
    Rarity,
    RowMetric,
    count_words,
)

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


@dataclass(frozen=True, slots=True)
class _RowValues:
    """The measure of a chunk."""

    rows: IndexedRows
    metric: RowMetric

    def __call__(self, start: int, stop: int) -> Arrays:
        return {_VALUES: self.metric.values(self.rows, start, stop)}


@dataclass(frozen=True, slots=True)
class _WordCounts:
    """The words of a chunk."""

    rows: IndexedRows

    def __call__(self, start: int, stop: int) -> Arrays:
        return {_COUNTS: count_words(self.rows, start, stop)}


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
        compute_kept(_WordCounts(self.rows), self.spans, kept, self.workers, self.progress)
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
        compute_kept(_RowValues(self.rows, metric), self.spans, kept, workers, self.progress)
        values: Any = joined(kept, self.spans, _VALUES)
        found = write_single(self.folder, metric.name, values)
        write_origin(self.folder, metric.name, self.origin)
        kept.remove()
        return found

    def _kept(self, name: str, identity: str) -> KeptChunks:
        told = {"data_set": self.origin.checksum, "metric": identity, "chunks": len(self.spans)}
        return KeptChunks(self.folder / f".unfinished_{name}", told)
