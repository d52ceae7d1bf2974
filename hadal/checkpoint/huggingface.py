"""Writing of weights in the Hugging Face layout, as a stream of chunks.

One `model.safetensors`, or `model-00001-of-00003.safetensors` and so on with
`model.safetensors.index.json`. Tied parameters are written once; the header lists their other
names, as `safetensors.torch.load_model` reads them.
"""

from __future__ import annotations

import json
import os
import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import chain
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hadal.checkpoint.contents import WEIGHT
from hadal.checkpoint.files import (
    copy_file,
    items_of,
    new_mark,
    open_new,
    storage_of,
    system_errors,
    write_file,
)
from hadal.checkpoint.shards import bytes_of, header_of
from hadal.checkpoint.storage import Location, draft_of, sync_folder
from hadal.errors import CheckpointError


class Value(NamedTuple):
    """The name, shape and dtype of a tensor to write."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    kind: str = WEIGHT
    """The kind of the saved value that it is read from."""

    @property
    def numel(self) -> int:
        """The number of elements."""
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        """The number of bytes."""
        return self.numel * self.dtype.itemsize


def shards_of(values: Sequence[Value], max_shard_nbytes: int) -> list[list[Value]]:
    """Distribute values over files of at most that size; a larger value gets its own file."""
    shards: list[list[Value]] = [[]]
    nbytes = 0
    for value in values:
        if shards[-1] and nbytes + value.nbytes > max_shard_nbytes:
            shards.append([])
            nbytes = 0
        shards[-1].append(value)
        nbytes += value.nbytes
    return shards


def names_of(filename: str, count: int) -> list[str]:
    """Return the file names: `filename` itself, or one name per shard."""
    if count == 1:
        return [filename]
    stem, ending = os.path.splitext(filename)
    return [f"{stem}-{number:05d}-of-{count:05d}{ending}" for number in range(1, count + 1)]


def write_model(
    folder: Location,
    filename: str,
    values: Sequence[Value],
    cuts: Iterator[Tensor],
    aliases: Mapping[str, str],
    max_shard_nbytes: int,
) -> list[Location]:
    """Write values into `folder`, replacing files of an earlier export.

    `cuts` yields the elements of all values in order, in tensors that never span two values; they
    are requested as they are written. If `filename` does not end in `.safetensors`, `torch.save`
    writes whole values.

    On this machine the files are renamed once all are written. Behind a URL each is uploaded as it
    is written, after those of an earlier export were removed; an index of several comes last.

    Raises:
        CheckpointError: a file cannot be written.
    """
    shards = shards_of(values, max_shard_nbytes)
    names = names_of(filename, len(shards))
    mark = new_mark()
    is_safe = filename.endswith(".safetensors")
    write = _write_safetensors if is_safe else _write_pickle
    drafts: list[Location] = [folder / name for name in names]
    if isinstance(folder, Path):
        drafts = [draft_of(folder / name, mark) for name in names]
        with system_errors(folder, "written"):
            folder.mkdir(parents=True, exist_ok=True)
    else:
        _remove_earlier(folder, filename)
    try:
        for draft, shard in zip(drafts, shards, strict=True):
            kept = {value.name for value in shard}
            write(draft, shard, cuts, {a: name for a, name in aliases.items() if name in kept})
        if len(shards) > 1:
            shared = aliases if not is_safe else {}
            text = _index(shards, names, shared)
            # The last to be renamed: shards without it are not taken for a model.
            place = folder / f"{filename}.index.json"
            names.append(place.name)
            drafts.append(draft_of(place, mark) if isinstance(place, Path) else place)
            write_file(drafts[-1], [text.encode()])
        if isinstance(folder, Path):
            _remove_earlier(folder, filename)
            with system_errors(folder, "written"):
                for draft, name in zip(drafts, names, strict=True):
                    os.replace(str(draft), folder / name)
                sync_folder(folder)
    except BaseException:
        for draft in reversed(drafts):
            with suppress(OSError):
                storage_of(draft).remove(draft)
        raise
    return [folder / name for name in names[: len(shards)]]


def _index(shards: Sequence[Sequence[Value]], names: Sequence[str], aliases: Any) -> str:
    places = {
        value.name: name for name, shard in zip(names, shards, strict=True) for value in shard
    }
    places |= {alias: places[name] for alias, name in aliases.items() if name in places}
    total = sum(value.nbytes for shard in shards for value in shard)
    content = {"metadata": {"total_size": total}, "weight_map": dict(sorted(places.items()))}
    return json.dumps(content, indent=2) + "\n"


def _remove_earlier(folder: Location, filename: str) -> None:
    """Remove the files of an earlier export of the same name, its index first."""
    stem, ending = os.path.splitext(filename)
    own = re.compile(rf"{re.escape(stem)}(-\d{{5}}-of-\d{{5}})?{re.escape(ending)}(\.index\.json)?")
    names = [item.name for item in items_of(folder) if own.fullmatch(item.name)]
    with system_errors(folder, "written"):
        for name in sorted(names, key=lambda name: not name.endswith(".index.json")):
            storage_of(folder).remove(folder / name)


def _write_safetensors(
    path: Location, shard: Sequence[Value], cuts: Iterator[Tensor], aliases: Mapping[str, str]
) -> None:
    header = header_of(
        path,
        [(value.name, value.shape, value.dtype) for value in shard],
        {"format": "pt", **aliases},
    )
    chunks = (bytes_of(cut.reshape(-1)) for value in shard for cut in _cuts_of(value, cuts))
    write_file(path, chain([header], chunks))


def _cuts_of(value: Value, cuts: Iterator[Tensor]) -> Iterator[Tensor]:
    left = value.numel
    while left > 0:
        cut = next(cuts)
        left -= cut.numel()
        if left < 0 or cut.dtype != value.dtype:
            raise CheckpointError(
                f"{value.name} must be written as {value.numel} elements of {value.dtype}, but a"
                f" chunk of {cut.numel()} elements of {cut.dtype} leaves {left}"
            )
        yield cut


def _write_pickle(
    path: Location, shard: Sequence[Value], cuts: Iterator[Tensor], aliases: Mapping[str, str]
) -> None:
    state = {}
    for value in shard:
        whole = torch.empty(value.numel, dtype=value.dtype)
        start = 0
        for cut in _cuts_of(value, cuts):
            whole[start : start + cut.numel()].copy_(cut.reshape(-1))
            start += cut.numel()
        state[value.name] = whole.view(value.shape)
    state |= {alias: state[name] for alias, name in aliases.items()}
    if isinstance(path, Path):
        with open_new(path) as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        return
    with tempfile.TemporaryDirectory(prefix="hadal-") as folder:
        draft = Path(folder, path.name)
        with open_new(draft) as file:
            torch.save(state, file)
        state.clear()
        copy_file(draft, path)
