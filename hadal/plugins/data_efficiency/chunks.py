"""Work over a range of samples in chunks, by several processes; a restart computes the rest."""

from __future__ import annotations

import json
import os
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar, cast

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import DataLoader, Dataset

from hadal.errors import HadalError, UsageError

Found = TypeVar("Found")
Arrays = dict[str, npt.NDArray[Any]]
"""Results of a chunk by name."""
_IDENTITY = "work.json"


class Span(NamedTuple):
    """Samples from `start` to before `stop`."""

    start: int
    stop: int


def split_span(span: Span, parts: int) -> list[Span]:
    """Return consecutive spans of about equal length, as DeepSpeed divides a data set."""
    edges = [int(edge) for edge in np.linspace(span.start, span.stop, parts + 1)]
    return [Span(*each) for each in pairwise(edges)]


def spans_of(span: Span, length: int) -> list[Span]:
    """Return consecutive spans of `length` samples; the last may be shorter."""
    starts = range(span.start, span.stop, length)
    return [Span(start, min(start + length, span.stop)) for start in starts]


class _Computed(Dataset[Any], Generic[Found]):
    """Results by number; a Hadal error is a result, so that its message stays unchanged."""

    def __init__(self, compute: Callable[..., Found], work: Sequence[tuple[Any, ...]]) -> None:
        self._compute = compute
        self._work = work

    def __len__(self) -> int:
        return len(self._work)

    def __getitem__(self, index: int) -> Found | HadalError:
        try:
            return self._compute(*self._work[index])
        except HadalError as error:
            return error


@contextmanager
def compute_all(
    compute: Callable[..., Found], work: Sequence[tuple[Any, ...]], workers: int = 0
) -> Iterator[Iterator[Found]]:
    """Enter a context in which `compute(*each)` is read for each of `work`, in order.

    Args:
        compute: called in the worker processes.
        work: the arguments of each call.
        workers: processes that compute; 0 and 1 use this process.

    Raises:
        HadalError: a call raised it.
        UsageError: a worker was killed.
    """
    several = min(workers, len(work)) if workers > 1 else 0
    with warnings.catch_warnings():
        # The caller chose the number of workers.
        warnings.filterwarnings("ignore", "This DataLoader will create", UserWarning)
        loader = DataLoader(
            _Computed(compute, work),
            batch_size=None,
            num_workers=several,
            collate_fn=_unchanged,
            generator=torch.Generator(),  # does not advance the program's generator
        )
        try:
            yield map(_found, loader)
        # A signal tells of a worker's death: the error appears wherever this process is then.
        except RuntimeError as error:
            if "DataLoader worker" not in str(error) or "Caught" in str(error):
                raise
            raise UsageError(
                f"a worker process was killed ({error}), perhaps for lack of memory; run it again,"
                " with fewer workers in that case"
            ) from error


def _found(result: Any) -> Any:
    if isinstance(result, HadalError):
        raise result
    return result


def _unchanged(found: Found) -> Found:
    return found


class KeptChunks:
    """Results of chunks in a directory, until all are complete and joined.

    A kill loses only the chunks under way. Results of other work (`identity`) are removed.

    Raises:
        UsageError: the directory cannot be created.
    """

    def __init__(self, folder: Path, identity: Mapping[str, Any]) -> None:
        self._folder = folder
        known = json.dumps(identity, sort_keys=True)
        told = folder / _IDENTITY
        if not told.is_file() or told.read_text("utf-8") != known:
            shutil.rmtree(folder, ignore_errors=True)
            try:
                folder.mkdir(parents=True)
            except OSError as error:
                raise UsageError(
                    f"{folder} cannot be created: {error.strerror}; choose another directory"
                ) from error
            put_file(told, lambda path: path.write_text(known, "utf-8"))

    def _path(self, span: Span) -> Path:
        return self._folder / f"{span.start}_{span.stop}.npz"

    def __contains__(self, span: Span) -> bool:
        return self._path(span).is_file()

    def save(self, span: Span, arrays: Arrays) -> None:
        """Store the results of a chunk."""

        def write(path: Path) -> None:
            with open(path, "wb") as file:
                np.savez(file, **cast("dict[str, Any]", arrays))

        put_file(self._path(span), write)

    def load(self, span: Span) -> Arrays:
        """Return the results of a chunk."""
        with np.load(self._path(span), allow_pickle=False) as found:
            return dict(found)

    def remove(self) -> None:
        """Remove the folder."""
        shutil.rmtree(self._folder, ignore_errors=True)


def put_file(path: Path, write: Callable[[Path], object]) -> None:
    """Write a file atomically: it is complete, or it does not exist."""
    draft = path.with_name(f"{path.name}.{os.getpid()}.partial")
    write(draft)
    os.replace(draft, path)


def compute_kept(
    compute: Callable[[int, int], Arrays],
    spans: Sequence[Span],
    kept: KeptChunks,
    workers: int = 0,
    progress: Callable[[int], None] | None = None,
) -> None:
    """Compute the chunks that are not stored yet, and store them.

    Args:
        compute: returns the results for samples from `start` to before `stop`.
        spans: all chunks.
        kept: the folder of their results.
        workers: processes that compute; 0 and 1 use this process.
        progress: called with the number of samples of each chunk.
    """
    rest = [span for span in spans if span not in kept]
    done = sum(map(_length, spans)) - sum(map(_length, rest))
    if progress is not None and done:
        progress(done)
    with compute_all(compute, rest, workers) as found:
        for span, arrays in zip(rest, found, strict=True):
            kept.save(span, arrays)
            if progress is not None:
                progress(_length(span))


def _length(span: Span) -> int:
    return span.stop - span.start


def joined(kept: KeptChunks, spans: Sequence[Span], name: str) -> npt.NDArray[Any]:
    """Return the results of all chunks under a name, one after the other."""
    return np.concatenate([kept.load(span)[name] for span in spans])
