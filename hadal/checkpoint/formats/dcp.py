"""Writing of `torch.distributed.checkpoint` folders (DCP), as a stream of chunks.

The folder holds what `dcp.save({"model": ..., "optimizer": ...})` would write, with the names that
`get_model_state_dict` and `get_optimizer_state_dict` use, so that stock torch loads it without
Hadal, on any number of ranks. The key `hadal.training` holds the rest of Hadal's state.
"""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from hadal.checkpoint.contents import BUFFER, state_key
from hadal.checkpoint.export import Progress, fill, tied_names, untold, values_to_export
from hadal.checkpoint.files import system_errors, torch_save_errors
from hadal.checkpoint.formats.drafts import drafted_folder
from hadal.checkpoint.formats.registry import METADATA
from hadal.checkpoint.huggingface import Value
from hadal.checkpoint.plain import decoded, encoded
from hadal.checkpoint.source import Source
from hadal.checkpoint.storage import Location
from hadal.zero.boxes import rows_of

MODEL, OPTIMIZER = "model", "optimizer"
TRAINING = ("hadal", "training")
"""The path of Hadal's own entry."""
_CHUNK_NBYTES = 4 << 20

Path_ = tuple[str | int, ...]
"""The keys that lead to a value in the nested state dict."""


_Stored = tuple[list[Path_], Value]
"""A tensor to store, with all of its paths."""


def export_dcp(
    source: Source,
    folder: Location,
    *,
    dtype: torch.dtype | None = None,
    with_optimizer: bool = True,
    exclude_frozen: bool = False,
    max_file_nbytes: int = 5_000_000_000,
    progress: Progress = untold,
) -> list[Location]:
    """Write a checkpoint as a folder that `torch.distributed.checkpoint.load` reads.

    Weights have the given dtype; None: their exact values, in the masters' dtype if there are any.
    One chunk of at most 8 MiB (or one row) is in memory at a time. `progress` is called with the
    bytes of each. Returns the files, of at most `max_file_nbytes` and one chunk each.

    Raises:
        CheckpointError: the checkpoint cannot be read, or the files cannot be written.
    """
    stored = list(_tensors_of(source, dtype, with_optimizer, exclude_frozen))
    with drafted_folder(folder, METADATA) as draft:
        writer = _Writer(draft, max_file_nbytes, progress)
        try:
            for paths, value in stored:
                writer.add_tensor(source, paths, value)
            for path, single in _values_of(source, with_optimizer):
                writer.add_value(path, single)
            writer.finish()
        finally:
            writer.close()
        names = sorted(path.name for path in draft.iterdir())
    return [folder / name for name in names]


def nbytes_of_dcp(
    source: Source,
    dtype: torch.dtype | None = None,
    *,
    with_optimizer: bool = True,
    exclude_frozen: bool = False,
) -> int:
    """Return the number of bytes that an export reports to its `progress`."""
    stored = _tensors_of(source, dtype, with_optimizer, exclude_frozen)
    return sum(value.nbytes for _, value in stored)


def _tensors_of(
    source: Source, dtype: torch.dtype | None, with_optimizer: bool, exclude_frozen: bool
) -> Iterator[_Stored]:
    exported = values_to_export(
        source, dtype, exclude_frozen=exclude_frozen, is_exact=dtype is None
    )
    paths: dict[str, list[Path_]] = {value.name: [(MODEL, value.name)] for value in exported}
    for alias, name in tied_names(source, exported).items():
        paths[name].append((MODEL, alias))
    for value in exported:
        yield paths[value.name], value
    if with_optimizer:
        for (name, kind), entry in source.entries.items():
            key = state_key(kind)
            if key is not None:
                value = Value(name, entry.shape, entry.dtype, kind)
                yield [(OPTIMIZER, "state", name, key)], value


def _values_of(source: Source, with_optimizer: bool) -> Iterator[tuple[Path_, Any]]:
    """Yield all that is not per element, with its path."""
    if with_optimizer:
        for name, state in source.state.items():
            for key, value in state.items():
                yield (OPTIMIZER, "state", name, key), value
        for number, group in enumerate(source.groups):
            place = (OPTIMIZER, "param_groups", number)
            options = {**_defaults_of(source.optimizer), **dict(decoded(group.options))}
            for key, value in options.items():
                yield (*place, key), value
            yield (*place, "params"), list(group.names)
    yield TRAINING, _training_of(source, with_optimizer)


def _defaults_of(optimizer: str | None) -> dict[str, Any]:
    """Return the options of torch's optimizer of that name, which torch expects all to be there."""
    made = getattr(torch.optim, optimizer or "", None)
    if made is None:
        return {}
    try:
        group = made([torch.nn.Parameter(torch.zeros(1))]).param_groups[0]
    except (TypeError, ValueError):  # it needs more than parameters
        return {}
    return {key: value for key, value in group.items() if key != "params"}


