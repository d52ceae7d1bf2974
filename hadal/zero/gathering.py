"""When each bucket is gathered and freed.

Ranks meet at both ends of each pass (forward or backward). In the first ones every gather is
announced (see `agreement.py`) and the uses are recorded. If all ranks recorded the same uses, the
next passes follow a plan: the gathers start in the plan's order on every rank, ahead of their use,
and no rank announces anything until the end.

The others rely on a rank's part in all gathers of the plan, so it takes part also in those that it
does not need. If it needs a bucket that the rest of the plan lacks, it takes part in that rest
first; then it announces what it needs, and the others serve their shards when they reach the end.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from enum import Enum, auto

import torch
from torch import Tensor, nn

from hadal.comm import Ranks
from hadal.comm.works import expect_in_step, in_step, is_cut_short
from hadal.device import unwatched
from hadal.errors import (
    CommunicationError,
    HadalError,
    LossError,
    MismatchError,
    ShardedAccessError,
)
from hadal.zero.agreement import Agreement, Marker, Meeting, Reductions
from hadal.zero.bucket import Bucket, Weights
from hadal.zero.grouping import Unit
from hadal.zero.parameters import ReadListener
from hadal.zero.paths import PassKind, PassRecord, Paths, Plan, kept_until_backward
from hadal.zero.policy import Divergence, Limits

_log = logging.getLogger(__name__)


class Phase(Enum):
    """The phase of the model's work."""

    IDLE = auto()
    FORWARD = auto()
    BACKWARD = auto()


# The number of forwards and backwards in which every operation is watched because of a view.
_PHASES = 8


class Uses:
    """The buckets whose weights are gathered on use, by number and by unit."""

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


def _storage_of(tensor: Tensor) -> torch.UntypedStorage | None:
    """Return a tensor's storage, or None if it has none, like sparse tensors or under vmap."""
    try:
        return tensor.untyped_storage()
    except NotImplementedError:
        return None


class KeptViews:
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
        """Look for views before a bucket is freed; return True if their reads would be missed."""
        if not bucket.has_other_views:
            return False
        self._left[bucket] = _PHASES
        return not self.are_watched


