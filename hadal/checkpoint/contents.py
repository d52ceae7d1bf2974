"""The contents of a checkpoint as its index describes them: plain values, no tensors.

Words of this file.

kind      the role of a stored value: "weight", "master", "buffer", or "state.<key>" for the
          optimizer's state under a key
slice     consecutive elements of one kind in one bucket: one tensor of one rank's file
single    a value that is in no bucket, or whose shape is not its parameter's: one tensor
part      a whole model, or the part of it that one of several model-parallel ranks holds
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from hadal.checkpoint.shards import DTYPE_OF, DTYPES
from hadal.zero.boxes import Box, Placement
from hadal.zero.layout import Slot

WEIGHT, MASTER, BUFFER = "weight", "master", "buffer"
_STATE = "state."


def state_kind(key: str) -> str:
    """Return the kind of the optimizer's state under a key."""
    return _STATE + key


def state_key(kind: str) -> str | None:
    """Return the optimizer's key of a kind; None for any other kind."""
    return kind.removeprefix(_STATE) if kind.startswith(_STATE) else None


class SavedBucket(NamedTuple):
    """A bucket's layout when it was saved."""

    name: str
    numel: int
    partition: str
    """The states sharded over the ranks: "---", "o--", "og-" or "ogw"."""
    trainable: bool
    slots: tuple[Slot, ...]


