"""Indexed data sets under DeepSpeed's names: adapters of `hadal.data_efficiency.indexed`."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from hadal.plugins.data_efficiency.chunks import Span, split_span
from hadal.plugins.data_efficiency.indexed import (
    CODES,
    OLD_MAGIC,
    IndexedRows,
    OldRowsBuilder,
    RowsBuilder,
    bin_path,
    dtype_of,
    idx_path,
)

_SUFFIX = ".bin"
_INT32_FROM = 65500
"""The size of a vocabulary from which tokens need int32."""


class MMapIndexedDataset(IndexedRows):
    """The rows of a data set; `skip_warmup` has no effect, as opening reads only the index."""

    supports_prefetch = False

    def __init__(self, path: str, skip_warmup: bool = False) -> None:
        super().__init__(path)

    @staticmethod
    def exists(path: str) -> bool:
        """Return whether both files are there."""
        return idx_path(path).exists() and bin_path(path).exists()

    def get_doc_idx(self) -> Any:
        """Return the marks of documents."""
        return self.doc_idx

    def set_doc_idx(self, doc_idx_: Any) -> None:
        """Replace the marks of documents in memory."""
        self.doc_idx = doc_idx_


class _Builder:
    """The methods of all builders."""

    def __init__(self, builder: RowsBuilder) -> None:
        self._builder = builder

    def add_item(self, tensor: Any) -> None:
        """Append a row."""
        self._builder.add(tensor)

    add_item_numpy = add_item

    def add_items(self, arr_list: Iterable[Any]) -> None:
        """Append rows."""
        self._builder.add_all(arr_list)

    def end_document(self) -> None:
        """Mark the end of a document."""
        self._builder.end_document()

    def merge_file_(self, another_file: str) -> None:
        """Append all rows of another data set, given without the endings of its files."""
        self._builder.merge(another_file)

    def finalize(self, index_file: str) -> None:
        """Put both files in place; `index_file` is the index that belongs to `out_file`."""
        self._builder.finish()
        own = idx_path(self._builder.prefix)
        if Path(index_file) != own:
            own.replace(index_file)


class MMapIndexedDatasetBuilder(_Builder):
    """Writes a data set; `out_file` is the path of its `.bin`."""

    def __init__(self, out_file: str, dtype: Any = np.int64) -> None:
        super().__init__(RowsBuilder(_prefix(out_file), dtype))


class IndexedDatasetBuilder(_Builder):
    """Writes a data set in the older format; `out_file` is the path of its `.bin`."""

    def __init__(self, out_file: str, dtype: Any = np.int32) -> None:
        super().__init__(OldRowsBuilder(_prefix(out_file), dtype))


def _prefix(out_file: str) -> str:
    return str(out_file).removesuffix(_SUFFIX)


def make_builder(out_file: str, impl: str, vocab_size: int | None = None) -> _Builder:
    """Return a builder for tokens of a vocabulary: uint16 if it is small, else int32.

    Every `impl` but "mmap" is the older format, with int32.
    """
    if impl != "mmap":
        return IndexedDatasetBuilder(out_file)
    small = vocab_size is not None and vocab_size < _INT32_FROM
    return MMapIndexedDatasetBuilder(out_file, np.uint16 if small else np.int32)


def make_dataset(path: str, impl: str, skip_warmup: bool = False) -> MMapIndexedDataset:
    """Return a data set; its files determine the format, and `impl` is ignored."""
    return MMapIndexedDataset(path)


def infer_dataset_impl(path: str) -> str | None:
    """Return "mmap", or "cached" for the older format; None: there is no data set of that name."""
    if not dataset_exists(path, "mmap"):
        return None
    with open(idx_path(path), "rb") as file:
        return "cached" if file.read(len(OLD_MAGIC)) == OLD_MAGIC else "mmap"


def dataset_exists(path: str, impl: str) -> bool:
    """Return whether both files are there."""
    return MMapIndexedDataset.exists(path)


def create_doc_idx(sizes: Iterable[int]) -> list[int]:
    """Return the marks of documents that end with an empty row."""
    return [0, *(row + 1 for row, size in enumerate(sizes) if size == 0)]


def code(dtype: Any) -> int:
    """Return the code of a dtype in an index."""
    return CODES[dtype_of(dtype)]


def data_file_path(prefix_path: str) -> str:
    """Return the path of a data set's numbers."""
    return str(bin_path(prefix_path))


def index_file_path(prefix_path: str) -> str:
    """Return the path of a data set's index."""
    return str(idx_path(prefix_path))


def create_mmap_dataset_builder(fname: str, dtype: Any) -> MMapIndexedDatasetBuilder:
    """Return a builder for a data set, given without the endings of its files."""
    return MMapIndexedDatasetBuilder(f"{fname}{_SUFFIX}", dtype)


def close_mmap_dataset_builder(builder: MMapIndexedDatasetBuilder, fname: str) -> None:
    """End the last document, and put both files in place."""
    builder.end_document()
    builder.finalize(index_file_path(fname))


def split_index(start_idx: int, end_idx: int, num_partitions: int) -> list[tuple[int, int]]:
    """Return the (start, stop) of each of `num_partitions` parts of a range."""
    parts = split_span(Span(start_idx, end_idx), num_partitions)
    return [(part.start, part.stop) for part in parts]


def split_dataset(
    dataset: Any, num_workers: int, worker_id: int, num_threads: int
) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """Return the (start, stop) of each worker, and those of this worker's threads."""
    workers = split_index(0, len(dataset), num_workers)
    return workers, split_index(*workers[worker_id], num_threads)
