"""Texts of documents, from files or data sets, in ranges that processes read independently."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

from hadal.errors import UsageError, nearest

RANGE_NBYTES = 1 << 20
_SAMPLES = 1000
_LOOKED_AT = 1 << 16

Documents = Literal["line", "paragraph", "file"]
"""The unit of a text file that is one document."""
_ENDS = {"line": re.compile(rb"\n"), "paragraph": re.compile(rb"\n[ \t\r]*\n")}
_SUFFIXES = {".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "jsonl", ".parquet": "parquet"}


class TextRange(NamedTuple):
    """A range of a source: the file's number, and a range in it."""

    file: int
    start: int
    stop: int
    size: int
    """Its fraction of the source's `size`."""


class TextSource(Protocol):
    """Documents in ranges; processes read different ones."""

    def ranges(self) -> list[TextRange]:
        """Return all ranges, in order."""

    def documents(self, span: TextRange) -> list[str]:
        """Return the texts of a range.

        Raises:
            UsageError: a file cannot be read, or is not of this format.
        """


def source_of(paths: Sequence[str | Path], kind: str | None, field: str, by: Documents) -> Any:
    """Return the source of files: text, JSONL or Parquet by `kind`, or by their suffixes.

    Raises:
        UsageError: a file does not exist, or files of several formats are mixed.
    """
    files = [Path(path) for path in paths]
    for file in files:
        if not file.is_file():
            raise UsageError(f"{file} is not a file")
        if file.suffix in (".gz", ".zst", ".bz2", ".xz"):
            raise UsageError(
                f"{file} is compressed, but files are read in ranges; decompress it first"
            )
    kinds = {_SUFFIXES.get(file.suffix, "text") for file in files} if kind is None else {kind}
    if len(kinds) > 1:
        raise UsageError(
            f"files of several formats ({', '.join(sorted(kinds))}); index them separately"
        )
    (found,) = kinds
    if found == "parquet":
        return ParquetTexts(files, field)
    if found == "jsonl":
        return JsonTexts(files, field)
    return PlainTexts(files, by)


class _TextFiles:
    """Files that are divided between lines or paragraphs, wherever possible."""

    def __init__(self, files: Sequence[Path], end: re.Pattern[bytes] | None) -> None:
        self.files = tuple(files)
        self._end = end

    def ranges(self) -> list[TextRange]:
        """Return byte ranges of all files; documents belong to the range in which they begin."""
        found = []
        for number, file in enumerate(self.files):
            size = file.stat().st_size
            step = max(1, size) if self._end is None else RANGE_NBYTES
            for start in range(0, size, step):
                stop = min(start + step, size)
                found.append(TextRange(number, start, stop, stop - start))
        return found

    def _read(self, span: TextRange) -> tuple[int, bytes]:
        """Return the offset of the range's first document, and the range's bytes."""
        with open(self.files[span.file], "rb") as file:
            start, stop = (self._boundary(file, each) for each in (span.start, span.stop))
            file.seek(start)
            return start, file.read(stop - start)

    def _boundary(self, file: Any, place: int) -> int:
        """Return the first offset from `place` on at which a document begins."""
        size = os.fstat(file.fileno()).st_size
        if self._end is None or not 0 < place < size:
            return place
        file.seek(place)
        seen = b""
        while more := file.read(max(_LOOKED_AT, len(seen))):
            seen += more
            found = self._end.search(seen)
            if found:
                return place + found.end()
        return size

    def _text(self, span: TextRange, start: int, raw: bytes) -> str:
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError as error:
            raise UsageError(
                f"{self.files[span.file]}: byte {start + error.start} is not UTF-8"
                f" ({error.reason}); convert the file to UTF-8"
            ) from error


class PlainTexts(_TextFiles):
    """Text files; a document is a line, a paragraph, or a whole file."""

    def __init__(self, files: Sequence[Path], by: Documents = "line") -> None:
        super().__init__(files, _ENDS.get(by))
        self._by = by

    def documents(self, span: TextRange) -> list[str]:
        """Return the texts of a range, without the line ends around them; blank ones are left out.

        Raises:
            UsageError: the file is not UTF-8.
        """
        text = self._text(span, *self._read(span))
        if self._by == "file":
            return [text] if text.strip() else []
        parts = text.split("\n") if self._by == "line" else re.split(r"\n[ \t\r]*\n", text)
        return [part.strip("\r\n") for part in parts if part and not part.isspace()]


