"""Indexed data sets: rows of numbers in `P.bin`, and their offsets in `P.idx`.

The files are byte for byte those of DeepSpeed and Megatron, little endian. Files are
memory-mapped: opening takes the same time for any size.
"""

from __future__ import annotations

import logging
import os
import shutil
import struct
from array import array
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any, BinaryIO, overload

import numpy as np
import torch
import xxhash
from torch.utils.data import Dataset

from hadal.errors import UsageError

_log = logging.getLogger(__name__)
_MAGIC, OLD_MAGIC = b"MMIDIDX\0\0", b"TNTIDX\0\0"
_VERSION = 1
_COPIED_NBYTES = 16 << 20
_SAMPLES, _SAMPLED_NBYTES = 64, 16 << 10
_LONGEST = 2**31 - 1

Row = np.ndarray[Any, np.dtype[Any]]

_WRITTEN = ("uint8", "int8", "int16", "int32", "int64", "uint16", "uint32", "uint64")
CODES: Mapping[np.dtype[Any], int] = MappingProxyType(
    {np.dtype(name): code for code, name in enumerate(_WRITTEN, 1)}
)
"""The code of each dtype in an index."""
# Megatron-LM and older releases of DeepSpeed use other types for the codes from 6 on. The width of
# an element, computed from the offsets, distinguishes them.
_READ: Mapping[tuple[int, int], np.dtype[Any]] = MappingProxyType(
    {
        **{(code, dtype.itemsize): dtype for dtype, code in CODES.items()},
        (6, 8): np.dtype(np.float64),
        (7, 8): np.dtype(np.float64),
        (8, 2): np.dtype(np.uint16),
        (9, 4): np.dtype(np.uint32),
        (10, 8): np.dtype(np.uint64),
    }
)
_SURE = 5
"""The last code with the same meaning everywhere."""
# In the old format, codes above 5 are Megatron's.
_OLD_CODES: Mapping[int, np.dtype[Any]] = MappingProxyType(
    {
        **{code: dtype for dtype, code in CODES.items() if code <= _SURE},
        6: np.dtype(np.float32),
        7: np.dtype(np.float64),
        8: np.dtype(np.uint16),
    }
)


def bin_path(prefix: str | Path) -> Path:
    """Return the file with a data set's numbers."""
    return Path(f"{prefix}.bin")


def idx_path(prefix: str | Path) -> Path:
    """Return the file with a data set's index."""
    return Path(f"{prefix}.idx")


