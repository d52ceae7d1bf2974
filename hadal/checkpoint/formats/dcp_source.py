"""A `torch.distributed.checkpoint` folder as a source of named values.

The model is what is under `model` (or at the top, if nothing is), the optimizer what is under
`optimizer` or `optim`, with state by parameter name as `get_optimizer_state_dict` gives it, or by
number as `optimizer.state_dict()` does.

Its files are read as data. The index is a pickle: its classes become stand-ins, and every other
name is refused, so that nothing of the file or of torch's own classes is run. The items are zip
files of `torch.save`, one behind the other.
"""

from __future__ import annotations

import io
import json
import pickle
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import prod
from types import MappingProxyType
from typing import Any, BinaryIO, NamedTuple, TypeVar

import torch
from torch import Tensor

from hadal.checkpoint.contents import BUFFER, WEIGHT, SavedGroup, state_kind
from hadal.checkpoint.deepspeed.pickles import Attributes, check_archive, path_text, short
from hadal.checkpoint.files import inside, nbytes_at, open_file, parsing_errors, read_small
from hadal.checkpoint.formats.dcp import MODEL, OPTIMIZER, TRAINING, Path_
from hadal.checkpoint.formats.registry import METADATA
from hadal.checkpoint.plain import decoded, encoded
from hadal.checkpoint.source import Entry, Source
from hadal.checkpoint.storage import Location, StoredFile
from hadal.errors import CheckpointError, NotBuiltYetError
from hadal.zero.boxes import Box

_T = TypeVar("_T")
_OPTIMIZERS = (OPTIMIZER, "optim")
_OPTIONS = frozenset({"foreach", "fused", "capturable", "differentiable"})
"""Options of an optimizer's implementation: those here stay."""
_LIMIT = 1 << 32
_BUFFER_NBYTES = 1 << 16
_NESTED_LIMIT = 1 << 16


class _StoredItem(NamedTuple):
    """The place of one stored value: a file, and bytes in it."""

    file: str
    offset: int
    length: int


class _StoredChunk(NamedTuple):
    """A part of a tensor, and its place."""

    box: Box
    item: _StoredItem