class JsonTexts(_TextFiles):
    """Files with one JSON object in each line, with the text in a field."""

    def __init__(self, files: Sequence[Path], field: str = "text") -> None:
        super().__init__(files, _ENDS["line"])
        self._field = field

    def documents(self, span: TextRange) -> list[str]:
        """Return the texts of a range; empty ones are left out.

        Raises:
            UsageError: a line is not a JSON object, or has no text in the field.
        """
        start, raw = self._read(span)
        self._text(span, start, raw)
        found = []
        for line in raw.split(b"\n"):
            if line and not line.isspace():
                found.append(self._document(span, start, line))
            start += len(line) + 1
        return [text for text in found if text]

    def _document(self, span: TextRange, start: int, line: bytes) -> str:
        where = f"{self.files[span.file]}, the line at byte {start}"
        try:
            told = json.loads(line)
        except ValueError as error:
            raise UsageError(f"{where}: not JSON ({error})") from error
        if not isinstance(told, dict):
            raise UsageError(f"{where}: expected an object, got {type(told).__name__}")
        return _field_of(told, self._field, where)


def _field_of(told: dict[str, Any], field: str, where: str) -> str:
    text = told.get(field)
    if isinstance(text, str):
        return text
    if field in told:
        raise UsageError(f'{where}: field "{field}" is {type(text).__name__}, expected a text')
    near = nearest(field, told)
    hint = f'; did you mean "{near}"?' if near else f"; it has {', '.join(told) or 'no field'}"
    raise UsageError(f'{where}: no field "{field}"{hint}')


class ParquetTexts:
    """Parquet files with the text in a column.

    Raises:
        UsageError: pyarrow is not installed.
    """

    def __init__(self, files: Sequence[Path], field: str = "text") -> None:
        self.files = tuple(files)
        self._field = field
        _parquet()

    def ranges(self) -> list[TextRange]:
        """Return the row groups of all files.

        Raises:
            UsageError: a file is not a Parquet file.
        """
        found = []
        for number, file in enumerate(self.files):
            try:
                told = _parquet().ParquetFile(file).metadata
            except (OSError, ValueError) as error:  # pyarrow's own errors are of these kinds
                raise UsageError(f"{file} is not a Parquet file, or is damaged: {error}") from error
            for group in range(told.num_row_groups):
                size = told.row_group(group).total_byte_size
                found.append(TextRange(number, group, group + 1, size))
        return found

    def documents(self, span: TextRange) -> list[str]:
        """Return the texts of a row group; empty ones are left out.

        Raises:
            UsageError: there is no such column, or it holds other values.
        """
        path = self.files[span.file]
        file = _parquet().ParquetFile(path)
        names = list(file.schema_arrow.names)
        if self._field not in names:
            _field_of(dict.fromkeys(names), self._field, str(path))
        column = file.read_row_group(span.start, columns=[self._field]).column(0)
        found = column.to_pylist()
        if any(not isinstance(text, str | None) for text in found):
            raise UsageError(f'{path}: column "{self._field}" is {column.type}, expected texts')
        return [text for text in found if text]


def _parquet() -> Any:
    try:
        import pyarrow.parquet
    except ImportError:
        raise UsageError(
            "Parquet files require pyarrow, which is not installed: pip install pyarrow"
        ) from None
    return pyarrow.parquet


@dataclass(frozen=True)
class DatasetTexts:
    """A Hugging Face data set, or any that returns columns for a slice."""

    dataset: Any
    field: str = "text"

    @classmethod
    def load(cls, name: str, split: str, field: str = "text") -> DatasetTexts:
        """Return a data set from the hub, or from a directory that `save_to_disk` wrote.

        Raises:
            UsageError: datasets is not installed, or cannot load it.
        """
        try:
            import datasets
        except ImportError:
            raise UsageError(
                "Hugging Face data sets require the package datasets, which is not installed: pip"
                " install datasets"
            ) from None
        try:
            if Path(name).is_dir() and any(Path(name).glob("*.json")):
                found = datasets.load_from_disk(name)
                if isinstance(found, datasets.DatasetDict):
                    if split not in found:
                        raise ValueError(f"there is no such split; expected {', '.join(found)}")
                    found = found[split]
            else:
                found = datasets.load_dataset(name, split=split)
        except Exception as error:
            raise UsageError(f"data set {name}, split {split}: {error}") from error
        made = cls(found, field)
        if field not in found.column_names:
            _field_of(dict.fromkeys(found.column_names), field, f"data set {name}")
        return made

    def ranges(self) -> list[TextRange]:
        """Return ranges of samples."""
        count = len(self.dataset)
        stops = [min(start + _SAMPLES, count) for start in range(0, count, _SAMPLES)]
        starts = range(0, count, _SAMPLES)
        return [
            TextRange(0, start, stop, stop - start)
            for start, stop in zip(starts, stops, strict=True)
        ]

    def documents(self, span: TextRange) -> list[str]:
        """Return the texts of a range; empty ones are left out."""
        return [text for text in self.dataset[span.start : span.stop][self.field] if text]
