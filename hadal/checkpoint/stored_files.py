"""The files of one of Hadal's own checkpoints: sealed, opened once, read by their headers.

Tests: tests/checkpoint/test_damage.py, tests/checkpoint/test_loading.py
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from hadal.checkpoint.direct import Kept
from hadal.checkpoint.files import Seal, check_file, exists, open_file, parsing_errors
from hadal.checkpoint.shards import DTYPE_OF, DTYPES, Header, HeaderRow, read_header
from hadal.checkpoint.storage import Location, StoredFile
from hadal.device.memory import is_host_memory
from hadal.errors import CheckpointError
from hadal.offload.buffers import memory_of


class Dtypes(NamedTuple):
    """The dtype of a tensor in its file, and the one that its values are rounded to first."""

    stored: torch.dtype
    rounded: torch.dtype


class SavedFiles:
    """The seals of a checkpoint's files, by file name; the files `here` are in this folder.

    A file's size and header are checked when it is first needed, and all its bytes by `verify`.
    """

    def __init__(self, home: Location, seals: Mapping[str, Seal], here: frozenset[str]) -> None:
        self.home = home
        self.seals = seals
        self._here = here
        self._open: dict[str, StoredFile] = {}
        self._kept: dict[str, Kept] = {}
        self._headers: dict[str, Header] = {}
        self.used: set[str] = set()
        """The files used so far."""

    def use(self, name: str) -> Location:
        """Check a file's size and header, once; return its location.

        Raises:
            CheckpointError: it is missing or damaged.
        """
        path = self.home / name
        if name not in self.used:
            if name not in self._here and not exists(path):
                raise CheckpointError(
                    f"{path} is on another node: the checkpoint was saved with"
                    " checkpoint.use_node_local_storage. Load it with the same number of ranks on"
                    " the same nodes at the same stage, or copy all nodes' files into one folder"
                )
            check_file(path, self.seals[name], whole=False)
            self.used.add(name)
        return path

    def verify(self, name: str, room: int, apart: Iterable[tuple[int, int]]) -> int:
        """Compare every byte with the checksum; keep up to `room` bytes, and return what is left.

        `apart` lists the extents that `taken` can return; see `Kept`.

        Raises:
            CheckpointError: the file is damaged.
        """
        path = self.use(name)
        with self.reading(name):
            kept = Kept(room, apart)
        check_file(path, self.seals[name], whole=True, kept=kept)
        room, kept.room = kept.room, 0
        self._kept[name] = kept
        return room

    def header(self, name: str) -> Header:
        """Return a file's header, which is read once."""
        if name not in self._headers:
            self._headers[name] = read_header(self.use(name), self.seals[name].head_nbytes)
        return self._headers[name]

    def expect(
        self, name: str, tensor: str, dtype: torch.dtype, shape: tuple[int, ...] | None = None
    ) -> HeaderRow:
        """Return a tensor's row, checked against the dtype, the shape if given, and the file.

        Raises:
            CheckpointError: there is no such tensor; the message names the file.
        """
        with self.reading(name):
            row = self.header(name).rows.get(tensor)
            if row is None:
                raise ValueError(f"it has no tensor {tensor}")
            if row.dtype != DTYPES[dtype] or (shape is not None and row.shape != shape):
                raise ValueError(
                    f"{tensor} is {row.dtype} of shape {row.shape}, expected {DTYPES[dtype]}"
                    f"{'' if shape is None else f' of shape {shape}'}"
                )
            nbytes = prod(row.shape) * dtype.itemsize
            if row.stop - row.begin != nbytes or row.stop > self.seals[name].nbytes:
                raise ValueError(
                    f"{tensor} needs {nbytes} bytes, but has bytes {row.begin} to {row.stop} of"
                    f" a file of {self.seals[name].nbytes}"
                )
            return row

    def fill(self, out: Tensor, name: str, tensor: str, start: int, dtypes: Dtypes) -> None:
        """Read elements of a tensor from `start` on into `out`, 1-D, of any dtype and device.

        Raises:
            CheckpointError: they cannot be read; the message names the file.
        """
        stored, dtype = dtypes
        row = self.expect(name, tensor, stored)
        with self.reading(name):
            if start + out.numel() > prod(row.shape):
                raise ValueError(f"{tensor} has no elements {start} to {start + out.numel()}")
            if not out.numel():
                return
            if name not in self._open:
                self._open[name] = open_file(self.use(name))
            file, kept = self._open[name], self._kept.get(name)
            begin, offset = row.begin + start * stored.itemsize, 0
            if is_host_memory(out.device) and out.dtype == dtype == stored and out.is_contiguous():
                file.read_into(memory_of(out.view(torch.uint8)), begin, kept)
                return
            for block in file.blocks(begin, begin + out.numel() * stored.itemsize, kept):
                values = torch.frombuffer(block, dtype=stored)
                out[offset : offset + values.numel()].copy_(values.to(dtype))
                offset += values.numel()

    def whole(self, name: str, tensor: str) -> Tensor:
        """Return a whole tensor of a file, in its shape."""
        with self.reading(name):
            row = self.header(name).rows[tensor]
            dtype = DTYPE_OF[row.dtype]
            # Checked before allocating: a damaged header can claim any size.
            self.expect(name, tensor, dtype)
            found = torch.empty(row.shape, dtype=dtype)
        self.fill(found.view(-1), name, tensor, 0, Dtypes(dtype, dtype))
        return found

    def taken(self, name: str, extent: tuple[int, int]) -> Tensor | None:
        """Return bytes that `verify` kept, which the caller then owns; None if it did not."""
        kept = self._kept.get(name)
        return None if kept is None else kept.whole(*extent)

    def reading(self, name: str) -> AbstractContextManager[None]:
        """Re-raise errors of the block as CheckpointError, with the file."""
        return parsing_errors(f"{self.home / name} is damaged")

    def close(self) -> None:
        """Drop the opened files and the bytes that were kept."""
        self._open.clear()
        self._kept.clear()
