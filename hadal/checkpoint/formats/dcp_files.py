"""The files of a `torch.distributed.checkpoint` folder, read as data: its index and its items.

The index is a pickle. Its classes become stand-ins, and every other name is refused: nothing of
the file or of torch's own classes is run. The items are zip files of `torch.save`, one behind the
other.

Tests: tests/checkpoint/test_dcp.py
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from math import prod
from types import MappingProxyType
from typing import Any, BinaryIO, NamedTuple

import torch
from torch import Tensor

from hadal.checkpoint.deepspeed.pickles import Attributes, check_archive, path_text, short
from hadal.checkpoint.files import inside, open_file, parsing_errors, read_small
from hadal.checkpoint.formats.dcp import METADATA, Path_
from hadal.checkpoint.storage import Location, StoredFile
from hadal.errors import CheckpointError, NotBuiltYetError
from hadal.zero.boxes import Box

_LIMIT = 1 << 32
_BUFFER_NBYTES = 1 << 16


class StoredItem(NamedTuple):
    """The place of one stored value: a file, and bytes in it."""

    file: str
    offset: int
    length: int


class StoredChunk(NamedTuple):
    """A part of a tensor, and its place."""

    box: Box
    item: StoredItem


class StoredTensor(NamedTuple):
    """A tensor in the folder."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    chunks: tuple[StoredChunk, ...]


class Contents(NamedTuple):
    """The contents of a folder, by the keys that lead to each value."""

    tensors: Mapping[Path_, StoredTensor]
    values: Mapping[Path_, StoredItem]


class _State(Attributes):
    """A stand-in for an object whose state is no dict."""

    def __setstate__(self, state: Any) -> None:
        self.state = state


_OWN = "torch.distributed.checkpoint.metadata"
_EARLIER = "torch.distributed._shard.sharded_tensor.metadata"
_STAND_INS: Mapping[str, Any] = MappingProxyType(
    {
        **{
            f"{_OWN}.{name}": Attributes
            for name in (
                *("Metadata", "TensorStorageMetadata", "BytesStorageMetadata"),
                *("ChunkStorageMetadata", "StorageMeta", "MetadataIndex"),
            )
        },
        "torch.distributed.checkpoint.filesystem._StorageInfo": Attributes,
        **{f"{module}.TensorProperties": _State for module in (_OWN, _EARLIER)},
        f"{_OWN}._MEM_FORMAT_ENCODING": int,
        f"{_EARLIER}.MEM_FORMAT_ENCODING": int,
        "torch.Size": tuple,
        "torch.serialization._get_layout": str,
        "collections.OrderedDict": dict,
        **{f"pathlib.{kind}Path": path_text for kind in ("Posix", "Windows", "PurePosix")},
        "pathlib._local.PosixPath": path_text,
    }
)
"""Stand-ins by the name in an index."""


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        """Return the stand-in for a name, or the dtype of that name."""
        found = _STAND_INS.get(f"{module}.{name}")
        if found is None and module == "torch":
            found = getattr(torch, name, None)
            found = found if isinstance(found, torch.dtype) else None
        if found is None:
            raise pickle.UnpicklingError(f"it names {module}.{name}")
        return found


def read_contents(folder: Location) -> Contents:
    """Return what a folder holds, from its index alone.

    Raises:
        CheckpointError: the index is damaged, or names something not known to be harmless.
        NotBuiltYetError: the items were written through an extension (compressed, for example).
    """
    path = folder / METADATA
    raw = read_small(path, _LIMIT)
    try:
        index = _Unpickler(io.BytesIO(raw)).load()
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"{path} is damaged, or not the index of torch.distributed.checkpoint: {error}; none of"
            " its code was run"
        ) from error
    except Exception as error:  # damaged bytes may raise any kind
        raise CheckpointError(f"{path} is damaged: {type(error).__name__}: {error}") from error
    with parsing_errors(f"{path} is damaged"):
        return _understood(index, folder)