class IndexedRows(Dataset[Row]):
    """The rows of a data set, as read-only views of the mapped file that outlive this object.

    `data[i]` is row i, `data[a:b]` a list of rows. It can be pickled to other processes, which map
    the files themselves.

    Args:
        prefix: the path of the two files without their suffixes.
        dtype: the type of the numbers, if the index is ambiguous (Megatron's code 7).
        is_whole: True if the numbers are integers, so that the type is not ambiguous.

    Raises:
        UsageError: a file is missing, damaged, or not of this format.
    """

    def __init__(self, prefix: str | Path, dtype: Any = None, *, is_whole: bool = False) -> None:
        self.prefix = Path(prefix)
        self._asked: np.dtype[Any] | None = None if dtype is None else np.dtype(dtype)
        self._is_whole = is_whole
        self._open()

    def _open(self) -> None:
        index, numbers = idx_path(self.prefix), bin_path(self.prefix)
        for path in (index, numbers):
            if not path.is_file():
                raise UsageError(
                    f"{path} does not exist; an indexed data set is a .bin and an .idx"
                )
        raw = _mapped(index)
        size = numbers.stat().st_size
        try:
            if bytes(raw[:9]) == _MAGIC:
                self._read_index(raw, size)
            elif bytes(raw[:8]) == OLD_MAGIC:
                self._read_old_index(raw)
            else:
                raise UsageError(f"{index} is not the index of a data set: unknown format")
        except (struct.error, ValueError, KeyError) as error:
            raise UsageError(f"{index} is damaged: {error}") from error
        expected = (
            int(self.offsets[-1]) + int(self.sizes[-1]) * self.dtype.itemsize if len(self) else 0
        )
        if size != expected:
            raise UsageError(
                f"{numbers} has {size} bytes, but {index} describes {expected}; the two belong to"
                " different data sets, or one is incomplete"
            )
        self._numbers = _mapped(numbers)

    def _read_index(self, raw: Row, nbytes: int) -> None:
        version, code, rows, marks = struct.unpack_from("<QBQQ", raw[:64].tobytes(), 9)
        if version != _VERSION:
            raise UsageError(f"{idx_path(self.prefix)} has version {version}, expected {_VERSION}")
        start = 9 + struct.calcsize("<QBQQ")
        self.sizes = _part(raw, start, rows, "<i4")
        self.offsets = _part(raw, start + 4 * rows, rows, "<i8")
        self.doc_idx = _part(raw, start + 12 * rows, marks, "<i8")
        self.dtype = self._dtype_of(code, nbytes)

    def _dtype_of(self, code: int, nbytes: int) -> np.dtype[Any]:
        width = self._width(nbytes) if code > _SURE else None
        if width is None:
            width = _READ_ALONE[code].itemsize
        found = _READ.get((code, width))
        if self._asked is not None:
            if self._asked.itemsize != width:
                raise UsageError(
                    f"{bin_path(self.prefix)} has numbers of {width} bytes, not of dtype"
                    f" {self._asked}"
                )
            return self._asked
        if found is None:
            raise ValueError(f"no dtype has code {code} and {width} bytes")
        if (code, width) == (7, 4) and not self._is_whole:
            _log.warning(
                "%s may hold uint32 (DeepSpeed) or float32 (Megatron-LM): read as uint32; pass the"
                " dtype",
                self.prefix,
            )
        return found

    def _width(self, nbytes: int) -> int | None:
        """Return the bytes per number, from the first row that shows it; None if no row does."""
        first = next((number for number, size in enumerate(self.sizes) if size), None)
        if first is None:
            return None
        after = int(self.offsets[first + 1]) if first + 1 < len(self.sizes) else nbytes
        return (after - int(self.offsets[first])) // int(self.sizes[first])

    def _read_old_index(self, raw: Row) -> None:
        version, code, width, rows, dims, marks = struct.unpack_from("<6Q", raw[:64].tobytes(), 8)
        if version != _VERSION:
            raise UsageError(f"{idx_path(self.prefix)} has version {version}, expected {_VERSION}")
        self.dtype = _OLD_CODES[code] if self._asked is None else self._asked
        if self.dtype.itemsize != width:
            raise ValueError(f"code {code} is {self.dtype}, but its width is {width}")
        start = 56 + 8 * (rows + 1)
        starts = _part(raw, start, rows + 1, "<i8")
        self.offsets = starts[:-1] * width
        self.sizes = np.diff(starts).astype(np.int32)
        self.doc_idx = _part(raw, start + 8 * (rows + 1) + 8 * dims, marks, "<i8")

    def __len__(self) -> int:
        return len(self.sizes)

    @overload
    def __getitem__(self, index: slice) -> list[Row]: ...
    @overload
    def __getitem__(self, index: int) -> Row: ...
    def __getitem__(self, index: int | slice) -> Row | list[Row]:
        """Return a row, or the rows of a slice.

        Raises:
            IndexError: there is no such row.
            ValueError: the slice has a step.
        """
        if isinstance(index, slice):
            start, stop, step = index.indices(len(self))
            if step != 1:
                raise ValueError(f"rows are read in steps of 1, not of {step}")
            return [self.get(number) for number in range(start, stop)]
        return self.get(index)

    def get(self, index: int, offset: int = 0, length: int | None = None) -> Row:
        """Return `length` numbers of a row from `offset` on; None returns all to the row's end.

        Raises:
            IndexError: there is no such row, or it is shorter.
        """
        number = int(index)
        if not -len(self) <= number < len(self):
            raise IndexError(f"row {number} of {self.prefix}, which has {len(self)} rows")
        size = int(self.sizes[number])
        length = size - offset if length is None else length
        if not 0 <= offset <= offset + length <= size:
            raise IndexError(
                f"numbers {offset} to {offset + length} of row {number}, which has {size}"
            )
        start = int(self.offsets[number]) + offset * self.dtype.itemsize
        return self._numbers[start : start + length * self.dtype.itemsize].view(self.dtype)

    @property
    def numbers(self) -> Row:
        """The numbers of all rows, end to end."""
        return self._numbers.view(self.dtype)

    @property
    def count(self) -> int:
        """The number of numbers in all rows."""
        return len(self._numbers) // self.dtype.itemsize

    def read(self, start: int, stop: int) -> Row:
        """Return a copy of `numbers[start:stop]`; no mapped page stays in memory."""
        first = start * self.dtype.itemsize
        return np.fromfile(bin_path(self.prefix), self.dtype, max(0, stop - start), offset=first)

    def size(self, index: int) -> int:
        """Return the number of elements of a row."""
        return int(self.sizes[index])

    def start(self, index: int) -> int:
        """Return the offset of a row's first number in `numbers`; `len(self)` gives the total."""
        if index == len(self):
            return self.count
        return int(self.offsets[index]) // self.dtype.itemsize

    def checksum(self) -> str:
        """Return a checksum that distinguishes data sets, from file sizes and sampled bytes.

        It takes the same time for any size, and does not detect every damaged byte.
        """
        digest = xxhash.xxh3_128()
        for path in (idx_path(self.prefix), bin_path(self.prefix)):
            raw = _mapped(path)
            digest.update(struct.pack("<Q", len(raw)))
            for start in np.linspace(0, max(0, len(raw) - _SAMPLED_NBYTES), _SAMPLES).astype(int):
                digest.update(raw[start : start + _SAMPLED_NBYTES].tobytes())
        return digest.hexdigest()

    def __getstate__(self) -> dict[str, Any]:
        names = ("prefix", "_asked", "_is_whole")
        return {name: vars(self)[name] for name in names}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._open()


