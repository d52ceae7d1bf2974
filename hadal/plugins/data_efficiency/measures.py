"""Metrics of samples by functions of batches, for any data set that a loader can read."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import CodeType
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.data import default_collate

from hadal.errors import UsageError
from hadal.plugins.data_efficiency.chunks import Arrays, Span
from hadal.plugins.data_efficiency.indexed import dtype_of

SINGLE, ACCUMULATED = "single_value_per_sample", "accumulate_value_over_samples"
IDS = "ids"
"""The name of the samples' ids among the results of a chunk; others are `metric_<name>`."""
_CHUNK = 4096


@dataclass(frozen=True, slots=True)
class Measure:
    """One metric of an analysis."""

    name: str
    function: Callable[[Any], Any]
    """Returns a tensor or an array for a batch."""
    accumulates: bool
    """True sums the results of all batches; False expects one number for each sample."""
    dtype: np.dtype[Any] | None = None
    """The type of the results; None: any integers."""

    @property
    def key(self) -> str:
        """The name of its results in a chunk."""
        return key_of(self.name)

    def values(self, batch: Any, samples: int) -> npt.NDArray[Any]:
        """Return the results for a batch: `[samples]`, or the terms of a sum.

        Raises:
            UsageError: they are not integers, not of the dtype, or not one per sample.
        """
        found = self.function(batch)
        if not isinstance(found, Tensor | np.ndarray):
            raise UsageError(
                f"the function of metric {self.name} returned {type(found).__name__}; expected a"
                " tensor or an array"
            )
        array = found.detach().cpu().numpy() if isinstance(found, Tensor) else found
        if self.dtype is not None and array.dtype != self.dtype:
            raise UsageError(
                f"the function of metric {self.name} returned {array.dtype}, but its dtype is"
                f" {self.dtype}; return that, or change metric_dtypes"
            )
        if array.dtype.kind not in "iu":
            raise UsageError(
                f"the function of metric {self.name} returned {array.dtype}; difficulties are"
                " integers: round the values (times 1000, say)"
            )
        if self.accumulates:
            wide = np.uint64 if array.dtype == np.uint64 else np.int64
            return array.astype(wide)
        if array.size != samples:
            raise UsageError(
                f"the function of metric {self.name} returned values of shape"
                f" {list(array.shape)} for a batch of {samples} samples; expected one for each"
            )
        return array.reshape(-1)


def key_of(metric: str) -> str:
    """Return the name of a metric's results in a chunk."""
    return f"metric_{metric}"


def measures_of(
    names: Sequence[str],
    functions: Sequence[Callable[[Any], Any]],
    types: Sequence[str],
    dtypes: Sequence[Any] | None = None,
) -> list[Measure]:
    """Return the metrics from the lists that DeepSpeed's analyzers take.

    Raises:
        UsageError: the lists are empty or differ in length, a name is repeated or cannot be a
            directory's, an entry is not a function, or a type or dtype is unknown.
    """
    counts = {
        "metric_names": len(names),
        "metric_functions": len(functions),
        "metric_types": len(types),
    }
    if dtypes is not None:
        counts["metric_dtypes"] = len(dtypes)
    if len(set(counts.values())) > 1:
        told = ", ".join(f"{name} has {count}" for name, count in counts.items())
        raise UsageError(f"expected lists of one length, one entry for each metric: {told}")
    if not names:
        raise UsageError("no metric is given; metric_names, and the other lists, are empty")
    _expect_names(names)
    made = []
    for number, (name, function, kind) in enumerate(zip(names, functions, types, strict=True)):
        if kind not in (SINGLE, ACCUMULATED):
            raise UsageError(
                f'metric {name} has type "{kind}"; expected "{SINGLE}" or "{ACCUMULATED}"'
            )
        if not callable(function):
            raise UsageError(
                f"metric {name}: expected a function of a batch, got {type(function).__name__}"
            )
        dtype = None if dtypes is None else _dtype(name, dtypes[number])
        made.append(Measure(name, function, kind == ACCUMULATED, dtype))
    return made


