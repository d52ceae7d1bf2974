"""Parameters that are added or trained later; all other buckets stay as they are."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from heapq import merge

from torch import nn

from hadal.zero.bucket import Bucket
from hadal.zero.gradients import Gradients
from hadal.zero.grouping import BucketPlan, Member
from hadal.zero.runtime import ZeroRuntime


def train_later(
    runtime: ZeroRuntime, parameters: Iterable[nn.Parameter], group: int
) -> list[Gradients]:
    """Move parameters from untrained buckets to new ones, as param group `group`.

    All ranks must call it together, with the same parameters, between two updates. A bucket that
    also holds other parameters is divided: the rest stays untrained, in the same order. Masters
    start with the current weights.

    Returns:
        The gradients of all the parameters given, in the order of the buckets.
    """
    chosen = dict.fromkeys(parameters)
    holders = set(map(runtime.bucket_of.__getitem__, chosen))
    for old in [b for b in runtime.buckets if b in holders and not b.trainable]:
        runtime.gathering.begin_use(old)
        old.check_links()
        plans = _plans(old, chosen, group)
        parts = [old.divided(plan) for plan in plans]
        runtime.replace(old, parts)
        for bucket in parts:
            bucket.reshard()
        old.free_disk()
    return [one for one in runtime.gradients if any(p in chosen for p in one.bucket.parameters)]


def _plans(old: Bucket, chosen: Iterable[nn.Parameter], group: int) -> Iterator[BucketPlan]:
    """Yield the plan of the bucket to train, and of the one for the rest, unless it is empty."""
    later = set(chosen)
    pairs = list(zip(old.layout.slots, old.parameters, strict=True))
    for number, is_mine in ((group, True), (-1, False)):
        members = [
            Member(slot.name, parameter, number)
            for slot, parameter in pairs
            if (parameter in later) == is_mine
        ]
        if members:
            is_all = len(members) == len(pairs)
            name = old.name if is_all else f"{old.name}[{members[0].name}..]"
            yield BucketPlan(name, old.partition, members, [], old.row_numel)


def merged(
    olds: Sequence[Bucket], news: Sequence[Bucket], order: Mapping[nn.Parameter, int]
) -> list[Bucket]:
    """Insert each new bucket before the first old one whose parameters come later in the model.

    Gradients arrive in the reverse order, and reductions wait for each other.
    """

    def place(bucket: Bucket) -> int:
        return min((order[p] for p in bucket.parameters if p in order), default=-1)

    return list(merge(olds, news, key=place))


def renamed(buckets: Iterable[Bucket], names: Mapping[nn.Parameter, str]) -> list[str]:
    """Set the full names of parameters to those that they have in the model now.

    Returns:
        The names of parameters that were removed from the model since the last call.
    """
    gone = []
    for bucket in buckets:
        own = []
        for slot, parameter in zip(bucket.layout.slots, bucket.parameters, strict=True):
            name = names.get(parameter)
            if name is None and not slot.name.endswith(_GONE):
                gone.append(slot.name)
            own.append(name or slot.name.removesuffix(_GONE) + _GONE)
        bucket.rename(own)
    return gone


_GONE = " (no longer in the model)"


def has_gone(name: str) -> bool:
    """Return True if a bucket's name for a parameter says that it is not in the model any more."""
    return name.endswith(_GONE)