class _StoredTensor(NamedTuple):
    """A tensor in the folder."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    chunks: tuple[_StoredChunk, ...]


_Contents = tuple[Mapping[Path_, _StoredTensor], Mapping[Path_, _StoredItem]]
"""The tensors and the other values of a folder, by the keys that lead to each."""


class _Entries(dict[tuple[str, str], _T]):
    """Values by name and kind that also answer for a buffer by what is listed as a weight.

    Other libraries do not distinguish the two.
    """

    def __missing__(self, key: tuple[str, str]) -> _T:
        if key[1] != BUFFER:
            raise KeyError(key)
        return self[key[0], WEIGHT]

    def __contains__(self, key: Any) -> bool:
        return super().__contains__(key) or (
            key[1] == BUFFER and super().__contains__((key[0], WEIGHT))
        )


class DcpSource(Source):
    """A checkpoint that `torch.distributed.checkpoint.save` or an export wrote.

    Only the index and the values that are not tensors are read at first. `names` lists the
    parameters of each param group, for optimizer state that is stored by number.

    Raises:
        CheckpointError: the index is damaged, or names something not known to be harmless.
        NotBuiltYetError: the items were written through an extension.
    """

    writer = "torch.distributed.checkpoint"

    def __init__(
        self, folder: Location, names: Sequence[Sequence[str]] | None = None, part: int = 0
    ) -> None:
        self.path = folder
        self._tensors, self._items = _read_contents(folder)
        self._chunk: tuple[_StoredChunk, Tensor] | None = None
        with parsing_errors(f"{folder / METADATA} cannot be understood, or is damaged"):
            self._read(names)

    def _read(self, names: Sequence[Sequence[str]] | None) -> None:
        own = self._items.get(TRAINING)
        self._training = {} if own is None else self._own_state(own)
        self.world_size = self.ranks_of_part = int(self._training.get("world_size", 1))
        self.optimizer = self._training.get("optimizer")
        self.scalars = self._training.get("scalars")
        self.schedule = self._training.get("schedule")
        self._values = _Entries[_StoredTensor]()
        self._enter_model()
        self._enter_optimizer(names)
        self.aliases = self._aliases()
        self.entries = _Entries(
            {key: Entry(stored.shape, stored.dtype) for key, stored in self._values.items()}
        )
        rows = [(path.name, open_file(path).nbytes) for path in self.files]
        self.mark = f"{zlib.crc32(repr(rows).encode()):08x} {len(self.entries)}"

    def _own_state(self, item: _StoredItem) -> dict[str, Any]:
        stored = _read_item(self.path, item)
        content: dict[str, Any] = json.loads(stored["json"])
        for key in ("scalars", "schedule", "client_state"):
            content[key] = decoded(content[key], stored["tensors"])
        return content

    # ---- what there is ---------------------------------------------------------------------------

    def _enter_model(self) -> None:
        buffers = set(self._training.get("buffers", ()))
        root = self._root()
        for path, stored in self._tensors.items():
            if path[: len(root)] == root and path[len(root) :][:1] not in _BESIDE:
                name = ".".join(map(str, path[len(root) :]))
                self._values[name, BUFFER if name in buffers else WEIGHT] = stored

    def _root(self) -> Path_:
        """Return the keys that lead to the model: () if it is at the top."""
        for path in self._tensors:
            for depth in (0, 1):
                if len(path) > depth + 1 and path[depth] == MODEL:
                    return path[: depth + 1]
        return ()

    def _enter_optimizer(self, names: Sequence[Sequence[str]] | None) -> None:
        depth = max(len(self._root()) - 1, 0)
        head = self._root()[:depth]
        tensors = self._below(self._tensors, head)
        values = self._below(self._items, head)
        known = {name for name, kind in self._values if kind == WEIGHT}
        numbered = [name for group in names or () for name in group]
        self._lacks_names = False

        def called(given: str) -> str | None:
            """Return a parameter's name, which may be given by number; None if unknown."""
            if given in known or not given.isdigit():
                return given
            if int(given) < len(numbered):
                return numbered[int(given)]
            self._lacks_names = True
            return None

        state: dict[str, dict[str, Any]] = {}
        for path, stored in tensors.items():
            if (found := _state_place(path)) and (name := called(found[0])):
                if stored.shape:
                    self._values[name, state_kind(found[1])] = stored
                else:
                    value = _read_chunk(self.path, stored.chunks[0], stored.dtype)
                    state.setdefault(name, {})[found[1]] = value
        options: dict[int, dict[str, Any]] = {}
        for path, item in values.items():
            if (found := _state_place(path)) and (name := called(found[0])):
                state.setdefault(name, {})[found[1]] = _read_item(self.path, item)
            elif len(path) == 3 and path[0] == "param_groups":
                options.setdefault(int(path[1]), {})[str(path[2])] = _read_item(self.path, item)
        self.state = state
        self.groups = tuple(
            SavedGroup(
                encoded({k: v for k, v in group.items() if k not in _OPTIONS}, "a param group"),
                tuple(filter(None, (called(str(one)) for one in params))),
            )
            for group in (options[number] for number in sorted(options))
            if (params := group.pop("params", [])) is not None
        )

    def _below(self, found: Mapping[Path_, Any], head: Path_) -> dict[Path_, Any]:
        """Return what is under the optimizer, by the rest of its keys."""
        start = len(head) + 1
        return {
            path[start:]: value
            for path, value in found.items()
            if path[: len(head)] == head and len(path) > start and path[start - 1] in _OPTIMIZERS
        }

    def _aliases(self) -> dict[str, str]:
        """Return the names of parameters that share their items with another."""
        aliases: dict[str, str] = {}
        seen: dict[_StoredTensor, str] = {}
        for name, kind in list(self._values):
            stored = self._values[name, kind]
            if kind == WEIGHT and stored.chunks:
                first = seen.setdefault(stored, name)
                if first != name:
                    aliases[name] = first
                    del self._values[name, kind]
        return aliases

    def _all_items(self) -> Iterator[_StoredItem]:
        for stored in self._tensors.values():
            yield from (chunk.item for chunk in stored.chunks)
        yield from self._items.values()

    @property
    def files(self) -> Sequence[Location]:
        """All files of the checkpoint."""
        names = {METADATA, *(item.file for item in self._all_items())}
        return [inside(self.path, name) for name in sorted(names)]

    @property
    def notes(self) -> Sequence[str]:
        """Messages about state that a load does not restore."""
        notes = []
        if self.scalars is None:
            notes.append(
                "it holds no counters of Hadal: updates and samples are counted from here on"
            )
        notes.append(
            "it holds neither random generators nor positions in data: these stay as they are"
        )
        if self._lacks_names:
            notes.append(
                "its optimizer state is by number and not loaded, as it does not fit the parameters"
                " here; save get_optimizer_state_dict instead of optimizer.state_dict()"
            )
        return notes

    # ---- reading ---------------------------------------------------------------------------------

    def expect(self, name: str, kind: str, start: int, stop: int) -> None:
        """Check the range and that the files are there; `verify` checks the contents."""
        super().expect(name, kind, start, stop)
        stored = self._values[name, kind]
        ends: dict[str, int] = {}
        for chunk in stored.chunks:
            item = chunk.item
            ends[item.file] = max(ends.get(item.file, 0), item.offset + item.length)
        for file, end in ends.items():
            path = inside(self.path, file)
            if nbytes_at(path) < end:
                raise CheckpointError(f"{path} is damaged: it is missing, or shorter than expected")

    def read(self, name: str, kind: str, start: int, stop: int) -> Tensor:
        """Return elements of a value, as a copy; the last chunk is kept for the next call."""
        stored = self._values[name, kind]
        found = torch.empty(stop - start, dtype=stored.dtype)
        for chunk in stored.chunks:
            position = 0
            for low, high in chunk.box.runs():
                first, last = max(low, start), min(high, stop)
                if first < last:
                    place = position + first - low
                    flat = self._flat(chunk, stored.dtype)
                    found[first - start : last - start] = flat[place : place + last - first]
                elif low >= stop:
                    break
                position += high - low
        return found

    def _flat(self, chunk: _StoredChunk, dtype: torch.dtype) -> Tensor:
        if self._chunk is None or self._chunk[0] != chunk:
            self._chunk = None  # never two of them
            self._chunk = chunk, _read_chunk(self.path, chunk, dtype).reshape(-1)
        return self._chunk[1]

    def client_state(self) -> dict[str, Any]:
        """Return the caller's own values; {} if another library wrote the folder."""
        return dict(self._training.get("client_state") or {})

    def close(self) -> None:
        """Drop what was kept."""
        self._chunk = None

    def checks(self) -> Iterator[tuple[Callable[[], None], int]]:
        """Yield one check for all stored values: several of them are in each file."""
        yield self.verify, 0

    def verify(
        self, share: int = 0, shares: int = 1, *, spread: bool = True, room: int = 0
    ) -> None:
        """Compare every byte with the checksums: each `shares`-th stored value from `share` on."""
        for item in sorted(set(self._all_items()))[share::shares]:
            with _opened(self.path, item) as file:
                check_archive(file, f"{self.path / item.file} is damaged at byte {item.offset}")


