"""Texts of documents into an indexed data set: worker processes tokenize, this process writes.

Texts are read from files or data sets, in ranges that processes read independently.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from hadal.errors import UsageError, nearest, needed
from hadal.plugins.data_efficiency.chunks import compute_all
from hadal.plugins.data_efficiency.indexed import RowsBuilder

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
        self._parquet()

    def ranges(self) -> list[TextRange]:
        """Return the row groups of all files.

        Raises:
            UsageError: a file is not a Parquet file.
        """
        found = []
        for number, file in enumerate(self.files):
            try:
                told = self._parquet().ParquetFile(file).metadata
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
        file = self._parquet().ParquetFile(path)
        names = list(file.schema_arrow.names)
        if self._field not in names:
            _field_of(dict.fromkeys(names), self._field, str(path))
        column = file.read_row_group(span.start, columns=[self._field]).column(0)
        found = column.to_pylist()
        if any(not isinstance(text, str | None) for text in found):
            raise UsageError(f'{path}: column "{self._field}" is {column.type}, expected texts')
        return [text for text in found if text]

    def _parquet(self) -> Any:
        return needed("pyarrow.parquet", "a Parquet file")


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
        datasets = needed("datasets", "a Hugging Face data set")
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


BYTES = "bytes"
"""The name of the built-in tokenizer."""
_BYTES = 256


class Tokens(NamedTuple):
    """Concatenated tokens of documents."""

    numbers: npt.NDArray[Any]
    sizes: npt.NDArray[np.int64]
    """The number of each document's tokens."""


class Tokenizer(Protocol):
    """Converts texts to tokens."""

    @property
    def words(self) -> int:
        """An upper bound of the tokens, exclusive."""

    @property
    def end(self) -> int | None:
        """The end-of-document token; None if there is none."""

    def encode(self, texts: list[str]) -> Tokens:
        """Return the tokens of the texts, without special tokens for their start or end."""


class ByteTokenizer:
    """Maps each byte of the UTF-8 text to a token; 256 is the end of a document."""

    words = _BYTES + 1
    end = _BYTES

    def encode(self, texts: list[str]) -> Tokens:
        """Return the bytes."""
        raw = [text.encode("utf-8") for text in texts]
        sizes = np.fromiter(map(len, raw), np.int64, len(raw))
        return Tokens(np.frombuffer(b"".join(raw), np.uint8), sizes)


class LibraryTokenizer:
    """A tokenizer of tokenizers or transformers.

    Args:
        name: a model on the hub, its folder, or a `tokenizer.json`.

    Raises:
        UsageError: the libraries are not installed, or there is no such tokenizer.
    """

    def __init__(self, name: str) -> None:
        slow, backend = _from_file(name) if name.endswith(".json") else _from_transformers(name)
        self.end: int | None = None if slow is None else slow.eos_token_id
        self._slow = slow
        self._backend = backend
        if backend is None:
            self.words = len(slow)
            return
        # A document is neither truncated nor padded.
        backend.no_truncation()
        backend.no_padding()
        self.words = 1 + max(backend.get_vocab(with_added_tokens=True).values())

    def encode(self, texts: list[str]) -> Tokens:
        """Return the tokens of the texts."""
        if self._backend is not None:
            encoded = self._backend.encode_batch_fast(texts, add_special_tokens=False)
            found = [each.ids for each in encoded]
        else:
            found = self._slow(texts, add_special_tokens=False)["input_ids"]
        sizes = np.fromiter(map(len, found), np.int64, len(found))
        total = int(sizes.sum())
        return Tokens(np.fromiter(chain.from_iterable(found), np.int32, total), sizes)


def _from_transformers(name: str) -> tuple[Any, Any]:
    """Return a tokenizer, and the one of tokenizers inside it, if there is one."""
    transformers = needed("transformers", f'tokenizer "{name}"', instead=f'name it "{BYTES}"')
    try:
        found: Any = transformers.AutoTokenizer.from_pretrained(name)
    except Exception as error:
        raise UsageError(f"tokenizer {name} cannot be loaded: {error}") from error
    return found, getattr(found, "backend_tokenizer", None)


