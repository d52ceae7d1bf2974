"""Weights and masters from a checkpoint: what is to be read into which bucket.

A master takes the saved master, or the weight where there was none. A weight takes the saved weight
where that has its dtype, bit for bit; else it is rounded from the master, as a step would do it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from hadal.checkpoint.contents import WEIGHT
from hadal.checkpoint.fitting import exact_kind
from hadal.checkpoint.source import Source
from hadal.zero.bucket import Bucket
from hadal.zero.layout import Slot


@dataclass(frozen=True, slots=True)
class Copy:
    """Elements of one saved value, and where they go to."""

    target: Tensor
    """1-D, in its place."""
    name: str
    kind: str
    start: int
    via: torch.dtype | None = None
    """The dtype that they are rounded to before they are rounded to the target's."""

    def expect(self, source: Source) -> None:
        """See that it can be read."""
        source.expect(self.name, self.kind, self.start, self.start + self.target.numel())

    def run(self, source: Source) -> None:
        """Read it."""
        stop = self.start + self.target.numel()
        values = source.read(self.name, self.kind, self.start, stop)
        self.target.copy_(values if self.via is None else values.to(self.via))


@dataclass(frozen=True, slots=True)
class CopyStretch:
    """Elements of a saved bucket that is laid out like one here, and where they go to."""

    target: Tensor
    kind: str
    slots: tuple[Slot, ...]
    start: int

    def run(self, source: Source) -> None:
        """Read them."""
        stop = self.start + self.target.numel()
        for offset, values in source.stretches(self.kind, self.slots, self.start, stop) or ():
            self.target[offset : offset + values.numel()].copy_(values)


Reading = Copy | CopyStretch


def plan_bucket(
    bucket: Bucket, found: Mapping[str, str], source: Source, *, uses_masters: bool
) -> Iterator[Reading]:
    """What to read into a bucket's weights and its master on this rank.

    `found` has the saved name of each parameter; those that it lacks keep their values.

    Raises:
        CheckpointError: something of it cannot be read.
    """
    slots = bucket.layout.slots
    names = {slot.name: found[slot.name] for slot in slots if slot.name in found}
    exact = {
        name: exact_kind(saved, source, uses_masters=uses_masters) for name, saved in names.items()
    }
    weights = {
        name: _weight_kind(saved, exact[name], bucket, source) for name, saved in names.items()
    }
    precision = bucket.precision
    has_master = bucket.master is not None and precision.keeps_master
    via = precision.master if has_master else None
    yield from _plan_run(bucket, bucket.shard, weights, names, source, via)
    if has_master:
        assert bucket.master is not None
        yield from _plan_run(bucket, bucket.master, exact, names, source, None)


def _weight_kind(saved: str, exact: str, bucket: Bucket, source: Source) -> str:
    entry = source.entries.get((saved, WEIGHT))
    return WEIGHT if entry is not None and entry.dtype == bucket.precision.compute else exact


def _plan_run(
    bucket: Bucket,
    target: Tensor,
    kinds: Mapping[str, str],
    names: Mapping[str, str],
    source: Source,
    via: torch.dtype | None,
) -> Iterator[Reading]:
    slots, (start, stop) = bucket.layout.slots, bucket.span
    alike = set(kinds.values())
    same = len(names) == len(slots) and all(name == saved for name, saved in names.items())
    if same and len(alike) == 1:
        kind = alike.pop()
        dtypes = {source.entries[name, kind].dtype for name in names}
        if dtypes == {target.dtype} and source.stretches(kind, slots, start, stop) is not None:
            yield CopyStretch(target, kind, slots, start)
            return
    for fragment in bucket.layout.fragments(start, stop):
        name = slots[fragment.slot].name
        if name not in names:
            continue
        place = target[fragment.offset : fragment.offset + fragment.numel]
        copy = Copy(place, names[name], kinds[name], fragment.start, via)
        if source.entries[copy.name, copy.kind].dtype == target.dtype:
            copy = Copy(place, copy.name, copy.kind, copy.start)
        copy.expect(source)
        yield copy
