"""The buckets that are gathered on use, and the units that use them.

Tests: tests/zero/test_gathering.py
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from hadal.zero.bucket import Bucket
from hadal.zero.grouping import Unit


class Uses:
    """The buckets whose weights are gathered on use, by number; those of each unit."""

    def __init__(self) -> None:
        self._of: dict[Unit, list[Bucket]] = {}
        self.take([])

    def take(self, buckets: list[Bucket]) -> None:
        """Set the buckets from now on."""
        self.buckets = buckets
        self.number = {bucket: number for number, bucket in enumerate(buckets)}
        self.bucket_of = {p: bucket for bucket in buckets for p in bucket.parameters}
        # By the storage of their full buffer, which outlives its contents: torch gives one object
        # for one storage as long as it is referenced.
        storages = [bucket.full.untyped_storage() for bucket in buckets]
        self._fulls = {id(s): (s, bucket) for s, bucket in zip(storages, buckets, strict=True)}

    def replace(self, old: Bucket, parts: Sequence[Bucket]) -> None:
        """Replace a bucket by new ones that have taken over its parameters."""
        place = self.number[old]
        self.take([*self.buckets[:place], *parts, *self.buckets[place + 1 :]])
        for uses in self._of.values():
            if old in uses:
                place = uses.index(old)
                uses[place : place + 1] = parts

    def extend(self, units: Iterable[Unit]) -> list[Unit]:
        """Add the model's units that are not known yet, or that have come to use more.

        Returns:
            The units whose modules were not watched so far.
        """
        known = {(unit.module, unit.is_external): unit for unit in self._of}
        fresh = []
        for unit in units:
            mine = (member.parameter for member in unit.members)
            uses = list(dict.fromkeys(self.bucket_of[p] for p in mine if p in self.bucket_of))
            same = known.get((unit.module, unit.is_external))
            if same is not None:
                self._of[same] += [bucket for bucket in uses if bucket not in self._of[same]]
            elif uses:
                self._of[unit] = uses
                fresh.append(unit)
        return fresh

    def learn(self, unit: Unit, bucket: Bucket) -> bool:
        """Add a bucket to a unit's uses; return True if that was not known."""
        if bucket in self._of[unit]:
            return False
        self._of[unit].append(bucket)
        return True

    @property
    def units(self) -> Iterable[Unit]:
        """Return the units that use any of the buckets."""
        return self._of.keys()

    def of(self, unit: Unit) -> Sequence[Bucket]:
        """Return the buckets that a unit is known to use."""
        return self._of[unit]

    def bucket_at(self, tensor: Tensor) -> Bucket | None:
        """Return the bucket whose full buffer a tensor looks into, if any."""
        held = self._fulls.get(id(_storage_of(tensor)))
        return None if held is None else held[1]


def _storage_of(tensor: Tensor) -> torch.UntypedStorage | None:
    """Return a tensor's storage; None if it has none of its own: a sparse one, one under vmap."""
    try:
        return tensor.untyped_storage()
    except NotImplementedError:
        return None
