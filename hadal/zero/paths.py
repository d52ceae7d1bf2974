"""Known paths of forward and backward through the model: traces, predictions and plans.

All ranks learn the same at the same moments, and predict the same, so nothing here communicates,
except to report where their paths differ.
"""

from __future__ import annotations

import hashlib
import logging
from bisect import bisect_right
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

import torch

from hadal.comm import Ranks
from hadal.comm.collectives import gather_objects, max_
from hadal.errors import MismatchError
from hadal.zero.agreement import Meeting
from hadal.zero.policy import Divergence, Limits

_log = logging.getLogger(__name__)

_DIGEST_BITS = 48
# If two paths happen to have equal digests, the digests of their plans differ.
_PATH_BITS, _MOMENT_BITS = 36, 20
# Plans differ by the buckets gathered when they begin and by the trace that follows: there are few.
_PLANS = 128


# ---- traces and plans: no tensors ----------------------------------------------------------------


class PassKind(Enum):
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


def make_plan(
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
    # For each use, the position at which its bucket's previous use is over.
    until: dict[int, int] = {}
    free_from = []
    for use in uses:
        free_from.append(until.get(use.bucket, 0))
        until[use.bucket] = use.until
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
            room = limits.live_numel - max(gathered[position:index])
            may_start = numels[index] <= min(room, limits.prefetch_numel - ahead)
            if not may_start and limits.live_numel:
                # Uses of one unit end together.
                units = {uses[each].until for each in waiting[first_ahead : begun + 1]}
                may_start = len(units) == 1
            if not may_start or free_from[index] > position:
                break
            _occupy(gathered, _Interval(position, index, numels[index]))
            ahead += numels[index]
            begun += 1
        started.append(begun)
    return tuple(uses[index].bucket for index in waiting), tuple(started)


def _occupy(gathered: list[int], interval: _Interval) -> None:
    for position in range(interval.start, interval.stop):
        gathered[position] += interval.numel


def held_along(made: Plan, sizes: Sequence[int]) -> list[int]:
    """Return what is gathered while each use of a plan begins, in the unit of `sizes`."""
    freed: dict[int, set[int]] = {}
    for use, stays in zip(made.uses, made.keeps, strict=True):
        if not stays:
            freed.setdefault(use.until, set()).add(use.bucket)
    here, begun, found = set(made.held), 0, []
    for position, started in enumerate(made.started):
        here -= freed.get(position, set())
        here.update(made.gathers[begun:started])
        begun = started
        found.append(sum(sizes[bucket] for bucket in here))
    return found


# ---- passes and predictions ----------------------------------------------------------------------

_NOTHING = Trace(())

# A prediction earns credit when it comes true and loses credit when it does not; it starts with the
# most. Without credit (after three failures in a row, or more than one in four) it is not used.
_EARNED, _COST, _CREDIT = 1, 3, 9
# The number of contexts of one kind that are remembered.
_CONTEXTS = 48

# The paths of the two preceding passes; `_ANY` matches every path.
_Context = tuple[int | None, int | None]
_ANY = -1
_LAST_RESORT: _Context = (_ANY, _ANY)


class PassRecord:
    """A pass (forward or backward) on this rank: its progress along its plan and its uses."""

    def __init__(self, kind: PassKind, plan: Plan | None = None, *, keeps: bool = True) -> None:
        self.kind = kind
        self.plan = plan
        self.keeps = keeps
        """False: weights change after it, so that without a plan no bucket stays gathered."""
        self.position = 0
        """The position of the next use in the plan."""
        self.issued = 0
        """The number of the plan's gathers that have started."""
        self.has_left = False
        """True: this rank has taken part in the whole plan; what it needs now is announced."""
        self.has_raised = False
        """True: it was a forward that raised on this rank."""
        self.has_learned = False
        """True: a read was found that will be announced in advance from now on."""
        self.was_early = False
        """True: a reduction was due before its gradients had arrived."""
        self._used: list[int] = []
        self._planned: dict[int, int] = {}
        self._ends: dict[int, int] = {}
        self._open: dict[int, int] = {}
        self._reductions: list[tuple[int, int]] = []

    @property
    def follows(self) -> bool:
        """Return True if gathers follow the plan and are not announced."""
        return self.plan is not None and not self.has_left

    def next_use(self, bucket: int) -> int | None:
        """Return the position of the plan's next use of a bucket, if it has one."""
        assert self.plan is not None  # it is followed
        try:
            self._planned[bucket] = self.plan.path.index(bucket, self.position)
        except ValueError:
            return None
        return self._planned[bucket]

    def begin_use(self, bucket: int) -> None:
        """Record the beginning of a use of a bucket."""
        self._open[bucket] = len(self._used)
        self._used.append(bucket)

    def end_use(self, bucket: int) -> int | None:
        """Record the end of a bucket's use; return its position in the plan, if it has one."""
        number = self._open.pop(bucket, None)
        if number is None:
            return None
        self._ends[number] = len(self._used)
        return self._planned.get(bucket)

    def note_reduction(self, bucket: int) -> None:
        """Record a started reduction; `bucket` is -1 for one whose uses are not recorded."""
        self._reductions.append((len(self._used), bucket))

    def trace(self) -> Trace:
        """Return the trace of the uses so far."""
        ends = (self._ends.get(number, len(self._used)) for number in range(len(self._used)))
        uses = [Use(*pair) for pair in zip(self._used, ends, strict=True)]
        final = {use.bucket: use.until for use in uses}
        # A bucket without gradients was reduced early; next time it may be used before that.
        starts = (max(at, final.get(bucket, 0)) for at, bucket in self._reductions)
        latest = list(accumulate(starts, max))
        return Trace(
            tuple(use._replace(reduced=bisect_right(latest, i)) for i, use in enumerate(uses))
        )

    def word(self, trace: Trace) -> int:
        """Return this rank's word for the end: its path, its outcome and its moments."""
        path = digest_of(self.kind.value, trace.path, bits=_PATH_BITS)
        path = path << 2 | self.has_left << 1 | self.has_learned
        moments = digest_of(trace.moments, bits=_MOMENT_BITS - 1) << 1 | self.was_early
        return path << _MOMENT_BITS | moments


@dataclass(slots=True)
class _Memory:
    """The trace that followed some context."""

    trace: Trace
    credit: int = _CREDIT
    is_doubted: bool = False
    """True: another trace followed the last time; if one does again, it replaces this one."""


class Predictor:
    """A memory of which trace followed which.

    A forward is predicted from the two before it, so that two alternating models, or two steps of
    each, are distinguished; if this order is new, from the one before it; otherwise the latest
    trace is predicted. A backward is predicted from its forward, or from the backward just before.
    """

    def __init__(self) -> None:
        self._memories: dict[PassKind, dict[_Context, _Memory]] = {kind: {} for kind in PassKind}
        self._history: dict[PassKind, _Context] = dict.fromkeys(PassKind, (None, None))

    def forget(self, kind: PassKind) -> None:
        """Forget the traces of a kind, because the next ones will differ."""
        self._memories[kind].clear()

    def expected(self, kind: PassKind) -> Trace | None:
        """Return the trace to plan for; None if none is known or predictions failed too often."""
        memory = self._memory(kind)
        return None if memory is None or memory.credit <= 0 else memory.trace

    def likely(self, kind: PassKind, before: Trace | None = None) -> Trace | None:
        """Return the trace that may come next, or the backward that may follow `before`, if any."""
        if before is None:
            memory = self._memory(kind)
        else:
            memory = self._memories[kind].get((before.path_digest, None))
        return None if memory is None else memory.trace

    def came(
        self, kind: PassKind, trace: Trace | None, *, has_held: bool | None, is_learned: bool = True
    ) -> bool:
        """Record the end of a pass.

        Args:
            kind: its kind.
            trace: the trace of all ranks; None if the ranks took different paths.
            has_held: True if the prediction came true; None if nothing was planned.
            is_learned: True if the trace may occur again.

        Returns:
            True if the prediction will not be used any more.
        """
        memory = self._memory(kind)
        if memory is not None and has_held is not None:
            earned = _EARNED if has_held else -_COST
            memory.credit = min(_CREDIT, memory.credit + earned)
        if trace is not None and is_learned:
            self._learn(kind, trace, surprises=has_held is False)
        self._note(kind, None if trace is None else trace.path_digest)
        return memory is not None and memory.credit <= 0

    def _contexts(self, kind: PassKind) -> list[_Context]:
        """Return the contexts to search, the nearest first."""
        nearest = self._history[kind]
        if kind is PassKind.BACKWARD:
            return [nearest]
        return [nearest, (_ANY, nearest[1]), _LAST_RESORT]

    def _memory(self, kind: PassKind) -> _Memory | None:
        memories = self._memories[kind]
        found = (memories[context] for context in self._contexts(kind) if context in memories)
        return next(found, None)

    def _learn(self, kind: PassKind, trace: Trace, *, surprises: bool) -> None:
        memories = self._memories[kind]
        if len(memories) >= _CONTEXTS:
            memories.clear()
        for context in self._contexts(kind):
            known = memories.setdefault(context, _Memory(trace))
            is_other = known.trace != trace
            known.is_doubted = (
                is_other and surprises and not known.is_doubted and context != _LAST_RESORT
            )
            if not known.is_doubted:
                known.trace = trace

    def _note(self, kind: PassKind, path: int | None) -> None:
        if kind is PassKind.BACKWARD:
            self._history[kind] = (self._history[kind][0], path)
            return
        self._history[kind] = (self._history[kind][1], path)
        if kind is PassKind.FORWARD:
            self._history[PassKind.BACKWARD] = (path, None)


class Paths:
    """The traces that all ranks agree on, and the plans made of them."""

    def __init__(self, ranks: Ranks, limits: Limits, divergence: Divergence) -> None:
        self._ranks = ranks
        self._limits = limits
        self._divergence = divergence
        self._names: Sequence[str] = ()
        self._numels: Sequence[int] = ()
        self._predictor = Predictor()
        self._plans: dict[tuple[int, int, frozenset[int]], Plan] = {}
        self._has_reported = False

    def restart(self, names: Sequence[str], numels: Sequence[int]) -> None:
        """Forget everything but the buckets' names and elements."""
        self._names, self._numels = names, numels
        self._predictor = Predictor()
        self._plans.clear()

    def plan_for(self, kind: PassKind, held: frozenset[int], *, last: bool) -> Plan | None:
        """Return the plan if buckets `held` are gathered now; None if gathers are announced.

        `last`: no gathered bucket is needed after the end.
        """
        trace = self._predictor.expected(kind)
        if trace is None:
            return None
        following = _NOTHING if last else self._following(kind, trace)
        key = (trace.digest, following.digest, held)
        if key not in self._plans:
            if len(self._plans) >= _PLANS:
                self._plans.clear()
            self._plans[key] = make_plan(
                trace.uses, self._numels, self._limits, held, following.uses
            )
        return self._plans[key]

    def _following(self, kind: PassKind, trace: Trace) -> Trace:
        """Return the trace to expect after a pass of this kind."""
        if kind is PassKind.EVALUATION:
            return trace
        if kind is PassKind.FORWARD:
            known = self._predictor.likely(PassKind.BACKWARD, trace)
        else:
            known = self._predictor.likely(PassKind.FORWARD)
        reverse = enumerate(reversed(trace.path))
        return known or Trace(tuple(Use(bucket, at + 1) for at, bucket in reverse))

    def forget(self, kind: PassKind) -> None:
        """Forget a kind's traces, on all ranks alike; they will be recorded again."""
        self._predictor.forget(kind)

    def settle(self, record: PassRecord, trace: Trace, met: Meeting) -> None:
        """Learn from the end of a pass, at which all ranks have met.

        Raises:
            MismatchError: ranks took different paths, and that is not tolerated.
        """
        outcomes = {word >> _MOMENT_BITS for word in met.words}
        is_alike = len(outcomes) == 1
        planned = self._predictor.expected(record.kind) if record.plan else None
        has_left = any(outcome & 2 for outcome in outcomes)
        if planned and not has_left and not (is_alike and trace.path != planned.path):
            self._predictor.came(record.kind, planned, has_held=True)
            if any(word & 1 for word in met.words):
                self.forget(record.kind)  # the next plan waits for the late gradients
            if not is_alike:
                self._settle_parting(record, trace)
            return
        seen = None
        if is_alike:
            seen = trace if met.is_alike or record.has_learned else self._joined(trace)
        gives_up = self._predictor.came(
            record.kind,
            seen,
            has_held=False if record.plan else None,
            is_learned=not record.has_learned,
        )
        if not is_alike:
            self._settle_parting(record, trace, gives_up=gives_up)
        elif planned is not None:
            paths, owners = [planned.path, trace.path], ["as planned, it", "now it"]
            self._report(record.kind, paths, owners, gives_up=gives_up)

    @property
    def _is_reported(self) -> bool:
        divergence = self._divergence
        return divergence.is_tolerated and self._has_reported and not divergence.reports_each

    def _joined(self, trace: Trace) -> Trace:
        """Return the trace with the latest moments of all ranks, which are on the same path."""
        moments = torch.tensor(trace.moments, dtype=torch.int32)
        max_(moments, self._ranks, "the agreement on the moments of a path")
        return trace.at(moments.tolist())

    def _settle_parting(self, record: PassRecord, trace: Trace, *, gives_up: bool = False) -> None:
        if self._is_reported:
            return
        paths = gather_objects(trace.path, self._ranks)
        other = next((rank for rank, path in enumerate(paths) if path != paths[0]), None)
        if other is None:
            # One rank freed a bucket between two uses of it: the paths do not differ.
            return
        owners = ["rank 0", f"rank {other}"]
        self._report(
            record.kind, [paths[0], paths[other]], owners, is_apart=True, gives_up=gives_up
        )

    def _report(
        self,
        kind: PassKind,
        paths: Sequence[Sequence[int]],
        owners: Sequence[str],
        *,
        is_apart: bool = False,
        gives_up: bool = False,
    ) -> None:
        """Warn of paths that differ; raise if ranks are apart and that is not tolerated."""
        parting = describe_parting(paths, owners, self._names)
        if is_apart and not self._divergence.is_tolerated:
            raise MismatchError(
                f"the ranks took different paths through the model in {kind.value}: {parting}. Let"
                " all ranks run the same modules, or set zero_optimization.divergent_ranks to"
                ' "auto" or true.'
            )
        if self._ranks.rank == 0 and (self._divergence.reports_each or not self._has_reported):
            _log.warning(
                "the path through the model changed in %s: %s. Each gather is announced to all"
                " ranks %s%s",
                kind.value,
                parting,
                "here from now on" if gives_up else "where the plan does not have it",
                ""
                if self._divergence.reports_each
                else " (reported once; zero_optimization.log_trace_cache_warnings reports each)",
            )
        self._has_reported = True


def describe_parting(
    paths: Sequence[Sequence[int]], owners: Sequence[str], names: Sequence[str]
) -> str:
    """Describe where paths first differ: the name of the bucket that each owner used there."""
    common, longest = 0, max(map(len, paths))
    # Equal paths end together.
    while common < longest and len({tuple(path[common : common + 1]) for path in paths}) == 1:
        common += 1
    after = f"after {names[paths[0][common - 1]]}" if common else "at the beginning"
    went = [
        f"{owner} {'used ' + names[path[common]] if common < len(path) else 'reached the end'}"
        for owner, path in zip(owners, paths, strict=True)
    ]
    return f"{after}, {'; '.join(went)}"
