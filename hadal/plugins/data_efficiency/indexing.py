"""Tokenize texts into an indexed data set: worker processes tokenize, this process writes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from hadal.errors import UsageError
from hadal.plugins.data_efficiency.chunks import compute_all
from hadal.plugins.data_efficiency.indexed import RowsBuilder
from hadal.plugins.data_efficiency.texts import TextRange, TextSource

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
    try:
        from transformers import AutoTokenizer
    except ImportError:
        raise UsageError(
            f'tokenizer "{name}" needs transformers, which is not installed: pip install'
            f' transformers; "{BYTES}" needs no package'
        ) from None
    try:
        found: Any = AutoTokenizer.from_pretrained(name)
    except Exception as error:
        raise UsageError(f"tokenizer {name} cannot be loaded: {error}") from error
    return found, getattr(found, "backend_tokenizer", None)


def _from_file(name: str) -> tuple[Any, Any]:
    try:
        from tokenizers import Tokenizer as Backend
    except ImportError:
        raise UsageError(
            f"{name} needs the package tokenizers, which is not installed: pip install tokenizers"
        ) from None
    try:
        return None, Backend.from_file(name)
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
    rows = _RangeRows(source, indexing)
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


@dataclass(frozen=True, slots=True)
class _RangeRows:
    """The work of one process: read a range of the texts, and tokenize it."""

    source: TextSource
    indexing: Indexing

    def __call__(self, span: TextRange) -> _Encoded:
        return self.indexing.rows(self.source.documents(span))