_READ_ALONE: Mapping[int, np.dtype[Any]] = MappingProxyType(
    {
        **{code: dtype for dtype, code in CODES.items()},
        9: np.dtype(np.uint32),
        10: np.dtype(np.uint64),
    }
)
"""The dtype of a code, if no row reveals the width."""


def _mapped(path: Path) -> Row:
    """Return a file's bytes, mapped; an empty file has none."""
    if path.stat().st_size == 0:
        return np.empty(0, np.uint8)
    # A plain array keeps the map alive, and is indexed faster.
    return np.asarray(np.memmap(path, np.uint8, "r"))


def _part(raw: Row, start: int, count: int, dtype: str) -> Row:
    """Return a view of possibly unaligned numbers in the index.

    Raises:
        ValueError: the index is too short.
    """
    found = raw[start : start + count * np.dtype(dtype).itemsize]
    if len(found) < count * np.dtype(dtype).itemsize:
        raise ValueError(f"it ends before the last of {count} numbers")
    return found.view(dtype)


class RowsBuilder:
    """Writes an indexed data set row by row.

    The files appear under the data set's name only in `finish`, which moves both into place. If an
    exception leaves the builder's `with` block, it removes its files.

    Args:
        prefix: the path of the two files without their suffixes.
        dtype: the type of the numbers: one of `CODES`, of numpy or torch.

    Raises:
        UsageError: the dtype has no code, or the files cannot be written.
    """

    def __init__(self, prefix: str | Path, dtype: Any = np.int64) -> None:
        self.prefix = Path(prefix)
        self.dtype = dtype_of(dtype)
        self.sizes = array("i")
        self._marks = array("q", [0])
        self._draft = Path(f"{prefix}.bin.{os.getpid()}.partial")
        try:
            self._draft.parent.mkdir(parents=True, exist_ok=True)
            self._file: BinaryIO = open(self._draft, "wb")  # noqa: SIM115 - closed by finish
        except OSError as error:
            raise UsageError(f"{self._draft} cannot be written: {error.strerror}") from error

    def __enter__(self) -> RowsBuilder:
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        if kind is None:
            self.finish()
        else:
            self._file.close()
            self._draft.unlink(missing_ok=True)

    def add(self, row: Any) -> None:
        """Append a row: a tensor, an array or a list of numbers, flattened.

        Raises:
            UsageError: a number does not fit the dtype.
        """
        self.add_all([row])

    def add_all(self, rows: Iterable[Any]) -> None:
        """Append rows; each is as for `add`."""
        made = [self._as_row(row) for row in rows]
        if made:
            joined = np.concatenate(made) if len(made) > 1 else made[0]
            self._append(joined, [row.size for row in made])

    def add_joined(self, numbers: Any, sizes: Any, ends: Any = ()) -> None:
        """Append concatenated rows, with the size of each.

        Args:
            numbers: the numbers of all rows.
            sizes: the number of each row's numbers.
            ends: the number of these rows up to the end of each document.

        Raises:
            UsageError: a number does not fit the dtype, or a row is too long.
        """
        joined, counts = self._as_row(numbers), np.asarray(sizes)
        if len(joined) != counts.sum():
            raise ValueError(f"got {len(joined)} numbers for rows with {counts.sum()} in total")
        marks = np.asarray(ends, np.int64) + len(self.sizes)
        self._append(joined, counts)
        self._marks.frombytes(marks.tobytes())

    def _append(self, joined: Row, sizes: Any) -> None:
        counts = np.asarray(sizes, np.int64)
        if counts.max(initial=0) > _LONGEST:
            row = len(self.sizes) + int(counts.argmax())
            raise UsageError(
                f"{self.prefix}: row {row} has {counts.max()} numbers, but an index holds sizes up"
                f" to {_LONGEST}; split the row"
            )
        self._file.write(np.ascontiguousarray(joined).data)
        self.sizes.frombytes(counts.astype(np.int32).tobytes())

    def _as_row(self, row: Any) -> Row:
        if isinstance(row, torch.Tensor):
            row = row.detach().cpu().numpy()
        given = np.asarray(row).reshape(-1)
        made = given.astype(self.dtype) if given.size else np.empty(0, self.dtype)
        if given.dtype != self.dtype and not np.array_equal(made, given):
            wrong = given[made != given][0]
            raise UsageError(
                f"{self.prefix}: {wrong} in row {len(self.sizes)} does not fit {self.dtype}; choose"
                " a wider dtype"
            )
        return made

    def end_document(self) -> None:
        """Mark the end of a document after the latest row."""
        self._marks.append(len(self.sizes))

    def merge(self, prefix: str | Path) -> None:
        """Append all rows and documents of another data set.

        Raises:
            UsageError: it is damaged, or of another dtype.
        """
        other = IndexedRows(prefix)
        if other.dtype != self.dtype:
            raise UsageError(f"{prefix} is of {other.dtype}, but {self.prefix} of {self.dtype}")
        shift = len(self.sizes)
        self.sizes.frombytes(other.sizes.astype(np.int32).tobytes())
        self._marks.frombytes((other.doc_idx[1:].astype(np.int64) + shift).tobytes())
        with open(bin_path(prefix), "rb") as file:
            shutil.copyfileobj(file, self._file, _COPIED_NBYTES)

    def finish(self) -> None:
        """Write the index, and move both files into place.

        An existing data set of that name is replaced.
        """
        try:
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
            index = self._draft.with_suffix(".idx")
            index.write_bytes(self._index())
            with suppress(FileNotFoundError):
                idx_path(self.prefix).unlink()
            os.replace(self._draft, bin_path(self.prefix))
            os.replace(index, idx_path(self.prefix))
        except OSError as error:
            raise UsageError(f"{self.prefix} cannot be written: {error.strerror}") from error

    def _index(self) -> bytes:
        return index_of(self.sizes, self._marks, self.dtype)