class SavedSlice(NamedTuple):
    """Consecutive elements of one kind in one bucket, and the rank that holds them.

    Weights that are, bit for bit, the rounding of their masters are not stored: the slice then
    refers to the masters.
    """

    rank: int
    kind: str
    bucket: int
    start: int
    numel: int
    dtype: torch.dtype
    rounds: torch.dtype | None = None
    """The dtype of the masters that round to these weights; None: the weights are stored."""
    holders: int = 1
    """The number of consecutive ranks, from `rank` on, that hold `numel` elements each."""

    @property
    def tensor(self) -> str:
        """The name of the stored tensor in the rank's file."""
        kind = self.kind if self.rounds is None else MASTER
        return f"bucket.{self.bucket}.{self.start}.{kind}"

    @property
    def stored(self) -> torch.dtype:
        """The dtype of the stored tensor."""
        return self.rounds or self.dtype

    @property
    def stop(self) -> int:
        """The element after the last."""
        return self.start + self.numel * self.holders

    def between(self, low: int, high: int) -> Iterator[SavedSlice]:
        """Yield the slices of single ranks that have elements in [low, high)."""
        if self.numel and low < high:
            first = max(low - self.start, 0) // self.numel
            last = min(-(-(high - self.start) // self.numel), self.holders)
            for number in range(first, last):
                start = self.start + number * self.numel
                yield self._replace(rank=self.rank + number, start=start, holders=1)


class Single(NamedTuple):
    """A value that is stored whole, and the rank that holds it; None: each rank has its own."""

    rank: int | None
    kind: str
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def tensor(self) -> str:
        """The value's name in the rank's file."""
        return f"single.{self.kind}.{self.name}"


class SavedGroup(NamedTuple):
    """A param group: its options (learning rate and so on) and its parameters' names."""

    options: Any
    """Encoded by `plain.encoded`."""
    names: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ModelPart:
    """A model-parallel part of a model (or all of it), and the ranks that hold it."""

    ranks: tuple[int, ...]
    """Their ranks in the world; other fields count them from 0, in this order."""
    buckets: tuple[SavedBucket, ...] = ()
    slices: tuple[SavedSlice, ...] = ()
    singles: tuple[Single, ...] = ()
    state: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Encoded optimizer state that is not per element, by parameter and key."""
    groups: tuple[SavedGroup, ...] = ()
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Other names of tied parameters, mapped to the names they are saved under."""
    placements: Mapping[str, Placement] = field(default_factory=dict)
    """Which slices of the whole model's tensors the parameters and buffers are, by name. Those not
    listed are whole, and have the same name in the whole model."""
    unknown: frozenset[str] = frozenset()
    """The names of slices whose position is not recorded; None: possibly all of them."""


def part_as_json(part: ModelPart) -> dict[str, Any]:
    """Encode a part as JSON, equal slices and state once; `part_of_json` reverses it."""
    rows: dict[tuple[str, int, str, str], list[list[int]]] = {}
    for one in part.slices:
        key = (one.kind, one.bucket, DTYPES[one.dtype], DTYPES[one.stored])
        rows.setdefault(key, []).append([one.rank, one.start, one.numel, one.holders])
    alike: dict[str, list[str]] = {}
    for name, values in part.state.items():
        alike.setdefault(json.dumps(values), []).append(name)
    return {
        "ranks": list(part.ranks),
        "buckets": [
            {**bucket._asdict(), "slots": [_slot_as_json(slot) for slot in bucket.slots]}
            for bucket in part.buckets
        ],
        "stretches": [
            [kind, bucket, word, _joined(cuts)] + [stored] * (stored != word)
            for (kind, bucket, word, stored), cuts in rows.items()
        ],
        "singles": [
            [one.rank, one.kind, one.name, list(one.shape), DTYPES[one.dtype]]
            for one in part.singles
        ],
        "state": [[names, json.loads(text)] for text, names in alike.items()],
        "param_groups": [
            {"names": list(group.names), "options": group.options} for group in part.groups
        ],
        "aliases": dict(part.aliases),
        "boxes": {name: _placement_as_json(one) for name, one in part.placements.items()},
        "unknown": sorted(part.unknown),
    }


def _placement_as_json(placement: Placement) -> list[Any]:
    boxes = placement.boxes
    return [placement.along, [[one.name, one.shape, one.offsets, one.sizes] for one in boxes]]


def _placement_of_json(along: Any, boxes: Any) -> Placement:
    rows = (Box(str(name), *map(_shape, numbers)) for name, *numbers in boxes)
    return Placement(tuple(rows), _count(along))


def part_of_json(content: Any) -> ModelPart:
    """Decode a part from the index.

    Raises:
        ValueError, TypeError, KeyError: `part_as_json` did not produce it.
    """
    buckets = tuple(
        SavedBucket(
            str(row["name"]),
            _count(row["numel"]),
            str(row["partition"]),
            bool(row["trainable"]),
            tuple(_slot_of_json(*slot) for slot in row["slots"]),
        )
        for row in content["buckets"]
    )
    slices = tuple(
        SavedSlice(
            _count(rank),
            str(kind),
            _count(bucket),
            _count(start),
            _count(numel),
            _dtype(word),
            _rounds(kind, *stored) if stored else None,
            *map(_count, holders),
        )
        for kind, bucket, word, cuts, *stored in content["stretches"]
        for rank, start, numel, *holders in cuts
    )
    singles = tuple(
        Single(
            None if rank is None else _count(rank),
            str(kind),
            str(name),
            _shape(shape),
            _dtype(word),
        )
        for rank, kind, name, shape, word in content["singles"]
    )
    return ModelPart(
        ranks=tuple(_count(rank) for rank in content["ranks"]),
        buckets=buckets,
        slices=slices,
        singles=singles,
        state={str(name): dict(values) for names, values in content["state"] for name in names},
        groups=tuple(
            SavedGroup(row["options"], tuple(map(str, row["names"])))
            for row in content["param_groups"]
        ),
        aliases={str(one): str(other) for one, other in dict(content["aliases"]).items()},
        placements={str(name): _placement_of_json(*row) for name, row in content["boxes"].items()},
        unknown=frozenset(map(str, content["unknown"])),
    )


def _slot_as_json(slot: Slot) -> list[Any]:
    row = [slot.name, list(slot.shape), slot.group, slot.offset]
    return [*row, list(slot.order)] if slot.is_reordered else row


def _slot_of_json(name: Any, shape: Any, group: Any, offset: Any, order: Any = ()) -> Slot:
    slot = Slot(str(name), _shape(shape), int(group), _count(offset), _shape(order))
    if slot.order and sorted(slot.order) != list(range(len(slot.shape))):
        raise ValueError(f"{order} is not a permutation of the dimensions of {name}")
    return slot


def _joined(cuts: list[list[int]]) -> list[list[int]]:
    """Merge cuts (rank, start, numel, holders) of consecutive ranks that have the same numel.

    This keeps the index from growing with the ranks. A single holder is omitted.
    """
    joined: list[list[int]] = []
    for cut in sorted(cuts):
        rank, start, numel, holders = joined[-1] if joined else cut
        if numel and joined and cut[:3] == [rank + holders, start + numel * holders, numel]:
            joined[-1][3] += cut[3]
        else:
            joined.append([*cut])
    return [cut[:3] if cut[3] == 1 else cut for cut in joined]


def _count(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"{value!r} is not a count")
    return value


def _rounds(kind: Any, word: Any) -> torch.dtype:
    if kind != WEIGHT:
        raise ValueError(f"{kind!r} is marked as rounded masters; only weights can be")
    return _dtype(word)


def _shape(value: Any) -> tuple[int, ...]:
    return tuple(_count(length) for length in value)


def _dtype(word: Any) -> torch.dtype:
    return DTYPE_OF[word]
