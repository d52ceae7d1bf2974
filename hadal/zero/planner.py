"""Traces of passes, and plans made of them: the gathers and frees at each use. No tensors."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

from hadal.zero.policy import Limits

_DIGEST_BITS = 48


class Kind(Enum):
    """The kinds of passes, each of which has its own traces."""

    FORWARD = "forward"
    EVALUATION = "forward without gradients"
    BACKWARD = "backward"


class Use(NamedTuple):
    """One use of a bucket; the uses of a trace are numbered from 0."""

    bucket: int
    """The bucket's number."""
    until: int
    """The number of the use before which this one ends (the number of uses: at the very end)."""
    reduced: int = 0
    """The number of reductions that every rank has started before this use begins."""


def digest_of(*values: object, bits: int = _DIGEST_BITS) -> int:
    """Return a number of `bits` bits that is the same in every process and differs for others."""
    digest = hashlib.blake2b(repr(values).encode(), digest_size=8)
    return int.from_bytes(digest.digest(), "big") >> (64 - bits)


@dataclass(frozen=True)
class Trace:
    """The uses of one pass, in the order in which they began."""

    uses: tuple[Use, ...]

    @cached_property
    def digest(self) -> int:
        """A number that is equal for equal traces."""
        return digest_of(self.uses)

    @cached_property
    def path_digest(self) -> int:
        """A number that is equal for traces of the same path."""
        return digest_of(self.path)

    @property
    def moments(self) -> tuple[int, ...]:
        """The ends of uses and starts of reductions, as numbers that are larger the later."""
        return (*(use.until for use in self.uses), *(-use.reduced for use in self.uses))

    def at(self, moments: Sequence[int]) -> Trace:
        """Return the same path with other `moments`."""
        count = len(self.uses)
        ends, starts = moments[:count], moments[count:]
        lines = zip(self.path, ends, starts, strict=True)
        return Trace(tuple(Use(bucket, end, -start) for bucket, end, start in lines))

    @property
    def path(self) -> tuple[int, ...]:
        """The numbers of the buckets used, without the ends of their uses."""
        return tuple(use.bucket for use in self.uses)


def kept_until_backward(numels: Sequence[int], limits: Limits) -> tuple[bool, ...]:
    """Decide which buckets stay gathered until backward if the forward's trace is not known.

    `numels` are the buckets' elements in forward order. Between a bucket's use in forward and the
    one in backward, the buckets after it are used twice. It is kept if those uses have at most
    `limits.reuse_numel` elements; buckets with the nearest next use are kept first, up to
    `limits.live_numel` elements in all.
    """
    kept = [False] * len(numels)
    behind = live = 0
    for index in range(len(numels) - 1, -1, -1):
        numel = numels[index]
        if 2 * behind <= limits.reuse_numel and live + numel <= limits.live_numel:
            kept[index] = True
            live += numel
        behind += numel
    return tuple(kept)


@dataclass(frozen=True)
class Plan:
    """The buckets to gather and to free at each use of a known trace."""

    uses: tuple[Use, ...]
    held: tuple[int, ...]
    """Buckets that are already gathered and kept; others are freed before the first use."""
    gathers: tuple[int, ...]
    """The buckets to gather, in the order in which the gathers start on all ranks."""
    started: tuple[int, ...]
    """The number of gathers that have started when each use begins, including its own."""
    keeps: tuple[bool, ...]
    """For each use, True if its bucket stays gathered afterwards."""

    @cached_property
    def digest(self) -> int:
        """A number that is equal for equal plans."""
        return digest_of(self.uses, self.held, self.gathers, self.started, self.keeps)

    @cached_property
    def path(self) -> tuple[int, ...]:
        """The numbers of the buckets used."""
        return tuple(use.bucket for use in self.uses)

    @cached_property
    def kept_at_end(self) -> frozenset[int]:
        """The buckets that are still gathered after all uses."""
        last = {use.bucket: keep for use, keep in zip(self.uses, self.keeps, strict=True)}
        return frozenset({b for b in self.held if b not in last} | {b for b in last if last[b]})


class _Interval(NamedTuple):
    """A bucket between two uses, or between its gather and its use: positions [start, stop)."""

    start: int
    stop: int
    numel: int


def plan(
    uses: Sequence[Use],
    sizes: Sequence[int],
    limits: Limits,
    held: Collection[int] = (),
    following: Sequence[Use] = (),
) -> Plan:
    """Decide which buckets to gather and to free along a trace.

    A bucket stays gathered between two uses if the uses between them have at most
    `limits.reuse_numel` elements; buckets with the nearest next use are kept first. Gathers start
    in the order of the uses, each as soon as its bucket is free and at most `limits.prefetch_numel`
    elements are gathered ahead of their use. Both happen only while at most `limits.live_numel`
    elements are gathered, including those in use. The unit that is used next is always gathered
    ahead, whatever its size, unless one of these two limits is 0.

    Args:
        uses: the trace.
        sizes: the elements of each bucket, by its number.
        limits: limits for keeping and for gathering ahead.
        held: the buckets that are gathered at the beginning.
        following: the uses expected after the end; buckets that they need soon are kept.
    """
    count = len(uses)
    line = [*uses, *(Use(use.bucket, use.until + count) for use in following)]
    numels = [sizes[use.bucket] for use in line]
    gathered = _in_use(line, numels)
    is_kept, is_held = _keep(line, numels, sizes, limits, gathered, sorted(held))
    gathers, started = _gather_ahead(line[:count], numels, limits, gathered, is_kept | is_held)
    last = {use.bucket: index for index, use in enumerate(line)}
    next_use: dict[int, int] = {}
    keeps = [False] * count
    for index in range(len(line) - 1, -1, -1):
        bucket = line[index].bucket
        if index < count and index != last[bucket]:
            keeps[index] = next_use[bucket] in is_kept
        next_use[bucket] = index
    return Plan(
        uses=tuple(uses),
        held=tuple(sorted(bucket for bucket, first in next_use.items() if first in is_held)),
        gathers=gathers,
        started=started,
        keeps=tuple(keeps),
    )