class OldRowsBuilder(RowsBuilder):
    """Writes a data set in the older format (`TNTIDX`), for programs that read only that.

    Raises:
        UsageError: the dtype has no code there, or the files cannot be written.
    """

    def __init__(self, prefix: str | Path, dtype: Any = np.int32) -> None:
        self._code = next((n for n, known in _OLD_CODES.items() if known == dtype_of(dtype)), 0)
        if not self._code:
            raise UsageError(
                f"{prefix}: the older format has no code for {dtype}; choose one of"
                f" {', '.join(str(known) for known in _OLD_CODES.values() if known in CODES)}"
            )
        super().__init__(prefix, dtype)

    def _index(self) -> bytes:
        rows, marks = len(self.sizes), np.asarray(self._marks, "<i8")
        numbers = (_VERSION, self._code, self.dtype.itemsize, rows, rows, len(marks))
        counts = np.asarray(self.sizes, "<i8")
        starts = np.concatenate([[0], np.cumsum(counts)]).astype("<i8")
        dims = np.arange(rows + 1, dtype="<i8")
        parts = (dims, starts, counts, marks)
        head = OLD_MAGIC + struct.pack("<6Q", *numbers)
        return b"".join((head, *(part.tobytes() for part in parts)))


def dtype_of(dtype: Any) -> np.dtype[Any]:
    """Return the numpy dtype for a dtype of numpy or torch that an index can store.

    Raises:
        UsageError: an index cannot store it.
    """
    name = str(dtype).removeprefix("torch.") if isinstance(dtype, torch.dtype) else dtype
    try:
        found = np.dtype(name)
    except TypeError:
        found = None
    if found not in CODES:
        raise UsageError(f"{dtype} is not a dtype of indexed data sets: {', '.join(_WRITTEN)}")
    assert found is not None  # it is in the table
    return found


def index_of(sizes: Sequence[int], marks: Sequence[int], dtype: np.dtype[Any]) -> bytes:
    """Return the contents of an index of consecutive rows."""
    counts = np.asarray(sizes, "<i4")
    nbytes = counts.astype("<i8") * dtype.itemsize
    offsets = np.cumsum(nbytes, dtype="<i8") - nbytes
    head = struct.pack("<QBQQ", _VERSION, CODES[dtype], len(counts), len(marks))
    documents = np.asarray(marks, "<i8")
    return b"".join((_MAGIC, head, counts.tobytes(), offsets.tobytes(), documents.tobytes()))


def smallest_dtype(low: int, high: int) -> np.dtype[Any]:
    """Return the smallest integer type for numbers from `low` to `high`; unsigned if none is < 0.

    Raises:
        UsageError: no type holds both.
    """
    kinds = (
        ("uint8", "uint16", "uint32", "uint64") if low >= 0 else ("int8", "int16", "int32", "int64")
    )
    for kind in kinds:
        if np.iinfo(kind).min <= low and high <= np.iinfo(kind).max:
            return np.dtype(kind)
    raise UsageError(f"no integer type holds {low} and {high}")
