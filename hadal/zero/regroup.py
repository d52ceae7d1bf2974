"""Parameters that come to be trained later: only the buckets that hold them are divided."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torch import nn

from hadal.zero.bucket import Bucket
from hadal.zero.gradients import Gradients
from hadal.zero.grouping import BucketPlan, Member
from hadal.zero.runtime import ZeroRuntime


def train_later(
    runtime: ZeroRuntime, parameters: Iterable[nn.Parameter], group: int
) -> list[Gradients]:
    """Give parameters that lie in untrained buckets buckets of their own, as param group `group`.

    All ranks must call it together, with the same parameters, between two updates. A bucket that
    holds other parameters too is divided: the rest stays untrained, in the same order. Masters
    begin with the weights as they stand.

    Returns:
        What collects the gradients of the new buckets, in the order of the buckets.
    """
    chosen = dict.fromkeys(parameters)
    olds = set(map(runtime.bucket_of.__getitem__, chosen))
    for old in [bucket for bucket in runtime.buckets if bucket in olds]:
        runtime.gathering.need(old)
        old.check_links()
        plans = _plans(old, chosen, group)
        parts = [old.divided(plan) for plan in plans]
        runtime.replace(old, parts)
        for bucket in parts:
            bucket.reshard()
    return [one for one in runtime.gradients if any(p in chosen for p in one.bucket.parameters)]


def _plans(old: Bucket, chosen: Iterable[nn.Parameter], group: int) -> Iterator[BucketPlan]:
    """The bucket that will be trained, and the one that will not, if anything is left for it."""
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
