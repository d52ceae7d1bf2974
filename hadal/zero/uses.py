"""The buckets that are gathered on use: their units, their codes, and views that outlive a use."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

import torch
from torch import Tensor

from hadal.zero.bucket import Bucket
from hadal.zero.grouping import Unit

# The number of forwards and backwards in which every operation is watched because of a view.
_PHASES = 8


class Uses:
    """The buckets whose weights are gathered on use, by number and by unit.

    A gather is announced by its bucket's number, plus the number of buckets if it is exact.
    """

    def __init__(self) -> None:
        self._of: dict[Unit, list[Bucket]] = {}
        self.take([])

    def take(self, buckets: list[Bucket]) -> None:
        """Set the buckets from now on."""
        self.buckets = buckets
        self.number = {bucket: number for number, bucket in enumerate(buckets)}
        self.bucket_of = {p: bucket for bucket in buckets for p in bucket.parameters}
        # By the storage of the full buffer, which outlives its contents. torch uses the same object
        # for a storage as long as one is referenced.
        storages = [bucket.full.untyped_storage() for bucket in buckets]
        self._fulls = {id(s): (s, bucket) for s, bucket in zip(storages, buckets, strict=True)}

    def replace(self, old: Bucket, parts: Sequence[Bucket]) -> None:
        """Replace a bucket by new ones, which have taken over its parameters."""
        place = self.number[old]
        self.take([*self.buckets[:place], *parts, *self.buckets[place + 1 :]])
        for uses in self._of.values():
            if old in uses:
                place = uses.index(old)
                uses[place : place + 1] = parts

    def extend(self, units: Iterable[Unit]) -> list[Unit]:
        """Add units that are not known yet, and new uses of known ones.

        Returns:
            The units that were not known.
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
        """Add a bucket to a unit's uses; return True if it is a new one."""
        if bucket in self._of[unit]:
            return False
        self._of[unit].append(bucket)
        return True

    @property
    def units(self) -> Iterable[Unit]:
        """The units that use any of the buckets."""
        return self._of.keys()

    def of(self, unit: Unit) -> Sequence[Bucket]:
        """Return the buckets that a unit is known to use."""
        return self._of[unit]

    def bucket_at(self, tensor: Tensor) -> Bucket | None:
        """Return the bucket whose full buffer a tensor is a view of, if any."""
        held = self._fulls.get(id(_storage_of(tensor)))
        return None if held is None else held[1]

    # ---- announcements ---------------------------------------------------------------------------

    def code_of(self, number: int, *, exact: bool) -> int:
        """Return the code that announces a gather; without rounding, every gather is exact."""
        return number + len(self.buckets) if exact and self.buckets[number].rounds else number

    def _called(self, code: int) -> tuple[Bucket, bool]:
        """Return the bucket of a code, and True if the gather is exact."""
        return self.buckets[code % len(self.buckets)], code >= len(self.buckets)

    def name(self, code: int) -> str:
        """Return the name, for messages, of the bucket that a code announces."""
        return self._called(code)[0].name

    def gather(self, code: int) -> None:
        """Make a bucket's weights readable here."""
        bucket, exact = self._called(code)
        bucket.unshard(exact=exact)

    def lend_to(self, code: int, askers: Collection[int]) -> None:
        """Lend this rank's shard if a rank that it gathers the bucket with asked for it.

        These ranks all know which ranks asked, so all of them take part or none does.
        """
        bucket, exact = self._called(code)
        if any(asker in bucket.gatherers_of(exact=exact) for asker in askers):
            bucket.serve(exact=exact)


def _storage_of(tensor: Tensor) -> torch.UntypedStorage | None:
    """Return a tensor's storage, or None if it has none, like sparse tensors or under vmap."""
    try:
        return tensor.untyped_storage()
    except NotImplementedError:
        return None


class Escapes:
    """The buckets with views that outlived a use: `weight.t()`, kept or returned by a module.

    Such views are plain tensors, so their class does not announce reads; every operation is watched
    for them instead.
    """

    def __init__(self) -> None:
        self._left: dict[Bucket, int] = {}
        self.are_watched = False
        """True: every operation of the current forward or backward is watched."""

    def begin(self) -> None:
        """Begin a forward or a backward."""
        for bucket, left in [*self._left.items()]:
            if left > 1 or bucket.has_other_views:
                self._left[bucket] = left - 1
            else:
                del self._left[bucket]
        self.are_watched = bool(self._left)

    def note(self, bucket: Bucket) -> bool:
        """Look for views before a bucket is freed; return True if their reads are not seen."""
        if not bucket.has_other_views:
            return False
        self._left[bucket] = _PHASES
        return not self.are_watched