def _expect_names(names: Sequence[str]) -> None:
    for number, name in enumerate(names):
        if not isinstance(name, str) or name != os.path.basename(name) or name in ("", ".", ".."):
            raise UsageError(f"metric_names has {json.dumps(name)}; expected directory names")
        if name in names[:number]:
            raise UsageError(f"metric_names has {name} twice; each metric has its own files")


def _dtype(metric: str, dtype: Any) -> np.dtype[Any]:
    try:
        return dtype_of(dtype)
    except UsageError as error:
        raise UsageError(f"metric_dtypes of metric {metric}: {error}") from error


@dataclass(frozen=True, slots=True)
class BatchMeasures:
    """Metrics of a data set's samples, batch by batch."""

    dataset: Any
    measures: Sequence[Measure]
    batch_size: int = 1
    collate: Callable[[Any], Any] | None = None
    """Makes a batch from a list of samples; None uses torch's `default_collate`."""
    ids: Sequence[int] | None = None
    """The id of each sample; None uses its index, unless the batch has an "index"."""

    @property
    def chunk(self) -> int:
        """Samples of a chunk: whole batches."""
        return self.batch_size * -(-_CHUNK // self.batch_size)

    def __call__(self, start: int, stop: int) -> Arrays:
        """Return the measures of samples from `start` to before `stop`.

        Raises:
            UsageError: a function's result does not suit its metric.
        """
        found: dict[str, list[Any]] = {}
        for first in range(start, stop, self.batch_size):
            span = Span(first, min(first + self.batch_size, stop))
            batch = self.batch(span)
            for measure in self.measures:
                values = measure.values(batch, span.stop - span.start)
                found.setdefault(measure.key, []).append(values)
            ids = self._ids(batch, span)
            if ids is not None:
                found.setdefault(IDS, []).append(ids)
        added = {measure.key: measure.name for measure in self.measures if measure.accumulates}
        return {
            key: added_up(added[key], each) if key in added else np.concatenate(each)
            for key, each in found.items()
        }

    def batch(self, span: Span) -> Any:
        """Return the samples of a span as one batch."""
        indices = list(range(*span))
        many = getattr(self.dataset, "__getitems__", None)
        samples = many(indices) if many is not None else [self.dataset[index] for index in indices]
        return (self.collate or default_collate)(samples)

    def _ids(self, batch: Any, span: Span) -> npt.NDArray[Any] | None:
        if isinstance(batch, Mapping) and "index" in batch:
            told = torch.as_tensor(batch["index"]).reshape(span.stop - span.start, -1)
            return told[:, 0].numpy().astype(np.int64)
        if self.ids is None:
            return None
        return np.asarray(self.ids[span.start : span.stop]).astype(np.int64)

    def identity(self) -> dict[str, Any]:
        """Return plain values that distinguish this work from other work, as far as possible."""
        return {
            "samples": len(self.dataset),
            "batch_size": self.batch_size,
            "given_ids": self.ids is not None,
            "metrics": [
                [each.name, each.accumulates, str(each.dtype), _told(each.function)]
                for each in self.measures
            ],
        }


def added_up(metric: str, parts: Sequence[npt.NDArray[Any]]) -> npt.NDArray[Any]:
    """Return the sum of a metric's results.

    Raises:
        UsageError: their shapes differ.
    """
    shapes = list(dict.fromkeys(part.shape for part in parts))
    if len(shapes) > 1:
        raise UsageError(
            f"the function of metric {metric} returned shapes {list(shapes[0])} and"
            f" {list(shapes[1])}; expected one shape for all batches, since they are summed"
        )
    total: npt.NDArray[Any] = sum(parts[1:], parts[0])
    return total


def _told(function: Any) -> str:
    """Return a checksum of a function's code; of another callable, the name of its type."""
    while isinstance(function, partial):
        function = function.func
    code = getattr(function, "__code__", None)
    name = getattr(function, "__qualname__", type(function).__qualname__)
    if not isinstance(code, CodeType):
        return str(name)
    digest = hashlib.sha256()
    rest = [code]
    while rest:
        each = rest.pop()
        digest.update(each.co_code + repr(each.co_names).encode())
        rest += [const for const in each.co_consts if isinstance(const, CodeType)]
        plain = [const for const in each.co_consts if isinstance(const, int | float | str)]
        digest.update(repr(plain).encode())
    return f"{name} {digest.hexdigest()}"
