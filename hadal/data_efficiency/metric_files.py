"""Files of an analysis of the data: samples by difficulty, and the values of a metric.

Tests: tests/data_efficiency/test_sampler.py
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from hadal.data_efficiency.clusters import Ids, Metric
from hadal.data_efficiency.indexed import IndexedRows, RowsBuilder, smallest_dtype
from hadal.errors import UsageError


class MetricRows(NamedTuple):
    """Rows of a file, end to end, without a copy."""

    values: npt.NDArray[Any]
    starts: Ids
    """The place of each row's first value, and the number of values at the end."""


def read_rows(path: str, where: str) -> MetricRows:
    """Return the rows of `path`.bin and `path`.idx.

    Raises:
        UsageError: a file is missing or damaged; `where` is the JSON path.
    """
    try:
        rows = IndexedRows(path)
    except UsageError as error:
        raise UsageError(f"{where}: {error}") from error
    starts = np.zeros(len(rows) + 1, np.int64)
    np.cumsum(rows.sizes, out=starts[1:])
    return MetricRows(rows.numbers, starts)


def write_row(path: Path, values: Ids) -> None:
    """Write one row as `path`.bin and `path`.idx: complete, or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with RowsBuilder(path, smallest_dtype(0, int(values.max(initial=0)))) as builder:
        builder.add(values)
        builder.end_document()


def read_metric(
    name: str,
    where: str,
    count: int,
    samples: str | None,
    values: str | None,
    *,
    is_percentile: bool,
    maximum: int,
    is_single: bool,
) -> Metric:
    """Return a metric of the configuration, with its files.

    Args:
        name: its name.
        where: its JSON path.
        count: the samples of the data set.
        samples: `index_to_sample_path`.
        values: `index_to_metric_path`.
        is_percentile: whether difficulties are percentiles.
        maximum: `max_difficulty`.
        is_single: whether it admits all samples.

    Raises:
        UsageError: the files are of another data set, or damaged.
    """
    if is_single:
        return Metric(name, is_percentile, maximum)
    assert samples is not None  # the rules of the configuration check it
    here = f"{where}.index_to_sample_path"
    ids, starts = read_rows(samples, here)
    if len(ids) != count or (len(ids) and int(ids.max()) >= count):
        raise UsageError(
            f"{here}: {samples} is of {len(ids)} samples, the highest of which is"
            f" {ids.max(initial=0)}, and the data set has {count}; analyze this data set"
        )
    if is_percentile:
        return Metric(name, is_percentile, maximum, ids)
    assert values is not None
    there = f"{where}.index_to_metric_path"
    found, _ = read_rows(values, there)
    if len(found) != len(starts) - 1 or (np.diff(found.astype(np.int64)) <= 0).any():
        raise UsageError(
            f"{there}: {values} has {len(found)} values, and {samples} has {len(starts) - 1} rows;"
            " expected an ascending value for each row (not the percentile_merged file)"
        )
    return Metric(name, is_percentile, maximum, ids, found.astype(np.int64), starts)