def _training_of(source: Source, with_optimizer: bool) -> dict[str, Any]:
    """Return Hadal's own state: JSON, and the tensors in it."""
    tensors: dict[str, Tensor] = {}
    content = {
        "optimizer": source.optimizer if with_optimizer else None,
        "world_size": source.world_size,
        "buffers": [name for name, kind in source.entries if kind == BUFFER],
        "scalars": encoded(source.scalars, "the engine's state", tensors),
        "schedule": encoded(source.schedule, "the schedule", tensors),
        "client_state": encoded(source.client_state(), "client_state", tensors),
    }
    return {"json": json.dumps(content), "tensors": tensors}


class _Writer:
    """The files of one folder, written one after the other."""

    def __init__(self, folder: Path, max_file_nbytes: int, progress: Progress) -> None:
        # Importing them takes longer than all other imports together.
        from torch.distributed.checkpoint import filesystem, metadata

        self._made, self._info = metadata, filesystem._StorageInfo
        self._version = getattr(filesystem, "CURRENT_DCP_VERSION", None)
        self._folder, self._max_nbytes, self._progress = folder, max_file_nbytes, progress
        self._file: BinaryIO | None = None
        self._count = 0
        self._entries: dict[str, Any] = {}
        self._paths: dict[str, Path_] = {}
        self._places: dict[Any, Any] = {}

    def add_tensor(self, source: Source, paths: list[Path_], value: Value) -> None:
        """Store a tensor, chunk by chunk."""
        names = [self._enter(path) for path in paths]
        chunks = []
        limit = max(_CHUNK_NBYTES // value.dtype.itemsize, 1)
        for box in rows_of(value.name, value.shape, limit):
            # A copy: torch.save would write all of the storage that a view belongs to.
            chunk = torch.empty(box.numel, dtype=value.dtype)
            fill(chunk, source, value, box.start)
            place = self._store(chunk.view(box.sizes))
            offsets = torch.Size(box.offsets)
            chunks.append(self._made.ChunkStorageMetadata(offsets, torch.Size(box.sizes)))
            for name in names:
                self._places[self._made.MetadataIndex(name, offsets)] = place
            self._progress(box.numel * value.dtype.itemsize)
        for name in names:
            self._entries[name] = self._described(value.dtype, value.shape, chunks)

    def add_value(self, path: Path_, value: Any) -> None:
        """Store a value that is not per element."""
        name = self._enter(path)
        if isinstance(value, Tensor):
            value = value.detach().cpu().clone()
            origin = torch.Size([0] * value.dim())
            chunks = [self._made.ChunkStorageMetadata(origin, value.shape)]
            self._entries[name] = self._described(value.dtype, value.shape, chunks)
            self._places[self._made.MetadataIndex(name, origin)] = self._store(value)
        else:
            self._entries[name] = self._made.BytesStorageMetadata()
            self._places[self._made.MetadataIndex(name)] = self._store(value)

    def _described(self, dtype: torch.dtype, shape: tuple[int, ...], chunks: list[Any]) -> Any:
        properties = self._made.TensorProperties(dtype=dtype)
        return self._made.TensorStorageMetadata(properties, torch.Size(shape), chunks)

    def _enter(self, path: Path_) -> str:
        name = ".".join(map(str, path))
        self._paths[name] = path
        return name

    def _store(self, value: Any) -> Any:
        """Append a value to the current file; return its location."""
        nbytes = value.nbytes if isinstance(value, Tensor) else 0
        if self._file is not None and self._file.tell() + nbytes > self._max_nbytes:
            self.close()
        if self._file is None:
            self._name = f"__0_{self._count}.distcp"
            self._file = open(self._folder / self._name, "xb")  # noqa: SIM115 - closed by close
            self._count += 1
        offset = self._file.tell()
        with torch_save_errors(self._folder / self._name):
            torch.save(value, self._file)
        return self._info(self._name, offset, self._file.tell() - offset)

    def finish(self) -> None:
        """Write the index."""
        self.close()
        content = self._made.Metadata(self._entries, self._paths, self._places)
        content.storage_meta = self._made.StorageMeta()
        if self._version is not None:
            content.version = self._version
        with system_errors(self._folder, "written"):
            (self._folder / METADATA).write_bytes(pickle.dumps(content))

    def close(self) -> None:
        """Close the current file."""
        if self._file is not None:
            file, self._file = self._file, None
            with system_errors(self._folder / os.fspath(file.name), "written"):
                file.close()