def _in_use(line: Sequence[Use], numels: Sequence[int]) -> list[int]:
    """Return how many elements are in use at each position."""
    changes = [0] * (len(line) + 1)
    for index, (use, numel) in enumerate(zip(line, numels, strict=True)):
        changes[index] += numel
        changes[use.until] -= numel
    return list(accumulate(changes))[: len(line)]


def _keep(
    line: Sequence[Use],
    numels: Sequence[int],
    sizes: Sequence[int],
    limits: Limits,
    gathered: list[int],
    held: Sequence[int],
) -> tuple[set[int], set[int]]:
    """Return the positions whose bucket is still gathered from an earlier use, or the start."""
    before = [0, *accumulate(numels)]
    free_since: dict[int, int] = dict.fromkeys(held, 0)
    untouched = set(held)
    candidates: list[tuple[int, int, bool, _Interval]] = []
    for index, use in enumerate(line):
        since = free_since.get(use.bucket)
        if since is not None:
            distance = before[index] - before[since]
            interval = _Interval(since, index, sizes[use.bucket])
            if distance <= limits.reuse_numel:
                candidates.append((distance, index, use.bucket in untouched, interval))
        untouched.discard(use.bucket)
        free_since[use.bucket] = use.until
    is_kept: set[int] = set()
    is_held: set[int] = set()
    # Leave room for the next gather, so that kept buckets do not make all other uses wait.
    spared = [*numels[1:], 0] if limits.prefetch_numel else [0] * len(line)
    for _, index, is_first, interval in sorted(candidates):
        window = range(interval.start, interval.stop)
        if all(gathered[p] + spared[p] + interval.numel <= limits.live_numel for p in window):
            _occupy(gathered, interval)
            (is_held if is_first else is_kept).add(index)
    return is_kept, is_held


def _gather_ahead(
    uses: Sequence[Use],
    numels: Sequence[int],
    limits: Limits,
    gathered: list[int],
    is_whole: set[int],
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the order of the gathers, and how many have started at each position."""
    waiting = [index for index in range(len(uses)) if index not in is_whole]
    free_from = _free_from(uses)
    begun = 0
    started = []
    for position in range(len(uses)):
        if begun < len(waiting) and waiting[begun] == position:
            begun += 1
        first_ahead = begun
        while first_ahead and waiting[first_ahead - 1] > position:
            first_ahead -= 1
        ahead = sum(numels[index] for index in waiting[first_ahead:begun])
        while begun < len(waiting) and limits.prefetch_numel:
            index = waiting[begun]
            interval = _Interval(position, index, numels[index])
            fits = ahead + numels[index] <= limits.prefetch_numel
            may_start = fits and _has_room(gathered, interval, limits)
            if not may_start and limits.live_numel:
                # Uses of one unit end together.
                units = {uses[each].until for each in waiting[first_ahead : begun + 1]}
                may_start = len(units) == 1
            if not may_start or free_from[index] > position:
                break
            _occupy(gathered, interval)
            ahead += interval.numel
            begun += 1
        started.append(begun)
    return tuple(uses[index].bucket for index in waiting), tuple(started)


def _free_from(uses: Sequence[Use]) -> list[int]:
    """Return, for each use, the position at which its bucket's previous use is over."""
    until: dict[int, int] = {}
    free = []
    for use in uses:
        free.append(until.get(use.bucket, 0))
        until[use.bucket] = use.until
    return free


def _has_room(gathered: Sequence[int], interval: _Interval, limits: Limits) -> bool:
    window = gathered[interval.start : interval.stop]
    return max(window) + interval.numel <= limits.live_numel


def _occupy(gathered: list[int], interval: _Interval) -> None:
    for position in range(interval.start, interval.stop):
        gathered[position] += interval.numel


def peak_of(made: Plan, sizes: Sequence[int]) -> int:
    """Return the most of what is gathered at a time along a plan, in the unit of `sizes`."""
    here, begun, most = set(made.held), 0, 0
    for position, started in enumerate(made.started):
        earlier = zip(made.uses[:position], made.keeps, strict=False)
        here -= {use.bucket for use, stays in earlier if use.until == position and not stays}
        here.update(made.gathers[begun:started])
        begun, most = started, max(most, sum(sizes[bucket] for bucket in here))
    return most