def _understood(index: Any, folder: Location) -> Contents:
    tensors: dict[Path_, StoredTensor] = {}
    values: dict[Path_, StoredItem] = {}
    items = {
        (key.fqn, getattr(key, "offset", None)): _item(info, folder)
        for key, info in index.storage_data.items()
    }
    paths = index.planner_data or {}
    for name, entry in index.state_dict_metadata.items():
        path = tuple(paths.get(name, (name,)))
        if not hasattr(entry, "chunks"):
            values[path] = items[name, None]
            continue
        # Without a name: tied tensors are those with the same chunks.
        chunks = tuple(
            StoredChunk(
                Box("", tuple(entry.size), tuple(one.offsets), tuple(one.sizes)),
                items[name, one.offsets],
            )
            for one in entry.chunks
        )
        stored = StoredTensor(tuple(entry.size), entry.properties.state[0], chunks)
        if sum(one.box.numel for one in chunks) != prod(stored.shape):
            raise ValueError(f"the chunks of {name} are not all of it")
        tensors[path] = stored
    return Contents(tensors, values)


def _item(info: Any, folder: Location) -> StoredItem:
    if getattr(info, "transform_descriptors", None):
        raise NotBuiltYetError(
            f"{folder} was written through {info.transform_descriptors}, which is not supported"
            " yet; load it with torch and save it without extensions"
        )
    return StoredItem(str(info.relative_path), int(info.offset), int(info.length))


def read_item(folder: Location, item: StoredItem) -> Any:
    """Return a stored value; only tensors and plain containers are accepted.

    Raises:
        CheckpointError: it cannot be read, or is damaged.
    """
    with _opened(folder, item) as file:
        try:
            return torch.load(file, map_location="cpu", weights_only=True)
        except Exception as error:  # damaged bytes may raise any kind
            raise CheckpointError(
                f"{folder / item.file} is damaged at byte {item.offset}, or holds more than plain"
                f" values: {short(error)}"
            ) from error


def read_chunk(folder: Location, chunk: StoredChunk, dtype: torch.dtype) -> Tensor:
    """Return a part of a tensor, in the shape of its box.

    Raises:
        CheckpointError: it cannot be read, or is damaged.
    """
    found = read_item(folder, chunk.item)
    fits = isinstance(found, Tensor) and found.dtype == dtype and found.layout == torch.strided
    if not fits or tuple(found.shape) != chunk.box.sizes:
        raise CheckpointError(
            f"{folder / chunk.item.file} is damaged at byte {chunk.item.offset}: expected a tensor"
            f" of {dtype} of shape {chunk.box.sizes}, as the index says"
        )
    whole: Tensor = found
    return whole


def check_item(folder: Location, item: StoredItem) -> None:
    """Compare every byte of a stored value with the checksums in it.

    Raises:
        CheckpointError: it is missing or damaged.
    """
    with _opened(folder, item) as file:
        check_archive(file, f"{folder / item.file} is damaged at byte {item.offset}")


@contextmanager
def _opened(folder: Location, item: StoredItem) -> Iterator[BinaryIO]:
    path = inside(folder, item.file)
    file = open_file(path)
    with parsing_errors(f"{path} cannot be read"):
        yield io.BufferedReader(_Window(file, item.offset, item.length), _BUFFER_NBYTES)


class _Window(io.RawIOBase):
    """Some bytes of a stored file, as a file."""

    def __init__(self, file: StoredFile, offset: int, length: int) -> None:
        self._file, self._offset, self._length = file, offset, length
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._length}[whence]
        self._position = base + offset
        return self._position

    def readinto(self, buffer: Any) -> int:
        with memoryview(buffer).cast("B") as view:
            wanted = max(min(len(view), self._length - self._position), 0)
            self._file.read_into(view[:wanted], self._offset + self._position)
        self._position += wanted
        return wanted
