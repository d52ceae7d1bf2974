"""Hadal's own checkpoints as a `Source`: the index maps values to ranges of the rank files."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from copy import copy
from functools import partial
from itertools import pairwise
from math import prod
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hadal.checkpoint.contents import MASTER, ModelPart, SavedSlice, Single, part_of_json, state_key
from hadal.checkpoint.files import Seal, check_file, exists, open_file, parsing_errors
from hadal.checkpoint.folders import CLIENT, JOBS, rank_file
from hadal.checkpoint.index import INDEX, mark_in, read_index, seals_of, strict_json
from hadal.checkpoint.plain import decoded, decoded_state
from hadal.checkpoint.shards import DTYPE_OF, DTYPES, Header, HeaderRow, read_header
from hadal.checkpoint.source import OWN, Entry, RankState, Source
from hadal.checkpoint.storage import Location, StoredFile
from hadal.device.memory import is_host_memory
from hadal.errors import CheckpointError
from hadal.offload.buffers import memory_of
from hadal.offload.direct import Kept
from hadal.zero.layout import Slot
from hadal.zero.views import shaped

_START = attrgetter("start")


class _Dtypes(NamedTuple):
    """The dtype of a tensor in its file, and the one that its values are rounded to first."""

    stored: torch.dtype
    rounded: torch.dtype


class _SavedFiles:
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

    def fill(self, out: Tensor, name: str, tensor: str, start: int, dtypes: _Dtypes) -> None:
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
        self.fill(found.view(-1), name, tensor, 0, _Dtypes(dtype, dtype))
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


class StoredSource(Source):
    """A checkpoint that `save_checkpoint` wrote, or one model-parallel part of it.

    Only the index is read at first; a file's size and header are checked when it is first needed,
    and all its bytes by `verify`.

    `content` is that of the index, if it is not written yet.

    Raises:
        CheckpointError: the index is missing, damaged, or inconsistent.
    """

    writer = "Hadal"

    def __init__(
        self,
        folder: Location,
        part: int = 0,
        names: Sequence[Sequence[str]] | None = None,
        content: dict[str, Any] | None = None,
    ) -> None:
        self.path = folder
        content = read_index(folder) if content is None else content
        with self._reading_index():
            self._read(content)
            self._choose(part)

    def of_part(self, part: int) -> StoredSource:
        """Return another part of the same checkpoint, which shares its open files."""
        other = copy(self)
        with other._reading_index():
            other._choose(part)
        return other

    def _reading_index(self) -> AbstractContextManager[None]:
        return parsing_errors(f"{self.path / INDEX} is damaged")

    def _read(self, content: dict[str, Any]) -> None:
        parts = [part_of_json(row) for row in content["parts"]]
        ranks = sorted({rank for one in parts for rank in one.ranks})
        self._parts = parts
        self.world_size, self.parts = content["world_size"], len(parts)
        self.ranks_of_part = len(parts[0].ranks)
        if ranks != list(range(len(ranks))) or len(ranks) != self.world_size or not ranks:
            raise ValueError(f"world_size is {self.world_size!r}, but the ranks are {ranks[:8]}")
        names = [rank_file(rank) for rank in ranks]
        has_client = CLIENT in content["files"]
        seals = seals_of(content, names + [CLIENT] * has_client, self.path / INDEX)
        self.mark = str(content["save"])
        home = self.path / mark_in(content)
        self._files = _SavedFiles(home, seals, frozenset(map(str, content["here"])))
        self.jobs = tuple(map(str, content[JOBS]))
        self.stage = int(content["stage"])
        self.saved_at = float(content["saved_at"])
        self.optimizer = content["optimizer"]
        self.scalars = decoded(content["scalars"])
        self.schedule = decoded(content["schedule"])
        self._client = content["client_state"]

    def _choose(self, part: int) -> None:
        parts = self._parts
        if not 0 <= part < len(parts):
            raise CheckpointError(
                f"{self.path} holds a model in {len(parts)} model-parallel parts, but part {part}"
                " is requested; load it with the model-parallel size that saved it"
            )
        self.part: ModelPart = parts[part]
        self.groups = self.part.groups
        self.aliases = self.part.aliases
        self.placements = self.part.placements
        self.state = {
            name: {key: decoded_state(value) for key, value in values.items()}
            for name, values in self.part.state.items()
        }
        # The latest value that was not saved in row-major order, with its (name, kind).
        self._in_rows: tuple[tuple[str, str], Tensor] | None = None
        self._runs: dict[tuple[str, int], list[SavedSlice]] = {}
        self._bucket_like = {
            _layout_of(bucket.slots): number for number, bucket in enumerate(self.part.buckets)
        }
        self._place: dict[tuple[str, str], tuple[int, Slot] | Single] = {}
        self.entries: dict[tuple[str, str], Entry] = {}
        for one in self.part.singles:
            if one.rank is not None and one.rank >= len(self.part.ranks):
                raise ValueError(f"{one.tensor} is on rank {one.rank}")
            self._enter(one.name, one.kind, Entry(one.shape, one.dtype), one)
        self._enter_slices()
        self.unknown = self.part.unknown

    # ---- what there is ---------------------------------------------------------------------------

    def _enter(self, name: str, kind: str, entry: Entry, place: tuple[int, Slot] | Single) -> None:
        if (name, kind) in self.entries:
            raise ValueError(f"{kind} of {name} is listed twice")
        self.entries[name, kind] = entry
        self._place[name, kind] = place

    def _enter_slices(self) -> None:
        for one in self.part.slices:
            if not 0 < one.holders <= len(self.part.ranks) - one.rank:
                raise ValueError(f"{one.tensor} is on rank {one.rank + max(one.holders, 1) - 1}")
            self._runs.setdefault((one.kind, one.bucket), []).append(one)
        self._expect_masters()
        for (kind, number), run in self._runs.items():
            run.sort(key=_START)
            if run[-1].stop > self.part.buckets[number].numel:
                raise ValueError(f"{kind} of bucket {number} is longer than the bucket")
            if any(one.stop > after.start for one, after in pairwise(run)):
                raise ValueError(f"{kind} of bucket {number} is listed twice")
            for slot in self.part.buckets[number].slots:
                found = _overlapping(run, slot.offset, slot.stop)
                covered = sum(
                    min(one.stop, slot.stop) - max(one.start, slot.offset) for one in found
                )
                if covered == slot.numel and (covered or kind in ("weight", "master")):
                    is_rounded = bool(found) and all(one.rounds for one in found)
                    entry = Entry(slot.shape, run[0].dtype, is_rounded)
                    self._enter(slot.name, kind, entry, (number, slot))
                elif covered:
                    raise ValueError(
                        f"{kind} of {slot.name} has {covered} elements of {slot.numel}"
                    )

    def _expect_masters(self) -> None:
        """Check that the index lists the masters that weights are the rounding of."""
        for one in self.part.slices:
            masters = self._runs.get((MASTER, one.bucket), ())
            if one.rounds and not any(
                (known.numel, known.dtype) == (one.numel, one.rounds)
                and known.start - one.start == one.numel * (known.rank - one.rank)
                and known.start <= one.start
                and one.stop <= known.stop
                for known in masters
            ):
                raise ValueError(f"{one.tensor}, the masters of rounded weights, is not listed")

    # ---- reading ---------------------------------------------------------------------------------

    def expect(self, name: str, kind: str, start: int, stop: int) -> None:
        """Check by the files' headers that the elements can be read."""
        super().expect(name, kind, start, stop)
        place = self._place[name, kind]
        if not isinstance(place, Single):
            number, slot = place
            low, high = (0, slot.numel) if slot.is_reordered else (start, stop)
            self._expect_run(kind, number, slot.offset + low, slot.offset + high)
        elif start < stop:
            self._files.expect(self._file_of(place.rank or 0), place.tensor, place.dtype)

    def read(self, name: str, kind: str, start: int, stop: int) -> Tensor:
        """Return elements of a value, in host memory.

        A value that was not saved in row-major order is read whole, and kept until the next one.
        """
        super().expect(name, kind, start, stop)
        place = self._place[name, kind]
        if isinstance(place, Single) or not place[1].is_reordered:
            return self._read_as_stored(name, kind, start, stop)
        if self._in_rows is None or self._in_rows[0] != (name, kind):
            self._in_rows = None  # never two of them
            whole = shaped(self._read_as_stored(name, kind, 0, place[1].numel), place[1])
            self._in_rows = (name, kind), whole.reshape(-1)
        return self._in_rows[1][start:stop]

    def _read_as_stored(self, name: str, kind: str, start: int, stop: int) -> Tensor:
        """Return elements of a value, in the order of the file."""
        place, dtype = self._place[name, kind], self.entries[name, kind].dtype
        found = torch.empty(stop - start, dtype=dtype)
        if isinstance(place, Single):
            path = self._file_of(place.rank or 0)
            self._files.fill(found, path, place.tensor, start, _Dtypes(dtype, dtype))
        else:
            self._read_run(kind, place[0], place[1].offset + start, found)
        return found

    def read_own(self, name: str, kind: str, rank: int) -> Tensor:
        """Return a whole value in its shape; if each rank has its own, that of `rank`."""
        place = self._place[name, kind]
        if not isinstance(place, Single):
            return super().read_own(name, kind, rank)
        holder = rank if place.rank is None else place.rank
        path = self._file_of(holder % len(self.part.ranks))
        self._files.expect(path, place.tensor, place.dtype, place.shape)
        return self._files.whole(path, place.tensor)

    def has_slice(self, kind: str, slots: Sequence[Slot], start: int, stop: int) -> bool:
        """Return whether a bucket with the layout `slots` was saved; check its files' headers."""
        number = self._bucket_like.get(_layout_of(slots))
        needed = (slot for slot in slots if max(slot.offset, start) < min(slot.stop, stop))
        if number is None or (kind, number) not in self._runs:
            return False
        if any((slot.name, kind) not in self.entries for slot in needed):
            return False
        self._expect_run(kind, number, start, stop)
        return True

    def read_slice(self, kind: str, slots: Sequence[Slot], start: int, out: Tensor) -> None:
        """Read elements of a saved bucket into `out`, directly if dtype and device allow."""
        self._read_run(kind, self._bucket_like[_layout_of(slots)], start, out)

    def take_slice(self, kind: str, slots: Sequence[Slot], start: int, stop: int) -> Tensor | None:
        """Return the elements that `verify` kept, if they are one rank's whole slice."""
        for one in self._between(kind, self._bucket_like[_layout_of(slots)], start, stop):
            if (one.start, one.stop) == (start, stop):
                name = self._file_of(one.rank)
                found = self._files.taken(name, self._extent_of(name, one))
                return None if found is None else found.view(one.dtype)
        return None

    def _between(self, kind: str, number: int, start: int, stop: int) -> Iterator[SavedSlice]:
        return slices_between(self._runs.get((kind, number), ()), start, stop)

    def _expect_run(self, kind: str, number: int, start: int, stop: int) -> None:
        """Check by the files' headers that elements of a bucket can be read."""
        for one in self._between(kind, number, start, stop):
            self._files.expect(self._file_of(one.rank), one.tensor, one.stored, (one.numel,))

    def _read_run(self, kind: str, number: int, start: int, out: Tensor) -> None:
        """Read elements of a bucket into `out`; zeros where it has none."""
        done, stop = start, start + out.numel()
        for one in self._between(kind, number, start, stop):
            first, last = max(one.start, start), min(one.stop, stop)
            out[done - start : first - start].zero_()
            part, dtypes = out[first - start : last - start], _Dtypes(one.stored, one.dtype)
            self._files.fill(part, self._file_of(one.rank), one.tensor, first - one.start, dtypes)
            done = last
        out[done - start :].zero_()

    def _file_of(self, rank: int) -> str:
        """Return the name of the file of a rank of the part."""
        return rank_file(self.part.ranks[rank])

    def _extent_of(self, name: str, one: SavedSlice) -> tuple[int, int]:
        """Return the (start, stop) of the bytes of one rank's slice in its file."""
        row = self._files.expect(name, one.tensor, one.stored, (one.numel,))
        return row.begin, row.stop

    def _remembered(self, name: str) -> Iterator[tuple[int, int]]:
        """Yield the (start, stop) of the bytes of a file that hold optimizer state of buckets."""
        rows = self._files.header(name).rows
        for several in self.part.slices:
            if state_key(several.kind) is not None:
                for one in several.between(several.start, several.stop):
                    if self._file_of(one.rank) == name and one.tensor in rows:
                        yield self._extent_of(name, one)

    def own(self, rank: int) -> RankState | None:
        """Return a rank's random generators, loader position and modules' extra state."""
        path = self._file_of(rank % len(self.part.ranks))
        with self._files.reading(path):
            header = self._files.header(path)
            saved = strict_json(header.texts[OWN], self._files.home / path)
            tensors = _LazyTensors(partial(self._files.whole, path))
            values = [saved[key] for key in ("loader", "random", "extra", "exchange")]
            return RankState(*(decoded(value, tensors) for value in values))

    def client_state(self) -> dict[str, Any]:
        """Return the caller's own values."""
        with self._reading_index():
            return dict(decoded(self._client, _LazyTensors(partial(self._files.whole, CLIENT))))

    # ---- files -----------------------------------------------------------------------------------

    @property
    def files(self) -> Sequence[Location]:
        """The files of all ranks."""
        return [self._files.home / name for name in self._files.seals]

    def checks(self) -> Iterator[tuple[Callable[[], None], int]]:
        """Yield the comparison of each file with its checksum."""
        for name, seal in self._files.seals.items():
            yield partial(check_file, self._files.home / name, seal, whole=True), seal.nbytes

    def verify(
        self, share: int = 0, shares: int = 1, *, spread: bool = True, room: int = 0
    ) -> None:
        """Verify files, or those used so far if not `spread`."""
        # The rank files first: at the same world size each rank verifies its own.
        names = sorted(self._files.seals, key=lambda name: (name == CLIENT, name))[share::shares]
        if not spread:
            names = sorted(self._files.used)
        for name in names:
            self._files.use(name)
            with self._files.reading(name):
                apart = [*self._remembered(name)]
            room = self._files.verify(name, room, apart)

    def close(self) -> None:
        """Free the bytes that were kept."""
        self._files.close()
        self._in_rows = None


class _LazyTensors(dict[str, Tensor]):
    """The tensors of a file, each read on access."""

    def __init__(self, read: Callable[[str], Tensor]) -> None:
        super().__init__()
        self._read = read

    def __missing__(self, name: str) -> Tensor:
        return self._read(name)


def _overlapping(run: Sequence[SavedSlice], low: int, high: int) -> list[SavedSlice]:
    """Return the slices, from a list sorted by start, that have elements in [low, high)."""
    first = max(bisect_right(run, low, key=_START) - 1, 0)
    found = run[first : max(bisect_left(run, high, key=_START), first)]
    return [one for one in found if max(one.start, low) < min(one.stop, high)]


def slices_between(run: Sequence[SavedSlice], low: int, high: int) -> Iterator[SavedSlice]:
    """Yield the same of single ranks."""
    for several in _overlapping(run, low, high):
        yield from several.between(low, high)


def _layout_of(slots: Sequence[Slot]) -> tuple[tuple[Any, ...], ...]:
    orders = (slot.order if slot.is_reordered else () for slot in slots)
    return tuple((s.name, s.shape, s.offset, order) for s, order in zip(slots, orders, strict=True))
