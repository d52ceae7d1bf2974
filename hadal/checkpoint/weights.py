"""Planning of the reads that fill weights and masters from a checkpoint, bucket by bucket.

A master is read from the saved master, or from the weight if no master was saved. A weight is read
bit for bit from the saved weight if that has its dtype; otherwise, or if the result is the same, it
is rounded from the master here, as a step would do it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial

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
    """A read of elements of one saved value into a target."""

    target: Tensor
    """The tensor to fill: 1-D in memory order, or the whole value in its shape."""
    name: str
    kind: str
    start: int
    slot: Slot | None = None
    """The slot that gives the element order of a 1-D target, if that is not row-major."""

    def expect(self, source: Source) -> None:
        """Check that the elements can be read."""
        source.expect(self.name, self.kind, *self._needed)

    def run(self, source: Source) -> None:
        """Read the elements."""
        found = source.read(self.name, self.kind, *self._needed)
        if self.slot is not None:
            whole = flattened(found.view(self.slot.shape), self.slot)
            found = whole[self.start : self.start + self.target.numel()]
        self.target.copy_(found.view(self.target.shape))

    @property
    def _needed(self) -> tuple[int, int]:
        """The (start, stop) to read; all of a value that is stored here in another order."""
        if self.slot is not None:
            return 0, self.slot.numel
        return self.start, self.start + self.target.numel()


Reading = Callable[[], object]
"""A planned read, or a rounding of what was read before it."""


def plan_bucket(
    bucket: Bucket, found: Mapping[str, str], source: Source, *, uses_masters: bool
) -> Iterator[Reading]:
    """Yield the reads that fill a bucket's weights and master on this rank.

    `found` maps each parameter to its saved name; parameters that it lacks keep their values. While
    the bucket is on disk the reads only check; inside `present` they can run.

    Raises:
        CheckpointError: a value cannot be read.
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
            yield partial(_target(bucket.master_source).copy_, shard)
        return
    master = _target(kept)
    yield from _plan_run(bucket, master, exact, names, source)
    saved = {name: kind for name, kind in weights.items() if kind != exact[name]}
    yield from _plan_run(bucket, shard, saved, names, source)
    if not saved and len(names) == len(slots):
        yield partial(shard.copy_, master)
        return
    for fragment in bucket.layout.fragments(*bucket.span):
        name = slots[fragment.slot].name
        if name in names and name not in saved:
            place = slice(fragment.offset, fragment.offset + fragment.numel)
            yield partial(shard[place].copy_, master[place])


def _target(values: Tensor | StoredSlice | None) -> Tensor:
    """Return the tensor to read into; a meta tensor while the values are on disk."""
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
    """Yield the reads of the parameters in `kinds`, into one shard."""
    slots, (start, stop) = plain_slots(bucket.layout.slots), bucket.span
    alike = set(kinds.values())
    same = len(kinds) == len(slots) and all(name == saved for name, saved in names.items())
    if same and len(alike) == 1:
        kind = alike.pop()
        dtypes = {source.entries[name, kind].dtype for name in names}
        if dtypes == {target.dtype} and source.has_slice(kind, slots, start, stop):
            yield partial(source.read_slice, kind, slots, start, target)
            return
    for fragment in bucket.layout.fragments(start, stop):
        name = slots[fragment.slot].name
        if name not in kinds:
            continue
        place = target[fragment.offset : fragment.offset + fragment.numel]
        slot = slots[fragment.slot] if slots[fragment.slot].is_reordered else None
        copy = Copy(place, names[name], kinds[name], fragment.start, slot)
        copy.expect(source)
        yield partial(copy.run, source)
