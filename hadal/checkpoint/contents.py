"""What lies where in a checkpoint, and how its index says so: plain values, no tensors.

Words of this file.

kind      what a stored value is to its name: "weight", "master", "buffer", or "state.<key>" for
          what the optimizer remembers under a key
stretch   consecutive elements of one kind in one bucket: one tensor of one rank's file
single    a value that lies in no bucket, or whose shape is not its parameter's: one tensor
part      all of a model, or what one of several model-parallel ranks holds of it
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from hadal.checkpoint.shards import DTYPE_OF, DTYPES
from hadal.zero.layout import Slot

WEIGHT, MASTER, BUFFER = "weight", "master", "buffer"
_STATE = "state."


def state_kind(key: str) -> str:
    """The kind of what the optimizer remembers under a key."""
    return _STATE + key


def state_key(kind: str) -> str | None:
    """The optimizer's key of a kind; None for any other kind."""
    return kind.removeprefix(_STATE) if kind.startswith(_STATE) else None


@dataclass(frozen=True, slots=True)
class SavedBucket:
    """A bucket as it lay when it was saved."""

    name: str
    numel: int
    partition: str
    """What was cut over the ranks: "---", "o--", "og-" or "ogw"."""
    trainable: bool
    slots: tuple[Slot, ...]


class Stretch(NamedTuple):
    """Consecutive elements of one kind in one bucket, and the rank that holds them.

    Weights that are, bit for bit, the rounding of their masters are not stored: the stretch is then
    that of the masters.
    """

    rank: int
    kind: str
    bucket: int
    start: int
    numel: int
    dtype: torch.dtype
    rounds: torch.dtype | None = None
    """The dtype of the masters that these weights are the rounding of; None: they are stored."""
    holders: int = 1
    """So many ranks, from `rank` on, hold as many elements each, one after the other."""

    @property
    def tensor(self) -> str:
        """The name, in the rank's file, of what is stored."""
        kind = self.kind if self.rounds is None else MASTER
        return f"bucket.{self.bucket}.{self.start}.{kind}"

    @property
    def stored(self) -> torch.dtype:
        """The dtype of what is stored."""
        return self.rounds or self.dtype

    @property
    def stop(self) -> int:
        """The first element behind it."""
        return self.start + self.numel * self.holders

    def between(self, low: int, high: int) -> Iterator[Stretch]:
        """What single ranks hold of it that has elements in [low, high)."""
        if self.numel and low < high:
            first = max(low - self.start, 0) // self.numel
            last = min(-(-(high - self.start) // self.numel), self.holders)
            for number in range(first, last):
                start = self.start + number * self.numel
                yield self._replace(rank=self.rank + number, start=start, holders=1)


class Single(NamedTuple):
    """A value that is stored whole, and the rank that holds it; None: every rank its own."""

    rank: int | None
    kind: str
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def tensor(self) -> str:
        """Its name in the rank's file."""
        return f"single.{self.kind}.{self.name}"


@dataclass(frozen=True, slots=True)
class SavedGroup:
    """A param group: its options (learning rate and so on), and the names of its parameters."""

    options: Any
    """As `plain.encoded` has made them."""
    names: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Part:
    """One part of a model and the ranks that hold it."""

    ranks: tuple[int, ...]
    """Their numbers in the world; elsewhere they are counted from 0, in this order."""
    buckets: tuple[SavedBucket, ...]
    stretches: tuple[Stretch, ...]
    singles: tuple[Single, ...]
    state: Mapping[str, Mapping[str, Any]]
    """By parameter and key: optimizer state that is no tensor of elements, encoded."""
    groups: tuple[SavedGroup, ...]
    aliases: Mapping[str, str]
    """Further names of tied parameters, and the name that they are saved under."""


def part_as_json(part: Part) -> dict[str, Any]:
    """What `part_of_json` turns back. Stretches and state that are alike are said once."""
    rows: dict[tuple[str, int, str, str], list[list[int]]] = {}
    for one in part.stretches:
        key = (one.kind, one.bucket, DTYPES[one.dtype], DTYPES[one.stored])
        rows.setdefault(key, []).append([one.rank, one.start, one.numel, one.holders])
    alike: dict[str, list[str]] = {}
    for name, values in part.state.items():
        alike.setdefault(json.dumps(values), []).append(name)
    return {
        "ranks": list(part.ranks),
        "buckets": [
            {
                "name": bucket.name,
                "numel": bucket.numel,
                "partition": bucket.partition,
                "trainable": bucket.trainable,
                "slots": [_slot_as_json(slot) for slot in bucket.slots],
            }
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
    }


def part_of_json(content: Any) -> Part:
    """A part as the index tells of it.

    Raises:
        ValueError, TypeError, KeyError: `part_as_json` has not made it.
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
    stretches = tuple(
        Stretch(
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
    return Part(
        ranks=tuple(_count(rank) for rank in content["ranks"]),
        buckets=buckets,
        stretches=stretches,
        singles=singles,
        state={str(name): dict(values) for names, values in content["state"] for name in names},
        groups=tuple(
            SavedGroup(row["options"], tuple(map(str, row["names"])))
            for row in content["param_groups"]
        ),
        aliases={str(one): str(other) for one, other in dict(content["aliases"]).items()},
    )


def _slot_as_json(slot: Slot) -> list[Any]:
    row = [slot.name, list(slot.shape), slot.group, slot.offset]
    return [*row, list(slot.order)] if slot.is_reordered else row


def _slot_of_json(name: Any, shape: Any, group: Any, offset: Any, order: Any = ()) -> Slot:
    slot = Slot(str(name), _shape(shape), int(group), _count(offset), _shape(order))
    if slot.order and sorted(slot.order) != list(range(len(slot.shape))):
        raise ValueError(f"{order} is no order of the dimensions of {name}")
    return slot


def _joined(cuts: list[list[int]]) -> list[list[int]]:
    """Cuts (rank, start, numel, holders), with even ones of consecutive ranks made one.

    So the index does not grow with the ranks; where there is one holder that is left out.
    """
    joined: list[list[int]] = []
    for cut in sorted(cuts):
        rank, start, numel, holders = joined[-1] if joined else cut
        if numel and joined and cut[:3] == [rank + holders, start + numel * holders, numel]:
            joined[-1][3] += cut[3]
        else:
            joined.append([*cut])
    return [cut[:3] if cut[3] == 1 else cut for cut in joined]


def merged_state(
    of_ranks: Iterable[Sequence[tuple[str, dict[str, Any]]]],
) -> dict[str, dict[str, Any]]:
    """State of all parameters from what each rank has of its own; they agree where both have it."""
    merged: dict[str, dict[str, Any]] = {}
    for rows in of_ranks:
        for name, values in rows:
            merged[name] = {**values, **merged.get(name, {})}
    return merged


def _count(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"{value!r} is no count")
    return value


def _rounds(kind: Any, word: Any) -> torch.dtype:
    if kind != WEIGHT:
        raise ValueError(f"{kind!r} is told to be the rounding of masters")
    return _dtype(word)


def _shape(value: Any) -> tuple[int, ...]:
    return tuple(_count(length) for length in value)


def _dtype(word: Any) -> torch.dtype:
    return DTYPE_OF[word]
