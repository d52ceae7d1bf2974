"""Hadal's own checkpoints as a `Source`: the index maps values to ranges of the rank files.

Tests: tests/checkpoint/test_loading.py, tests/checkpoint/test_reshard.py
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from copy import copy
from functools import partial
from itertools import pairwise
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hadal.checkpoint.contents import (
    MASTER,
    ModelPart,
    SavedGroup,
    SavedSlice,
    Single,
    part_of_json,
    state_key,
)
from hadal.checkpoint.files import parsing_errors
from hadal.checkpoint.folders import CLIENT, rank_file
from hadal.checkpoint.index import INDEX, mark_in, read_index, seals_of, strict_json
from hadal.checkpoint.keep import JOBS
from hadal.checkpoint.plain import decoded, decoded_state
from hadal.checkpoint.shards import read_tensors
from hadal.checkpoint.source import OWN, Entry, RankState
from hadal.checkpoint.storage import Location
from hadal.checkpoint.stored_files import Dtypes, SavedFiles
from hadal.errors import CheckpointError
from hadal.zero.layout import Slot
from hadal.zero.views import shaped


class _Chunk(NamedTuple):
    """A part of a value in a stored tensor: element `start` of the value is at `offset`."""

    start: int
    numel: int
    rank: int
    tensor: str
    offset: int
    stored: torch.dtype
    """The stored dtype: the master's if the value is its rounding."""


class Cut(NamedTuple):
    """Consecutive elements to read from one chunk."""

    chunk: int
    """The chunk's number."""
    start: int
    """The first element, counted from the chunk's start."""
    target: int
    """The first element's position in the requested range."""
    numel: int


def cuts_of(chunks: Sequence[tuple[int, int]], start: int, stop: int) -> list[Cut]:
    """Return the cuts that make up elements [start, stop); a chunk is (start, numel)."""
    cuts = []
    for number, (first, numel) in enumerate(chunks):
        low, high = max(first, start), min(first + numel, stop)
        if low < high:
            cuts.append(Cut(number, low - first, low - start, high - low))
    return cuts


