"""Lengths of a data set's samples: measured, given by the data set, or read from files."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hadal.errors import UsageError
from hadal.plugins.data_efficiency.indexed import RowsBuilder, idx_path, smallest_dtype
from hadal.plugins.data_efficiency.metric_files import read_rows
from hadal.plugins.data_efficiency.packing import Ids

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
    with RowsBuilder(path, smallest_dtype(0, int(lengths.max(initial=0)))) as builder:
        builder.add_all(lengths.reshape(-1, 1))
        builder.end_document()
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