def _from_file(name: str) -> tuple[Any, Any]:
    tokenizers = needed("tokenizers", name)
    try:
        return None, tokenizers.Tokenizer.from_file(name)
    except Exception as error:
        raise UsageError(f"{name} is not a tokenizer: {error}") from error


def tokenizer_of(name: str) -> Tokenizer:
    """Return the tokenizer for a name: "bytes", a transformers model or directory, or a file.

    Raises:
        UsageError: a library is not installed, or there is no such tokenizer.
    """
    return ByteTokenizer() if name == BYTES else LibraryTokenizer(name)


def dtype_for(words: int) -> np.dtype[Any]:
    """Return the dtype for tokens less than `words` that programs expect in these files."""
    for kind in (np.uint8, np.uint16):
        if words <= np.iinfo(kind).max + 1:
            return np.dtype(kind)
    return np.dtype(np.int32)


class _Encoded(NamedTuple):
    """The rows of a range of texts."""

    numbers: npt.NDArray[Any]
    sizes: npt.NDArray[np.int64]
    ends: npt.NDArray[np.int64]
    """The number of rows up to the end of each document."""
    characters: int


@dataclass(frozen=True, slots=True)
class Indexing:
    """The conversion of texts to rows."""

    tokenizer: Tokenizer
    end: bool = False
    """True appends the end-of-document token to each document."""
    length: int | None = None
    """The longest row: longer documents become several rows. None makes each document one row."""

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype of the tokens in the file."""
        spare = 0 if self.end or not isinstance(self.tokenizer, ByteTokenizer) else 1
        return dtype_for(self.tokenizer.words - spare)

    def rows(self, texts: list[str]) -> _Encoded:
        """Return the rows of texts."""
        numbers, sizes = self.tokenizer.encode(texts)
        numbers = numbers.astype(self.dtype, copy=False)
        if self.end:
            places = np.cumsum(sizes)
            numbers = np.insert(numbers, places, np.asarray(self.tokenizer.end, self.dtype))
            sizes = sizes + 1
        counts = np.ones(len(sizes), np.int64)
        if self.length is not None:
            counts = -(-sizes // self.length)
            last = np.cumsum(counts) - 1
            rest = sizes - (counts - 1) * self.length
            full = np.full(int(counts.sum()), self.length, np.int64)
            full[last[counts > 0]] = rest[counts > 0]
            sizes = full
        return _Encoded(numbers, sizes, np.cumsum(counts), sum(map(len, texts)))


@dataclass(slots=True)
class Indexed:
    """Counts of the written rows and tokens."""

    documents: int = 0
    rows: int = 0
    tokens: int = 0
    characters: int = 0


def index_texts(
    source: TextSource,
    indexing: Indexing,
    prefix: str | Path,
    workers: int = 0,
    progress: Callable[[int], None] | None = None,
) -> Indexed:
    """Write the tokens of all documents as `prefix`.bin and `prefix`.idx, in their order.

    Args:
        source: the documents.
        indexing: tokenizer and rows.
        prefix: the path of the two files without their endings.
        workers: processes that tokenize; 0 and 1 use this process.
        progress: called with the size of each range that is done.

    Raises:
        UsageError: a file cannot be read, there is no text, or the tokenizer has no
            end-of-document token.
    """
    if indexing.end and indexing.tokenizer.end is None:
        raise UsageError("the tokenizer has no end-of-document token; leave that option out")
    ranges = source.ranges()
    found = Indexed()
    rows = partial(_rows_of, source, indexing)
    with (
        RowsBuilder(prefix, indexing.dtype) as builder,
        compute_all(rows, [(span,) for span in ranges], workers) as encoded,
    ):
        for span, made in zip(ranges, encoded, strict=True):
            builder.add_joined(made.numbers, made.sizes, made.ends)
            found.documents += len(made.ends)
            found.rows += len(made.sizes)
            found.tokens += len(made.numbers)
            found.characters += made.characters
            if progress is not None:
                progress(span.size)
        if not found.documents:
            raise UsageError(f"no document has text, so {prefix} was not written")
    return found


def _rows_of(source: TextSource, indexing: Indexing, span: TextRange) -> _Encoded:
    """Do the work of one process: read a range of the texts, and tokenize it."""
    return indexing.rows(source.documents(span))