_BESIDE = ((OPTIMIZER,), ("optim",), (TRAINING[0],))
"""Keys at the top that are not the model's."""


def _state_place(path: Path_) -> tuple[str, str] | None:
    """Return the parameter and key of a value of the optimizer's state; None: it is no state."""
    if len(path) == 3 and path[0] == "state":
        return str(path[1]), str(path[2])
    # With flatten_optimizer_state_dict they are one word.
    if len(path) == 1 and str(path[0]).startswith("state."):
        name, _, key = str(path[0]).removeprefix("state.").rpartition(".")
        return name, key
    return None


# ---- files ---------------------------------------------------------------------------------------


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


class _Unpickler(pickle._Unpickler):
    """torch's index as data. Nested tuples must be small: one that contains another twice, and so
    on, has few bytes, but the time to hash or show it doubles at each level.

    In Python, because that of C cannot be stopped while it hashes; it takes a third longer.
    """

    stack: list[Any]

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        # Tuples in tuples: each with the number of values in it, counted as often as they occur.
        self._nested: dict[int, tuple[tuple[Any, ...], int]] = {}

    def _check(self) -> None:
        made = self.stack[-1]
        inner = [one for one in made if isinstance(one, tuple)]
        if inner:
            numel = len(made) + sum(self._nested.get(id(one), (one, len(one)))[1] for one in inner)
            if numel > _NESTED_LIMIT:
                raise pickle.UnpicklingError(f"it nests tuples of over {_NESTED_LIMIT} values")
            self._nested[id(made)] = made, numel

    def find_class(self, module: str, name: str) -> Any:
        """Return the stand-in for a name, or the dtype of that name."""
        found = _STAND_INS.get(f"{module}.{name}")
        if found is None and module == "torch":
            found = getattr(torch, name, None)
            found = found if isinstance(found, torch.dtype) else None
        if found is None:
            raise pickle.UnpicklingError(f"it names {module}.{name}")
        return found


