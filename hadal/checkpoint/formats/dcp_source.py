"""A `torch.distributed.checkpoint` folder as a source of named values.

The model is what is under `model` (or at the top, if nothing is), the optimizer what is under
`optimizer` or `optim`, with state by parameter name as `get_optimizer_state_dict` gives it, or by
number as `optimizer.state_dict()` does.

Tests: tests/checkpoint/test_dcp.py
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from hadal.checkpoint.contents import BUFFER, WEIGHT, SavedGroup, state_kind
from hadal.checkpoint.files import nbytes_at, open_file, parsing_errors
from hadal.checkpoint.formats.dcp import METADATA, MODEL, OPTIMIZER, TRAINING, Path_
from hadal.checkpoint.formats.dcp_files import (
    StoredChunk,
    StoredItem,
    StoredTensor,
    check_item,
    read_chunk,
    read_contents,
    read_item,
)
from hadal.checkpoint.plain import decoded, encoded
from hadal.checkpoint.source import Entry, Source
from hadal.checkpoint.storage import Location
from hadal.errors import CheckpointError

_T = TypeVar("_T")
_OPTIMIZERS = (OPTIMIZER, "optim")
_OPTIONS = frozenset({"foreach", "fused", "capturable", "differentiable"})
"""Options of an optimizer's implementation: those here stay."""


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

    def __init__(self, folder: Location, names: Sequence[Sequence[str]] | None = None) -> None:
        self.path = folder
        self._contents = read_contents(folder)
        self._chunk: tuple[StoredChunk, Tensor] | None = None
        with parsing_errors(f"{folder / METADATA} cannot be understood, or is damaged"):
            self._read(names)

    def _read(self, names: Sequence[Sequence[str]] | None) -> None:
        own = self._contents.values.get(TRAINING)
        self._training = {} if own is None else self._own_state(own)
        self.world_size = self.ranks_of_part = int(self._training.get("world_size", 1))
        self.optimizer = self._training.get("optimizer")
        self.scalars = self._training.get("scalars")
        self.schedule = self._training.get("schedule")
        self._values = _Entries[StoredTensor]()
        self._enter_model()
        self._enter_optimizer(names)
        self.aliases = self._aliases()
        self.entries = _Entries(
            {key: Entry(stored.shape, stored.dtype) for key, stored in self._values.items()}
        )
        rows = [(name, open_file(self.path / name).nbytes) for name in sorted(self._names())]
        self.mark = f"{zlib.crc32(repr(rows).encode()):08x} {len(self.entries)}"

    def _own_state(self, item: StoredItem) -> dict[str, Any]:
        stored = read_item(self.path, item)
        content: dict[str, Any] = json.loads(stored["json"])
        for key in ("scalars", "schedule", "client_state"):
            content[key] = decoded(content[key], stored["tensors"])
        return content

    # ---- what there is ---------------------------------------------------------------------------

    def _enter_model(self) -> None:
        buffers = set(self._training.get("buffers", ()))
        root = self._root()
        for path, stored in self._contents.tensors.items():
            if path[: len(root)] == root and path[len(root) :][:1] not in _BESIDE:
                name = ".".join(map(str, path[len(root) :]))
                self._values[name, BUFFER if name in buffers else WEIGHT] = stored

    def _root(self) -> Path_:
        """Return the keys that lead to the model: () if it is at the top."""
        for path in self._contents.tensors:
            for depth in (0, 1):
                if len(path) > depth + 1 and path[depth] == MODEL:
                    return path[: depth + 1]
        return ()

    def _enter_optimizer(self, names: Sequence[Sequence[str]] | None) -> None:
        depth = max(len(self._root()) - 1, 0)
        head = self._root()[:depth]
        tensors = self._below(self._contents.tensors, head)
        values = self._below(self._contents.values, head)
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
                    value = read_chunk(self.path, stored.chunks[0], stored.dtype)
                    state.setdefault(name, {})[found[1]] = value
        options: dict[int, dict[str, Any]] = {}
        for path, item in values.items():
            if (found := _state_place(path)) and (name := called(found[0])):
                state.setdefault(name, {})[found[1]] = read_item(self.path, item)
            elif len(path) == 3 and path[0] == "param_groups":
                options.setdefault(int(path[1]), {})[str(path[2])] = read_item(self.path, item)
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
        seen: dict[StoredTensor, str] = {}
        for name, kind in list(self._values):
            stored = self._values[name, kind]
            if kind == WEIGHT and stored.chunks:
                first = seen.setdefault(stored, name)
                if first != name:
                    aliases[name] = first
                    del self._values[name, kind]
        return aliases

    def _names(self) -> set[str]:
        return {METADATA, *(item.file for item in self._items())}

    def _items(self) -> Iterator[StoredItem]:
        for stored in self._contents.tensors.values():
            yield from (chunk.item for chunk in stored.chunks)
        yield from self._contents.values.values()

    @property
    def files(self) -> Sequence[Location]:
        """All files of the checkpoint."""
        return [self.path / name for name in sorted(self._names())]

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
            path = self.path / file
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

    def _flat(self, chunk: StoredChunk, dtype: torch.dtype) -> Tensor:
        if self._chunk is None or self._chunk[0] != chunk:
            self._chunk = None  # never two of them
            self._chunk = chunk, read_chunk(self.path, chunk, dtype).reshape(-1)
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
        for item in sorted(set(self._items()))[share::shares]:
            check_item(self.path, item)


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