class Gathering:
    """The gathers and frees of the buckets whose weights are sharded."""

    def __init__(
        self,
        units: Sequence[Unit],
        buckets: Sequence[Bucket],
        ranks: Ranks,
        limits: Limits,
        divergence: Divergence,
        reductions: Reductions,
    ) -> None:
        self.phase = Phase.IDLE
        self._ranks = ranks
        self._limits = limits
        self._reductions = reductions
        self.uses = Uses()
        self._agreement = Agreement(ranks, reductions)
        self._paths = Paths(ranks, limits, divergence)
        self.take_up(buckets)
        self.uses.extend(units)
        self._announces_all = divergence.is_expected
        self._record = PassRecord(PassKind.FORWARD)
        self._next: Plan | None = None
        # Buckets in use in the current forward or backward: only these need no check.
        self._open: set[Bucket] = set()
        self._running: list[Unit] = []
        # The number of `whole` contexts that hold each bucket; it is not freed inside them.
        self._pins: Counter[Bucket] = Counter()
        self._listener = ReadListener(self.on_read)
        self.kept_views = KeptViews()
        # Freed buckets whose memory is still there, as somebody had a view of it.
        self._viewed: set[Bucket] = set()
        self.meeting: AbstractContextManager[object] = nullcontext()
        """Context around the meetings at both ends of a backward, which measures their time."""
        self.gives_empty_state = False
        """True: `state_dict` returns empty tensors for sharded values; otherwise it raises."""

    def take_up(self, buckets: Iterable[Bucket]) -> None:
        """Manage the buckets that are sharded; their uses are not known yet."""
        self.uses.take([bucket for bucket in buckets if bucket.partition.weights])
        self._restart()

    def replace(self, old: Bucket, parts: Sequence[Bucket]) -> None:
        """Replace a bucket by new ones, which have taken over its parameters."""
        if old in self.uses.number:
            self._viewed.discard(old)
            self.uses.replace(old, parts)
            self._restart()

    def _restart(self) -> None:
        """Forget everything but the buckets."""
        self._buckets = self._agreement.buckets = self.uses.buckets
        numels = [bucket.layout.numel for bucket in self._buckets]
        kept = kept_until_backward(numels, self._limits)
        self._reads_ahead = max((bucket.offload.reads_ahead for bucket in self._buckets), default=0)
        self._kept = {bucket for bucket, keep in zip(self._buckets, kept, strict=True) if keep}
        self._paths.restart([bucket.name for bucket in self._buckets], numels)

    @property
    def is_at_rest(self) -> bool:
        """Return True if no pass is running, and no context keeps buckets readable."""
        return self.phase is Phase.IDLE and not any(self._pins.values())

    # ---- the uses of one bucket ------------------------------------------------------------------

    def begin_use(self, bucket: Bucket) -> None:
        """Make a bucket's weights readable."""
        number = self.uses.number.get(bucket)
        if number is None or bucket in self._open:
            return
        with unwatched():
            if self.phase is not Phase.IDLE:
                if self._record.follows:
                    self._follow_to(number)
                self._record.begin_use(number)
            if bucket.state is Weights.ARRIVING:
                bucket.wait_unshard()
            elif bucket.state is Weights.SHARDED:
                # Outside of forward and backward, weights are read and saved exactly.
                self._agreement.request(number, exact=self.phase is Phase.IDLE)
            if self.phase is not Phase.IDLE:
                self._open.add(bucket)

    @in_step
    def _follow_to(self, number: int) -> None:
        """Take part in the plan up to the next use of a bucket, or leave a plan without one."""
        position = self._record.next_use(number)
        if position is not None:
            self._skip_to(position)
            self._start_due()
        if position is None or self._buckets[number].state is Weights.SHARDED:
            self._leave_plan(number)

    def _skip_to(self, stop: int) -> None:
        """Take part in the plan before position `stop`, whose uses this rank skips."""
        record, plan = self._record, self._record.plan
        assert plan is not None  # it is followed
        while record.position < stop:
            number, keeps = plan.path[record.position], plan.keeps[record.position]
            bucket = self._buckets[number]
            if bucket.state is Weights.FULL and bucket not in self._open:
                # Reads of weights that are whole already are not seen: it may have been used.
                record.begin_use(number)
                record.end_use(number)
            self._start_due()
            bucket.wait_unshard()
            is_read = bucket in self._open or self._is_busy(bucket) or bucket.has_other_views
            if not keeps and not is_read:
                self._free(bucket)

    def _start_due(self) -> None:
        """Start the collectives that the plan schedules for its next use, and go past it."""
        record, plan = self._record, self._record.plan
        assert plan is not None  # it is followed
        self._start_due_reductions()
        for number in plan.gathers[record.issued : plan.started[record.position]]:
            if self._buckets[number].state is Weights.SHARDED:
                self._buckets[number].start_unshard()
            else:
                # It is still in use here, but the other ranks have freed it.
                self._buckets[number].serve()
            record.issued += 1
        for number in plan.gathers[record.issued : record.issued + self._reads_ahead]:
            self._buckets[number].read_ahead()
        record.position += 1

    @in_step
    def _leave_plan(self, wanted: int | None = None) -> None:
        """Take part in the rest of the plan's collectives; keep the wanted bucket."""
        record, plan = self._record, self._record.plan
        assert plan is not None  # it was followed
        for stop in plan.started[record.position :]:
            self._start_due_reductions()
            for number in plan.gathers[record.issued : stop]:
                if number == wanted and self._buckets[number].state is Weights.SHARDED:
                    self._buckets[number].unshard()
                else:
                    self._buckets[number].serve()
                record.issued += 1
            record.position += 1
        if self.phase is Phase.BACKWARD:
            record.was_early |= self._reductions.start_due(None)
        record.has_left = True

    def _start_due_reductions(self) -> None:
        """Start the reductions that other ranks may wait for from the next use on."""
        record = self._record
        if record.plan is not None and self.phase is Phase.BACKWARD:
            due = record.plan.uses[record.position].reduced
            record.was_early |= self._reductions.start_due(due)

    def end_use(self, bucket: Bucket) -> None:
        """End a use of a bucket and free it, unless it is used elsewhere or needed again soon."""
        number = self.uses.number.get(bucket)
        if number is None or bucket.state is not Weights.FULL or self._is_busy(bucket):
            return
        self._open.discard(bucket)
        record, position = self._record, self._record.end_use(number)
        if self.phase is Phase.IDLE:
            stays = False
        elif record.plan is not None and record.follows:
            stays = position is None or record.plan.keeps[position]
        else:
            stays = record.keeps and bucket in self._kept
        # Reads of a view are not announced, so a bucket that has one stays until the pass ends.
        if not stays and (not self.kept_views.note(bucket) or self.phase is Phase.IDLE):
            self._free(bucket)
        else:
            bucket.keep_for_current()

    def _is_busy(self, bucket: Bucket) -> bool:
        running = any(bucket in self.uses.of(unit) for unit in self._running)
        return running or bool(self._pins[bucket])

    def _free(self, bucket: Bucket) -> None:
        with unwatched():
            if not bucket.reshard(in_use=self.phase is not Phase.IDLE):
                self._viewed.add(bucket)

    def free_all(self, but: Collection[Bucket] = ()) -> None:
        """Free all gathered buckets except some."""
        for bucket in self._buckets:
            if bucket.state is Weights.FULL and bucket not in but:
                self.kept_views.note(bucket)
                self._free(bucket)
        self._free_unviewed()

    def _free_unviewed(self) -> None:
        """Free the memory of freed buckets of which there were views, and are none any more."""
        self._viewed = {bucket for bucket in self._viewed if not bucket.free_unviewed()}

    # ---- reductions, whose order depends on the plan ---------------------------------------------

    def record_reduction(self, bucket: Bucket) -> None:
        """Record that a reduction of this backward was started on this rank."""
        self._record.note_reduction(self.uses.number.get(bucket, -1))

    @property
    def has_left(self) -> bool:
        """Return True if this rank left this backward's plan and started all its reductions."""
        return self._record.has_left

    def compare_progress(self) -> None:
        """Exchange only the progress of this backward's reductions."""
        with unwatched():
            self._agreement.compare_progress()

    @property
    def starts_together(self) -> bool:
        """Return True if reductions start in an exchange, once they are ready on all ranks.

        They do while gathers are announced. If a rank started one by itself while another rank
        announces a gather, it might block: a communicator's first collectives, and a device's first
        kernels, may block the host until all ranks have started them.
        """
        record = self._record
        return self.phase is Phase.BACKWARD and record.plan is None and bool(self.uses.units)

    @property
    def started_everywhere(self) -> int | None:
        """Return how many of this backward's reductions every rank will start by itself.

        None: all of them. A rank must wait only for these, because a waiting rank cannot help the
        others. On a plan they are the reductions due before its next use: a rank starts them before
        it takes part in that use's gathers.
        """
        record = self._record
        if self.phase is not Phase.BACKWARD or record.has_left or record.plan is None:
            return None
        uses = record.plan.uses
        return uses[record.position].reduced if record.position < len(uses) else None

    # ---- units -----------------------------------------------------------------------------------

    def before_use(self, unit: Unit) -> None:
        """Gather before a unit's forward (the first, or a recomputation inside backward)."""
        self._running.append(unit)
        for bucket in self.uses.of(unit):
            self.begin_use(bucket)

    def after_use(self, unit: Unit) -> None:
        """Free after a unit's forward, but not after a recomputation: its backward is next."""
        if unit in self._running:
            self._running.remove(unit)
        if self.phase is not Phase.BACKWARD:
            for bucket in self.uses.of(unit):
                self.end_use(bucket)

    def before_backward_of(self, unit: Unit) -> None:
        """Gather for a unit's backward: the gradient of its output has arrived."""
        for bucket in self.uses.of(unit):
            self.begin_use(bucket)

    def after_backward_of(self, unit: Unit) -> None:
        """Free buckets that expect no more gradients: that of the unit's input is complete."""
        if self.phase is Phase.BACKWARD:
            for bucket in self.uses.of(unit):
                if not bucket.trainable or not self._reductions.awaits(bucket):
                    self.end_use(bucket)

    def on_read(self, parameter: nn.Parameter) -> None:
        """Gather for an operation that is about to read a parameter.

        A read that no unit announced (by a module that uses another one's parameter) is remembered:
        from now on the running unit gathers that bucket too.
        """
        self._read(self.uses.bucket_of.get(parameter))

    def on_view(self, tensor: Tensor) -> None:
        """Gather for a read of a plain tensor, which may be a view of weights freed since.

        A module may return a view of its weight (`weight.t()`) that another one uses.
        """
        self._read(self.uses.bucket_at(tensor))

    def _read(self, bucket: Bucket | None) -> None:
        if bucket is None or bucket in self._open:
            return
        if self._running and self.uses.learn(self._running[-1], bucket):
            self._record.has_learned = True
        self.begin_use(bucket)

    def freed(self, unit: Unit) -> list[Bucket]:
        """Return the buckets of a unit that are sharded now."""
        return [bucket for bucket in self.uses.of(unit) if bucket.state is not Weights.FULL]

    def check_readable(self, unit: Unit) -> None:
        """Raise `ShardedAccessError` if a unit's values are freed."""
        for bucket in self.freed(unit)[:1]:
            raise ShardedAccessError(
                f"rank {self._ranks.rank}: the state of {unit.name} was read or loaded"
                f" while its values were sharded over the ranks (first"
                f" {bucket.layout.slots[0].name})."
                " Call engine.state_dict() on every rank, or use `with"
                " hadal.zero.GatheredParameters(module.parameters(), modifier_rank=0):`."
            )

    # ---- forward and backward --------------------------------------------------------------------

    def begin_forward(self) -> None:
        """Begin a forward of the whole model.

        An evaluation with weights that a context keeps whole needs no other rank: each rank may run
        as many as it likes, as in generating texts of its own lengths.
        """
        trains, is_whole = torch.is_grad_enabled(), all(self._pins[b] for b in self._buckets)
        if self.phase is not Phase.IDLE or (is_whole and not trains):
            return
        expect_in_step()
        record = PassRecord(PassKind.FORWARD if trains else PassKind.EVALUATION)
        if self._record.has_raised:
            # The others wait at the end of the forward that raised here, until one ends here too.
            record.plan, record.has_left = self._record.plan, True
        elif not self._announces_all:
            record.plan, _ = self._meet_before(record.kind, Marker.BEGINNING, last=False)
        self._begin(Phase.FORWARD, record)

    def end_forward(self, error: BaseException | None) -> None:
        """End the model's forward, which may have raised an error on this rank only."""
        if self.phase is not Phase.FORWARD:
            return
        with self._ending():
            if error is None:
                self._end(Marker.END_OF_FORWARD)
            else:
                self._record.has_raised = True
                self._abandon(error)

    def any_fault(self, mine: bool, *, boundary: bool = False) -> bool:
        """Return True if any rank reports a fault before a backward; else find the plan for it.

        `boundary`: weights will change after this backward.

        Raises:
            MismatchError: the ranks disagree on `boundary`, or a rank is at another point.
        """
        expect_in_step()
        fine = Marker.FINE_AND_LAST if boundary else Marker.FINE
        marker = Marker.AT_FAULT if mine else fine
        with self.meeting:
            self._next, met = self._meet_before(PassKind.BACKWARD, marker, last=boundary)
        return Marker.AT_FAULT in met.markers

    @contextmanager
    def backward(self, *, boundary: bool) -> Iterator[None]:
        """Run one backward inside the block.

        Raises:
            LossError: the block has raised on another rank.
        """
        plan, self._next = self._next, None
        self._begin(Phase.BACKWARD, PassRecord(PassKind.BACKWARD, plan, keeps=not boundary))
        with self._ending():
            try:
                yield
                self._reductions.start_rest()
            except BaseException as error:
                self._abandon(error)
                raise
            with self.meeting:
                self._end(Marker.END_OF_BACKWARD)

    def expect_another_backward(self) -> None:
        """Forget the backward's traces, because gradients will be complete at other moments."""
        self._paths.forget(PassKind.BACKWARD)

    def _meet_before(
        self, kind: PassKind, marker: Marker, *, last: bool
    ) -> tuple[Plan | None, Meeting]:
        """Meet the other ranks; return the plan that all of them will follow, if any."""
        plan = None
        if self.uses.units and not self._announces_all:
            held = frozenset(n for n, b in enumerate(self._buckets) if b.state is Weights.FULL)
            plan = self._paths.plan_for(kind, held, last=last)
        met = self._meet(marker, 0 if plan is None else 1 + plan.digest)
        return (plan if met.is_alike else None), met

    def _meet(self, marker: Marker, word: int = 0) -> Meeting:
        with unwatched():
            return self._agreement.finish(marker, word)

    def _begin(self, phase: Phase, record: PassRecord) -> None:
        self._record = record
        self._open.clear()
        if record.plan is not None and record.follows:
            held = {self._buckets[number] for number in record.plan.held}
            self.free_all(but=held.union(+self._pins))
        self._free_unviewed()
        self.kept_views.begin()
        self._listener.start()
        self.phase = phase

    def _end(self, marker: Marker) -> None:
        """Meet the other ranks at the end; serve until all are there."""
        record = self._record
        if record.plan is not None and record.follows:
            with unwatched(), in_step:
                self._skip_to(len(record.plan.uses))
        trace = record.trace()
        met = self._meet(marker, record.word(trace))
        self._wait_for_all()
        if Marker.AT_FAULT in met.markers:
            self._reductions.drop()
            raise LossError(
                f"rank {self._ranks.rank}: this backward raised on another rank, whose error says"
                " why; the gradients since the last update are dropped on all ranks"
            )
        if self.uses.units and not self._announces_all:
            self._paths.settle(record, trace, met)

    def _abandon(self, error: BaseException) -> None:
        """Take part in the rest of a pass after an error, because the others rely on it."""
        for bucket in self._buckets:
            bucket.forget_ahead()
        if isinstance(error, (CommunicationError, MismatchError)) or is_cut_short():
            return
        try:
            if self._record.plan:
                with unwatched():
                    self._leave_plan()
            self._wait_for_all()
            if self.phase is Phase.BACKWARD:
                self._reductions.start_rest()
                self._meet(Marker.AT_FAULT)
                self._reductions.drop()
        except (HadalError, torch.OutOfMemoryError) as second:
            # `error` is being raised already. Messages are matched by their order, so this rank
            # cannot take part in later ones either.
            _log.warning("other ranks wait for this one, which cannot go on: %s", second)

    def _wait_for_all(self) -> None:
        """Wait for the buckets that were gathered ahead and not used."""
        with unwatched():
            for bucket in self._buckets:
                bucket.wait_unshard()

    @contextmanager
    def _ending(self) -> Iterator[None]:
        """End a pass after the block: only kept buckets stay gathered."""
        try:
            yield
        finally:
            self._listener.stop()
            self._running.clear()
            self._open.clear()
            record, kept = self._record, self._kept if self._record.keeps else set()
            if record.plan is not None and record.follows:
                kept = {self._buckets[number] for number in record.plan.kept_at_end}
            try:
                self.free_all(but=kept.union(+self._pins))  # as in the pass: it reads no disk
            finally:
                self.phase = Phase.IDLE

    # ---- between passes --------------------------------------------------------------------------

    def meet(self, marker: Marker) -> None:
        """Wait until every rank reaches this point, outside of forward, backward and update.

        Raises:
            MismatchError: a rank is at another point.
        """
        expect_in_step()
        self._meet(marker)

    def any_news(self, mine: bool) -> bool:
        """Return True if any rank has news that the others need before their update.

        Raises:
            MismatchError: a rank is at another point.
        """
        return any(self._meet(Marker.END_OF_UPDATE, int(mine)).words)

    @contextmanager
    def whole(self, buckets: Iterable[Bucket]) -> Iterator[None]:
        """Keep buckets readable for a while, outside of forward and backward."""
        held = list(dict.fromkeys(buckets))
        if self.phase is Phase.IDLE and self.uses.units:
            expect_in_step()
        self._free_rounded(held)
        gathered = [bucket for bucket in held if bucket.state is not Weights.FULL]
        for bucket in gathered:
            bucket.earlier_views = bucket.other_views if self.phase is Phase.IDLE else None
        for bucket in held:
            self.begin_use(bucket)
            self._pins[bucket] += 1
        if self.phase is Phase.IDLE and self.uses.units:
            self._meet(Marker.END_OF_ACCESS)
        try:
            yield
        finally:
            self._pins.subtract(held)
            for bucket in gathered:
                self.end_use(bucket)
                bucket.earlier_views = None

    def _free_rounded(self, buckets: Iterable[Bucket]) -> None:
        """Free rounded buckets outside of forward and backward, to gather them exactly."""
        for bucket in buckets:
            if bucket.is_rounded and self.phase is Phase.IDLE and not self._pins[bucket]:
                self.kept_views.note(bucket)
                self._free(bucket)

    def gathered_for_good(self) -> Iterator[Bucket]:
        """Yield every bucket, gathered for good."""
        if not self.uses.units:
            return
        expect_in_step()
        self._free_rounded(self._buckets)
        for bucket in self._buckets:
            self.begin_use(bucket)
            yield bucket
        self._meet(Marker.END_OF_ACCESS)