class StoredSource:
    """A checkpoint that `save_checkpoint` wrote, or one model-parallel part of it.

    Only the index is read at first; a file's size and header are checked when it is first needed,
    and all its bytes by `verify`.

    Raises:
        CheckpointError: the index is missing, damaged, or inconsistent.
    """

    notes: Sequence[str] = ()

    def __init__(self, folder: Location, part: int = 0) -> None:
        self.path = folder
        content = read_index(folder)
        with self._reading_index():
            self._read(content)
            self._choose(part)

    def of_part(self, part: int) -> StoredSource:
        """Return another part of the same checkpoint, which shares its open files.

        Raises:
            CheckpointError: there is no such part, or the index is inconsistent.
        """
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
        mark = mark_in(content)
        home = self.path if mark is None else self.path / mark
        self._files = SavedFiles(home, seals, frozenset(map(str, content["here"])))
        self.jobs = tuple(map(str, content.get(JOBS, ())))
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
        self.groups: Sequence[SavedGroup] = self.part.groups
        self.aliases: Mapping[str, str] = self.part.aliases
        self.state: Mapping[str, Mapping[str, Any]] = {
            name: {key: decoded_state(value) for key, value in values.items()}
            for name, values in self.part.state.items()
        }
        # The latest value that was not saved in row-major order, with its (name, kind).
        self._in_rows: tuple[tuple[str, str], Tensor] | None = None
        self._runs: dict[tuple[str, int], list[SavedSlice]] = {}
        self._bucket_like = {
            _layout_of(bucket.slots): number for number, bucket in enumerate(self.part.buckets)
        }
        self._place: dict[tuple[str, str], tuple[int, int] | Single] = {}
        self._entries: dict[tuple[str, str], Entry] = {}
        self.entries: Mapping[tuple[str, str], Entry] = self._entries
        self._enter_singles()
        self._enter_slices()

    # ---- what there is ---------------------------------------------------------------------------

    def _enter(self, name: str, kind: str, entry: Entry, place: tuple[int, int] | Single) -> None:
        if (name, kind) in self.entries:
            raise ValueError(f"{kind} of {name} is listed twice")
        self._entries[name, kind] = entry
        self._place[name, kind] = place

    @property
    def is_in_boxes(self) -> bool:
        """True if there are several parts, or one that holds slices of tensors."""
        return self.parts > 1 or bool(self.part.placements)

    @property
    def unknown(self) -> frozenset[str]:
        """The names of slices whose position is not recorded."""
        if self.part.unknown is not None:
            return self.part.unknown
        return frozenset(name for name, _ in self.entries) if self.parts > 1 else frozenset()

    def _enter_singles(self) -> None:
        for one in self.part.singles:
            if one.rank is not None and one.rank >= len(self.part.ranks):
                raise ValueError(f"{one.tensor} is on rank {one.rank}")
            self._enter(one.name, one.kind, Entry(one.shape, one.dtype), one)

    def _enter_slices(self) -> None:
        for one in self.part.slices:
            if not 0 < one.holders <= len(self.part.ranks) - one.rank:
                raise ValueError(f"{one.tensor} is on rank {one.rank + max(one.holders, 1) - 1}")
            self._runs.setdefault((one.kind, one.bucket), []).append(one)
        self._expect_masters()
        for (kind, number), run in self._runs.items():
            run.sort(key=lambda one: one.start)
            if run[-1].stop > self.part.buckets[number].numel:
                raise ValueError(f"{kind} of bucket {number} is longer than the bucket")
            if any(one.stop > after.start for one, after in pairwise(run)):
                raise ValueError(f"{kind} of bucket {number} is listed twice")
            starts = [one.start for one in run]
            for index, slot in enumerate(self.part.buckets[number].slots):
                found = _overlapping(run, starts, slot.offset, slot.stop)
                covered = sum(
                    min(one.stop, slot.stop) - max(one.start, slot.offset) for one in found
                )
                if covered == slot.numel and (covered or kind in ("weight", "master")):
                    is_rounded = bool(found) and all(one.rounds for one in found)
                    entry = Entry(slot.shape, run[0].dtype, is_rounded)
                    self._enter(slot.name, kind, entry, (number, index))
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

    def _chunks_of(self, name: str, kind: str) -> list[_Chunk]:
        place = self._place[name, kind]
        if isinstance(place, Single):
            numel = prod(place.shape)
            chunk = _Chunk(0, numel, place.rank or 0, place.tensor, 0, place.dtype)
            return [chunk] if numel else []
        number, index = place
        run = self._runs[kind, number]
        starts = [one.start for one in run]
        return list(_chunks(run, starts, self.part.buckets[number].slots[index]))

    # ---- reading ---------------------------------------------------------------------------------

    def expect(self, name: str, kind: str, start: int, stop: int) -> None:
        """Check by the files' headers that the elements can be read."""
        slot = self._reordered(name, kind)
        bounds = (start, stop) if slot is None else (0, slot.numel)
        for chunk, _, _, _ in self._cuts(name, kind, *bounds):
            self._files.expect(self._file_of(chunk), chunk.tensor, chunk.stored)

    def read(self, name: str, kind: str, start: int, stop: int) -> Tensor:
        """Return elements of a value, in host memory.

        A value that was not saved in row-major order is read whole, and kept until the next one.
        """
        slot = self._reordered(name, kind)
        if slot is None:
            return self._read_as_stored(name, kind, start, stop)
        if self._in_rows is None or self._in_rows[0] != (name, kind):
            self._in_rows = None  # never two of them
            whole = shaped(self._read_as_stored(name, kind, 0, slot.numel), slot)
            self._in_rows = (name, kind), whole.reshape(-1)
        return self._in_rows[1][start:stop]

    def _reordered(self, name: str, kind: str) -> Slot | None:
        """Return the slot of a value that was not saved in row-major order, else None."""
        place = self._place[name, kind]
        if isinstance(place, Single):
            return None
        slot = self.part.buckets[place[0]].slots[place[1]]
        return slot if slot.is_reordered else None

    def _read_as_stored(self, name: str, kind: str, start: int, stop: int) -> Tensor:
        """Return elements of a value, in the order of the file."""
        dtype = self.entries[name, kind].dtype
        found = torch.empty(stop - start, dtype=dtype)
        for chunk, offset, target, numel in self._cuts(name, kind, start, stop):
            out, dtypes = found[target : target + numel], Dtypes(chunk.stored, dtype)
            self._files.fill(out, self._file_of(chunk), chunk.tensor, offset, dtypes)
        return found

    def read_own(self, name: str, kind: str, rank: int) -> Tensor:
        """Return a whole value in its shape; if each rank has its own, that of `rank`."""
        place = self._place[name, kind]
        if not isinstance(place, Single):
            entry = self.entries[name, kind]
            return self.read(name, kind, 0, entry.numel).view(entry.shape)
        holder = rank if place.rank is None else place.rank
        path = rank_file(self.part.ranks[holder % len(self.part.ranks)])
        self._files.expect(path, place.tensor, place.dtype, place.shape)
        return self._files.whole(path, place.tensor)

    def has_slice(self, kind: str, slots: Sequence[Slot], start: int, stop: int) -> bool:
        """Return whether a bucket with the layout `slots` was saved; check its files' headers."""
        number = self._bucket_like.get(_layout_of(slots))
        needed = (slot for slot in slots if max(slot.offset, start) < min(slot.stop, stop))
        if (kind, number) not in self._runs or any(
            (slot.name, kind) not in self.entries for slot in needed
        ):
            return False
        for one in self._saved_by_ranks(kind, slots, start, stop):
            self._files.expect(self._file_of(one), one.tensor, one.stored, (one.numel,))
        return True

    def read_slice(self, kind: str, slots: Sequence[Slot], start: int, out: Tensor) -> None:
        """Read elements of a saved bucket into `out`, directly if dtype and device allow."""
        done, stop = start, start + out.numel()
        for one in self._saved_by_ranks(kind, slots, start, stop):
            first, last = max(one.start, start), min(one.stop, stop)
            out[done - start : first - start].zero_()
            part, dtypes = out[first - start : last - start], Dtypes(one.stored, one.dtype)
            self._files.fill(part, self._file_of(one), one.tensor, first - one.start, dtypes)
            done = last
        out[done - start :].zero_()

    def _saved_by_ranks(
        self, kind: str, slots: Sequence[Slot], start: int, stop: int
    ) -> list[SavedSlice]:
        """Return the single ranks' slices of elements [start, stop) of the matching bucket."""
        number = self._bucket_like.get(_layout_of(slots))
        run = self._runs.get((kind, -1 if number is None else number), ())
        found = _overlapping(run, [one.start for one in run], start, stop)
        return [one for several in found for one in several.between(start, stop)]

    def _file_of(self, one: SavedSlice | _Chunk) -> str:
        return rank_file(self.part.ranks[one.rank])

    def take_slice(self, kind: str, slots: Sequence[Slot], start: int, stop: int) -> Tensor | None:
        """Return the elements that `verify` kept, if they are one rank's whole slice."""
        for one in self._saved_by_ranks(kind, slots, start, stop):
            if (one.start, one.stop) == (start, stop):
                name = self._file_of(one)
                found = self._files.taken(name, self._extent_of(name, one))
                return None if found is None else found.view(one.dtype)
        return None

    def _extent_of(self, name: str, one: SavedSlice) -> tuple[int, int]:
        """Return the (start, stop) of the bytes of one rank's slice in its file."""
        row = self._files.expect(name, one.tensor, one.stored, (one.numel,))
        return row.begin, row.stop

    def _remembered(self, name: str) -> Iterator[tuple[int, int]]:
        """Yield the (start, stop) of the bytes of a file that hold optimizer state of buckets."""
        for several in self.part.slices:
            for one in several.between(several.start, several.stop):
                is_here = self._file_of(one) == name and one.tensor in self._files.header(name).rows
                if is_here and state_key(one.kind) is not None:
                    yield self._extent_of(name, one)

    def _cuts(
        self, name: str, kind: str, start: int, stop: int
    ) -> list[tuple[_Chunk, int, int, int]]:
        """Return what to read: (chunk, offset in it, position in the target, numel)."""
        entry, chunks = self.entries[name, kind], self._chunks_of(name, kind)
        if not 0 <= start <= stop <= entry.numel:
            raise CheckpointError(
                f"{self.path}: elements {start} to {stop} of {kind} of {name} are requested, which"
                f" has {entry.numel}"
            )
        extents = [(chunk.start, chunk.numel) for chunk in chunks]
        return [
            (chunks[cut.chunk], chunks[cut.chunk].offset + cut.start, cut.target, cut.numel)
            for cut in cuts_of(extents, start, stop)
        ]

    def own(self, rank: int) -> RankState | None:
        """Return a rank's random generators, loader position and modules' extra state."""
        path = rank_file(self.part.ranks[rank % len(self.part.ranks)])
        with self._files.reading(path):
            header = self._files.header(path)
            saved = strict_json(header.texts[OWN], self._files.home / path)
            tensors = _LazyTensors(partial(self._files.whole, path))
            values = [saved[key] for key in ("loader", "random")]
            # Earlier versions did not save these.
            values += [saved.get("extra", {"dict": []}), saved.get("exchange")]
            return RankState(*(decoded(value, tensors) for value in values))

    def client_state(self) -> dict[str, Any]:
        """Return the caller's own values."""
        tensors: Mapping[str, Tensor] = {}
        if CLIENT in self._files:
            tensors = read_tensors(self._files.use(CLIENT))[0]
        with self._reading_index():
            return dict(decoded(self._client, tensors))

    # ---- files -----------------------------------------------------------------------------------

    @property
    def files(self) -> SavedFiles:
        """The files of all ranks, with their seals."""
        return self._files

    def verify(
        self, share: int = 0, shares: int = 1, *, spread: bool = True, room: int = 0
    ) -> None:
        """Compare every byte of files with their checksums: each `shares`-th file from `share` on.

        With `spread` false (this rank does not see other ranks' files) only the files used so far
        are verified. Up to `room` bytes are kept until `close`, so that they are not read again.

        Raises:
            CheckpointError: a file is missing or damaged.
        """
        # The rank files first: at the same world size each rank verifies its own.
        names = sorted(self._files, key=lambda name: (name == CLIENT, name))[share::shares]
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


def _overlapping(
    run: Sequence[SavedSlice], starts: Sequence[int], low: int, high: int
) -> Sequence[SavedSlice]:
    """Return the slices, from a list sorted by start, that have elements in [low, high)."""
    first = max(bisect_right(starts, low) - 1, 0)
    found = run[first : max(bisect_left(starts, high), first)]
    return [one for one in found if max(one.start, low) < min(one.stop, high)]


def _chunks(run: Sequence[SavedSlice], starts: Sequence[int], slot: Slot) -> Iterator[_Chunk]:
    """Yield the chunks of a parameter in slices that are sorted by start."""
    for several in _overlapping(run, starts, slot.offset, slot.stop):
        for one in several.between(slot.offset, slot.stop):
            first, last = max(one.start, slot.offset), min(one.stop, slot.stop)
            place = first - one.start
            yield _Chunk(first - slot.offset, last - first, one.rank, one.tensor, place, one.stored)


def _layout_of(slots: Sequence[Slot]) -> tuple[tuple[Any, ...], ...]:
    orders = (slot.order if slot.is_reordered else () for slot in slots)
    return tuple((s.name, s.shape, s.offset, order) for s, order in zip(slots, orders, strict=True))
