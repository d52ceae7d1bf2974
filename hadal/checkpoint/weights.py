"""Weights and masters from a checkpoint: what is to be read into which bucket.

A master takes the saved master, or the weight where there was none. A weight takes the saved weight
where that has its dtype, bit for bit; else, and where that is the same, it is rounded from the
master here, as a step would do it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from hadal.checkpoint.contents import WEIGHT
from hadal.checkpoint.fitting import exact_kind
from hadal.checkpoint.live import plain_slots
from hadal.checkpoint.source import Source
from hadal.offload.tensors import StoredSlice
from hadal.zero.bucket import Bucket
from hadal.zero.layout import Slot
from hadal.zero.views import flattened


@dataclass(frozen=True, slots=True)
class Copy:
    """Elements of one saved value, and where they go to."""

    target: Tensor
    """In its place: 1-D, as elements lie in memory, or the whole value in its shape."""
    name: str
    kind: str
    start: int
    slot: Slot | None = None
    """Tells the order of a 1-D target's elements; None: row by row."""

    def expect(self, source: Source) -> None:
        """See that it can be read."""
        source.expect(self.name, self.kind, *self._needed)

    def run(self, source: Source) -> None:
        """Read it."""
        found = source.read(self.name, self.kind, *self._needed)
        if self._reordered is not None:
            whole = flattened(found.view(self._reordered.shape), self._reordered)
            found = whole[self.start : self.start + self.target.numel()]
        self.target.copy_(found.view(self.target.shape))

    @property
    def _reordered(self) -> Slot | None:
        return self.slot if self.slot is not None and self.slot.is_reordered else None

    @property
    def _needed(self) -> tuple[int, int]:
        """What must be read: of a value that lies here in another order all of it."""
        if self._reordered is not None:
            return 0, self._reordered.numel
        return self.start, self.start + self.target.numel()


@dataclass(frozen=True, slots=True)
class CopyStretch:
    """Elements of a saved bucket that is laid out like one here, and where they go to."""

    target: Tensor
    kind: str
    slots: tuple[Slot, ...]
    start: int

    def run(self, source: Source) -> None:
        """Read them."""
        source.read_stretch(self.kind, self.slots, self.start, self.target)


@dataclass(frozen=True, slots=True)
class Rounding:
    """Weights that are rounded from masters which have been read before.

    Or masters from weights of their own dtype.
    """

    target: Tensor
    master: Tensor

    def run(self, source: Source) -> None:
        """Round them."""
        self.target.copy_(self.master)


Reading = Copy | CopyStretch | Rounding


def plan_bucket(
    bucket: Bucket, found: Mapping[str, str], source: Source, *, uses_masters: bool
) -> Iterator[Reading]:
    """What to read into a bucket's weights and its master on this rank.

    `found` has the saved name of each parameter; those that it lacks keep their values. While the
    bucket is on the disk this checks; inside `present` it tells what to run.

    Raises:
        CheckpointError: something of it cannot be read.
    """
    slots = plain_slots(bucket.layout.slots)
    names = {slot.name: found[slot.name] for slot in slots if slot.name in found}
    exact = {
        name: exact_kind(saved, source, uses_masters=uses_masters) for name, saved in names.items()
    }
    weights = {
        name: _weight_kind(saved, exact[name], bucket, source) for name, saved in names.items()
    }
    shard = _target(bucket.shard_source)
    kept = bucket.master_source if bucket.precision.keeps_master else None
    if kept is None:
        yield from _plan_run(bucket, shard, weights, names, source)
        if bucket.has_own_master:
            yield Rounding(_target(bucket.master_source), shard)
        return
    master = _target(kept)
    yield from _plan_run(bucket, master, exact, names, source)
    saved = {name: kind for name, kind in weights.items() if kind != exact[name]}
    yield from _plan_run(bucket, shard, saved, names, source)
    if not saved and len(names) == len(slots):
        yield Rounding(shard, master)
        return
    for fragment in bucket.layout.fragments(*bucket.span):
        name = slots[fragment.slot].name
        if name in names and name not in saved:
            place = slice(fragment.offset, fragment.offset + fragment.numel)
            yield Rounding(shard[place], master[place])


def _target(values: Tensor | StoredSlice | None) -> Tensor:
    """The tensor to read into; what is on the disk is only planned for until it is loaded."""
    assert values is not None  # it is trained
    if isinstance(values, Tensor):
        return values
    return torch.empty(values.numel(), dtype=values.dtype, device="meta")


def _weight_kind(saved: str, exact: str, bucket: Bucket, source: Source) -> str:
    entry = source.entries.get((saved, WEIGHT))
    if entry is None or entry.dtype != bucket.precision.compute:
        return exact
    keeps_master = bucket.trainable and bucket.precision.keeps_master
    return exact if entry.is_rounded and keeps_master else WEIGHT


def _plan_run(
    bucket: Bucket,
    target: Tensor,
    kinds: Mapping[str, str],
    names: Mapping[str, str],
    source: Source,
) -> Iterator[Reading]:
    """What to read of the parameters that `kinds` tells."""
    slots, (start, stop) = plain_slots(bucket.layout.slots), bucket.span
    alike = set(kinds.values())
    same = len(kinds) == len(slots) and all(name == saved for name, saved in names.items())
    if same and len(alike) == 1:
        kind = alike.pop()
        dtypes = {source.entries[name, kind].dtype for name in names}
        if dtypes == {target.dtype} and source.has_stretch(kind, slots, start, stop):
            yield CopyStretch(target, kind, slots, start)
            return
    for fragment in bucket.layout.fragments(start, stop):
        name = slots[fragment.slot].name
        if name not in kinds:
            continue
        place = target[fragment.offset : fragment.offset + fragment.numel]
        slot = slots[fragment.slot]
        copy = Copy(place, names[name], kinds[name], fragment.start, slot)
        copy.expect(source)
        yield copy
