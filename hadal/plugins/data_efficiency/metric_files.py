"""Files of a data analysis: samples by difficulty, and the values of a metric."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from hadal.errors import UsageError
from hadal.plugins.data_efficiency.chunks import put_file
from hadal.plugins.data_efficiency.clusters import Ids, Metric
from hadal.plugins.data_efficiency.indexed import (
    IndexedRows,
    RowsBuilder,
    bin_path,
    idx_path,
    smallest_dtype,
)

_log = logging.getLogger(__name__)
Values = npt.NDArray[Any]
_ORIGIN = "origin.json"
_PART = 1 << 20


class Origin(NamedTuple):
    """The data set of a metric."""

    samples: int
    dtype: str | None = None
    """The type of its numbers; None: unknown."""
    checksum: str | None = None
    """Its checksum; None if it has none: then only the number of samples is compared."""

    @classmethod
    def of(cls, dataset: Any) -> Origin:
        """Return a data set's samples, dtype and checksum, if it has a method `checksum`."""
        told = getattr(dataset, "checksum", None)
        if not callable(told):
            return cls(len(dataset))
        dtype = getattr(dataset, "dtype", None)
        return cls(len(dataset), None if dtype is None else str(dtype), str(told()))

    def __str__(self) -> str:
        kind = "" if self.dtype is None else f" of {self.dtype}"
        checksum = "" if self.checksum is None else f", checksum {self.checksum}"
        return f"{self.samples} samples{kind}{checksum}"


class Distribution(NamedTuple):
    """The distinct values of a metric, ascending, and the number of samples with each."""

    values: Values
    counts: Values


def read_rows(path: str, where: str) -> IndexedRows:
    """Return the rows of `path`.bin and `path`.idx, which must be integers.

    Raises:
        UsageError: a file is missing or damaged, or holds other numbers; `where` is the JSON path.
    """
    try:
        rows = IndexedRows(path, is_whole=True)
    except UsageError as error:
        raise UsageError(f"{where}: {error}{_hint_of(path)}") from error
    if rows.dtype.kind not in "iu":
        raise UsageError(
            f"{where}: {path} holds {rows.dtype}, expected integers; give the files of an analysis"
        )
    return rows


def _hint_of(path: str) -> str:
    """Return the remedy for a path without files."""
    ending = Path(path).suffix
    if ending in (".bin", ".idx") and Path(path).is_file():
        return f"; leave {ending} out of the path"
    is_there = bin_path(path).exists() or idx_path(path).exists()
    return "" if is_there else "; `hadal data analyze` writes the files of metrics"


def write_row(path: Path, values: Values, dtype: Any = None) -> None:
    """Write one row as `path`.bin and `path`.idx, atomically.

    Args:
        path: the path of the two files without their suffixes.
        values: the numbers, which are integers.
        dtype: their type in the file; None uses the smallest that holds them.

    Raises:
        UsageError: the files cannot be written.
    """
    with RowsBuilder(path, fitting(values) if dtype is None else dtype) as builder:
        builder.add(values)
        builder.end_document()


# ---- writing -------------------------------------------------------------------------------------


def prefix_of(folder: Path, metric: str, kind: str) -> Path:
    """Return the path of a metric's file, without its suffix."""
    return folder / metric / f"{metric}_{kind}"


def write_values(
    prefix: Path, values: Values, dtype: Any = None, marks: Sequence[int] = ()
) -> None:
    """Write a row of one number for each value.

    Args:
        prefix: the path of the two files without their suffixes.
        values: the numbers, which are integers.
        dtype: their type in the file; None uses the smallest that holds them.
        marks: the rows after which a document ends, except the last row.
    """
    kind = fitting(values) if dtype is None else dtype
    _write(prefix, kind, values, np.ones(len(values), np.int32), marks)


def _write(prefix: Path, dtype: Any, joined: Values, sizes: Ids, marks: Sequence[int]) -> None:
    ends = [*marks, len(sizes)]
    with RowsBuilder(prefix, dtype) as builder:
        start = row = 0
        for end in ends:
            stop = start + int(sizes[row:end].sum(dtype=np.int64))
            builder.add_joined(joined[start:stop], sizes[row:end])
            builder.end_document()
            start, row = stop, end


def fitting(values: Values) -> np.dtype[Any]:
    """Return the smallest integer type that holds all values."""
    if not len(values):
        return np.dtype(np.uint8)
    return smallest_dtype(int(values.min()), int(values.max()))


