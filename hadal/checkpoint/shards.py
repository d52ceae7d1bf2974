"""Tensors in a safetensors file: written chunk by chunk, read by their headers.

The format is a length (8 bytes, little endian), a JSON header of that length, and all tensors one
after the other. Hadal writes it itself, not through the library, so that no second copy of all
tensors is made and the checksum covers the bytes as they are written.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hadal.checkpoint.files import Seal, parsing_errors, storage_of, system_errors, write_file
from hadal.checkpoint.index import strict_json
from hadal.checkpoint.rules import Writing
from hadal.checkpoint.storage import Chunk, Location
from hadal.device import read_on_host
from hadal.errors import CheckpointError
from hadal.offload.tensors import StoredSlice

DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.complex64: "C64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


DTYPE_OF = {name: dtype for dtype, name in DTYPES.items()}


def write_tensors(
    path: Location,
    tensors: Mapping[str, Tensor | StoredSlice],
    texts: Mapping[str, str],
    writing: Writing | None = None,
) -> Seal:
    """Write tensors of any device, and texts into the header, one buffer at a time.

    Tensors that are stored on disk are read in chunks of the same size.

    Raises:
        CheckpointError: the file cannot be written, or a tensor has a dtype without a name.
    """
    # Wide dtypes first, so that each tensor begins at a multiple of its elements' size.
    ordered = sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0]))
    writing = Writing() if writing is None else writing
    rows = [(name, tuple(tensor.shape), tensor.dtype) for name, tensor in ordered]
    chunks = _Chunks(header_of(path, rows, texts), dict(ordered), writing.buffer_nbytes)
    return write_file(path, chunks, doubled=writing.is_doubled)


@dataclass(frozen=True, slots=True)
class _Chunks:
    """The contents of a file; they can be iterated again, if a write has to be repeated."""

    header: bytes
    tensors: Mapping[str, Tensor | StoredSlice]
    nbytes: int

    def __iter__(self) -> Iterator[Chunk]:
        yield self.header
        for tensor in self.tensors.values():
            if not tensor.numel():
                continue
            if isinstance(tensor, Tensor):
                flat = tensor.detach().reshape(-1)
                pieces: Iterable[Tensor] = flat.split(max(1, self.nbytes // tensor.element_size()))
            else:
                # A chunk may still be being written when the next is read.
                pieces = (part.clone() for part in tensor.parts(self.nbytes))
            yield from map(bytes_of, pieces)


def header_of(
    path: Location,
    rows: Iterable[tuple[str, tuple[int, ...], torch.dtype]],
    texts: Mapping[str, str],
) -> bytes:
    """Return a file's header: name, shape and dtype of the tensors that follow in order, and texts.

    Raises:
        CheckpointError: a dtype has no name in the format; the message names `path`.
    """
    header: dict[str, object] = {"__metadata__": dict(texts)}
    end = 0
    for name, shape, dtype in rows:
        if dtype not in DTYPES:
            raise CheckpointError(f"{path} cannot hold {name}, a tensor of {dtype}")
        begin, end = end, end + prod(shape) * dtype.itemsize
        header[name] = {"dtype": DTYPES[dtype], "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


class HeaderRow(NamedTuple):
    """A tensor's entry in a file's header."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    """The tensor's first byte in the file."""
    stop: int


class Header(NamedTuple):
    """A file's header."""

    texts: Mapping[str, str]
    rows: Mapping[str, HeaderRow]


def read_header(path: Location, nbytes: int) -> Header:
    """Read a file's header, its first `nbytes`; nothing else is read, nor brought into the cache.

    Raises:
        CheckpointError: the file cannot be read, or its header is malformed.
    """
    with system_errors(path, "read"):
        head = storage_of(path).open(path).read(0, nbytes)
    with parsing_errors(f"{path} is damaged"):
        rows = strict_json(head[8:], path)
        texts = rows.pop("__metadata__", {})
        return Header(texts, {name: _row_of(row, len(head)) for name, row in rows.items()})


def _row_of(row: Mapping[str, Any], begin: int) -> HeaderRow:
    first, last = row["data_offsets"]
    return HeaderRow(row["dtype"], tuple(row["shape"]), begin + first, begin + last)


def bytes_of(flat: Tensor) -> memoryview:
    """Return the bytes of a non-empty 1-D tensor."""
    return read_on_host(flat, "what is to be saved").contiguous().view(torch.uint8).numpy().data