def _checked(load: Callable[[Any], None]) -> Callable[[Any], None]:
    def checked(unpickler: Any) -> None:
        load(unpickler)
        unpickler._check()

    return checked


_Unpickler.dispatch = {
    code: _checked(load)
    if code in pickle.TUPLE + pickle.TUPLE1 + pickle.TUPLE2 + pickle.TUPLE3
    else load
    for code, load in pickle._Unpickler.dispatch.items()
}


def _read_contents(folder: Location) -> _Contents:
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


def _understood(index: Any, folder: Location) -> _Contents:
    tensors: dict[Path_, _StoredTensor] = {}
    values: dict[Path_, _StoredItem] = {}
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
            _StoredChunk(
                Box("", tuple(entry.size), tuple(one.offsets), tuple(one.sizes)),
                items[name, one.offsets],
            )
            for one in entry.chunks
        )
        stored = _StoredTensor(tuple(entry.size), entry.properties.state[0], chunks)
        if sum(one.box.numel for one in chunks) != prod(stored.shape):
            raise ValueError(f"the chunks of {name} are not all of it")
        tensors[path] = stored
    return tensors, values


def _item(info: Any, folder: Location) -> _StoredItem:
    if getattr(info, "transform_descriptors", None):
        raise NotBuiltYetError(
            f"{folder} was written through {info.transform_descriptors}, which is not supported"
            " yet; load it with torch and save it without extensions"
        )
    return _StoredItem(str(info.relative_path), int(info.offset), int(info.length))


def _read_item(folder: Location, item: _StoredItem) -> Any:
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


def _read_chunk(folder: Location, chunk: _StoredChunk, dtype: torch.dtype) -> Tensor:
    """Return a part of a tensor, in the shape of its box.

    Raises:
        CheckpointError: it cannot be read, or is damaged.
    """
    found = _read_item(folder, chunk.item)
    fits = isinstance(found, Tensor) and found.dtype == dtype and found.layout == torch.strided
    if not fits or tuple(found.shape) != chunk.box.sizes:
        raise CheckpointError(
            f"{folder / chunk.item.file} is damaged at byte {chunk.item.offset}: expected a tensor"
            f" of {dtype} of shape {chunk.box.sizes}, as the index says"
        )
    whole: Tensor = found
    return whole


@contextmanager
def _opened(folder: Location, item: _StoredItem) -> Iterator[BinaryIO]:
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