def write_single(
    folder: Path,
    metric: str,
    values: Values,
    ids: Ids | None = None,
    *,
    by_id: bool = False,
    reducers: int | None = None,
) -> Distribution:
    """Write the files of a metric with one value for each sample.

    Args:
        folder: the directory of the analysis.
        metric: the metric's name.
        values: integers in the order in which samples were read, `[samples]`.
        ids: the samples' ids in that order; None numbers them from 0.
        by_id: True sorts samples of one value by id; False keeps the order of reading.
        reducers: a document ends after each of this many parts, and at the end of the file, as if
            several of DeepSpeed's reducers wrote it; None writes one document.

    Raises:
        UsageError: a file cannot be written, or has a row of 2^31 samples or more.
    """
    # While files are replaced one by one, they have no recorded origin.
    prefix_of(folder, metric, _ORIGIN).unlink(missing_ok=True)
    count = len(values)
    small = values.astype(fitting(values))
    # A stable sort of small types is a radix sort.
    if by_id and ids is not None:
        order = np.lexsort((ids, small))
    else:
        order = np.argsort(small, kind="stable")
    in_order = small[order]
    firsts = np.flatnonzero(np.concatenate([[True], in_order[1:] != in_order[:-1]])[:count])
    sizes = np.diff(firsts, append=count).astype(np.int64)
    distinct = in_order[firsts]
    samples = order if ids is None else ids[order]
    highest = max(count - 1, int(samples.max(initial=0)))
    samples = samples.astype(smallest_dtype(min(0, int(samples.min(initial=0))), highest))
    each = max(1, len(distinct) // 100)
    merged = np.add.reduceat(sizes, np.arange(0, len(sizes), each)) if len(sizes) else sizes
    try:
        write_values(
            prefix_of(folder, metric, "sample_to_metric"), small, marks=_marks(count, reducers)
        )
        marks = _marks(len(distinct), reducers)
        write_values(prefix_of(folder, metric, "index_to_metric"), distinct, small.dtype, marks)
        _write(prefix_of(folder, metric, "index_to_sample"), samples.dtype, samples, sizes, marks)
        _write(
            prefix_of(folder, metric, "index_to_sample_percentile_merged"),
            samples.dtype,
            samples,
            merged,
            (),
        )
    except UsageError as error:
        raise UsageError(f"metric {metric}: {error}") from error
    if count:
        places = [len(in_order) * percent // 100 for percent in range(0, 100, 5)]
        told = ", ".join(str(in_order[place]) for place in [*places, -1])
        _log.info("metric %s has values from 0 to 100 %% in steps of 5 %%: %s", metric, told)
    return Distribution(distinct, sizes)


def _marks(count: int, reducers: int | None) -> list[int]:
    if reducers is None:
        return []
    return [int(edge) for edge in np.linspace(0, count, reducers + 1)][1:]


def write_accumulated(folder: Path, metric: str, total: Values) -> None:
    """Write the file of a metric that was summed over all samples."""
    write_row(prefix_of(folder, metric, "metric_value"), total.reshape(-1))


def write_origin(folder: Path, metric: str, origin: Origin) -> None:
    """Record the data set of a metric, if it can be distinguished from others."""
    if origin.checksum is None:
        return
    text = json.dumps(origin._asdict()) + "\n"
    put_file(prefix_of(folder, metric, _ORIGIN), lambda path: path.write_text(text, "utf-8"))


# ---- of a configuration --------------------------------------------------------------------------


def read_metric(
    name: str,
    where: str,
    data: Origin,
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
        data: the data set to sample from.
        samples: `index_to_sample_path`.
        values: `index_to_metric_path`.
        is_percentile: whether difficulties are percentiles.
        maximum: `max_difficulty`.
        is_single: whether it admits all samples.

    Raises:
        UsageError: the files belong to another data set, or are damaged.
    """
    if is_single:
        return Metric(name, is_percentile, maximum)
    assert samples is not None  # the rules of the configuration check it
    here = f"{where}.index_to_sample_path"
    ids = read_rows(samples, here)
    _check_origin(here, samples, data)
    lowest, highest, total = _summary(ids)
    if ids.count != data.samples or lowest < 0 or highest >= max(data.samples, 1):
        raise UsageError(
            f"{here}: {samples} has {ids.count} samples, numbered from {lowest} to {highest}, but"
            f" the data set has {data.samples}; analyze this data set"
        )
    if total != ids.count * (ids.count - 1) // 2:
        raise UsageError(
            f"{here}: {samples} does not have each of the {data.samples} samples once; give"
            " <metric>_index_to_sample or <metric>_index_to_sample_percentile_merged of an analysis"
        )
    if is_percentile:
        return Metric(name, is_percentile, maximum, ids)
    assert values is not None
    there = f"{where}.index_to_metric_path"
    found = read_rows(values, there)
    _check_origin(there, values, data)
    if found.count != len(ids) or not _is_ascending(found):
        raise UsageError(
            f"{there}: {values} has {found.count} values, but {samples} has {len(ids)} rows;"
            " expected an ascending value for each row (not the percentile_merged file)"
        )
    return Metric(name, is_percentile, maximum, ids, found.numbers)


def _parts(rows: IndexedRows) -> Iterator[Values]:
    """Yield all numbers in chunks; each begins with the last number of the previous one."""
    for start in range(0, rows.count, _PART):
        yield rows.read(max(0, start - 1), min(start + _PART, rows.count))


def _summary(rows: IndexedRows) -> tuple[int, int, int]:
    """Return the minimum, the maximum (0 and 0 if there are none), and the sum of all numbers."""
    lows, highs, total = [0] * (not rows.count), [0] * (not rows.count), 0
    for start in range(0, rows.count, _PART):
        part = rows.read(start, min(start + _PART, rows.count))
        lows.append(int(part.min()))
        highs.append(int(part.max()))
        # The sum distinguishes ids from values of a metric, which repeat.
        total += int(part.sum(dtype=np.int64))
    return min(lows), max(highs), total


def _is_ascending(rows: IndexedRows) -> bool:
    return all(bool((part[1:] > part[:-1]).all()) for part in _parts(rows))


def _check_origin(where: str, path: str, data: Origin) -> None:
    """Compare the data set with the one that was analyzed, if both are known."""
    metric, found, _ = Path(path).name.rpartition("_index_to_")
    told = Path(path).with_name(f"{metric}_{_ORIGIN}")
    if data.checksum is None or not found or not told.is_file():
        return
    try:
        known = Origin(**json.loads(told.read_text("utf-8")))
    except (ValueError, TypeError) as error:
        raise UsageError(f"{where}: {told} is damaged ({error}); analyze the data set") from error
    if known.checksum != data.checksum:
        raise UsageError(
            f"{where}: {path} belongs to another data set ({known}; by {told.name}), while the"
            f" training data are {data}; analyze this data set, or give the files of its analysis"
        )
