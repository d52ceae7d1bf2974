"""Weights on use: when each bucket is gathered, and when it is freed.

Ranks meet at both ends of each pass (forward or backward). In the first ones every gather is
announced (see `agreement.py`) and the uses are recorded. If all ranks recorded the same uses, the
next passes follow a plan: the gathers start in the plan's order on every rank, ahead of their use,
and no rank announces anything until the end.

The others rely on a rank's part in all gathers of the plan, so it takes part also in those that it
does not need. If it needs a bucket that the rest of the plan lacks, it takes part in that rest
first; then it announces what it needs, and the others lend their shards when they reach the end.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from enum import Enum, auto

import torch
from torch import Tensor, nn

from hadal.comm import Ranks
from hadal.comm.interrupts import expect_in_step, in_step, is_cut_short
from hadal.errors import (
    CommunicationError,
    HadalError,
    LossError,
    MismatchError,
    ShardedAccessError,
)
from hadal.zero.agreement import Agreement, Marker, Met
from hadal.zero.bucket import Bucket, Weights
from hadal.zero.grouping import Unit
from hadal.zero.parameters import ReadListener
from hadal.zero.paths import Paths, Walk
from hadal.zero.planner import Kind, Plan, kept_until_backward
from hadal.zero.policy import Divergence, Limits
from hadal.zero.uses import Escapes, Uses

_log = logging.getLogger(__name__)


class Phase(Enum):
    """The phase of the model's work."""

    IDLE = auto()
    FORWARD = auto()
    BACKWARD = auto()


class Gathering:
    """The gathers and frees of the buckets whose weights are sharded."""

    def __init__(
        self,
        units: Sequence[Unit],
        buckets: Sequence[Bucket],
        ranks: Ranks,
        limits: Limits,
        divergence: Divergence,
    ) -> None:
        self.phase = Phase.IDLE
        self._ranks = ranks
        self._limits = limits
        self.uses = Uses()
        self.agreement = Agreement(ranks, self.uses.gather, self.uses.lend_to, self.uses.name)
        self._paths = Paths(ranks, limits, divergence)
        self.take_up(buckets)
        self.uses.extend(units)
        self._announces_all = divergence.is_expected
        self._walk = Walk(Kind.FORWARD)
        self._next: Plan | None = None
        # Buckets in use in the current forward or backward: only these need no check.
        self._open: set[Bucket] = set()
        self._running: list[Unit] = []
        # The number of `whole` contexts that hold each bucket; it is not freed inside them.
        self._pins: Counter[Bucket] = Counter()
        self._keeps = False
        # True: the others wait at the end of a forward that raised here, until another one ends.
        self._is_behind = False
        self._moves = False
        self._listener = ReadListener(self.on_read)
        self.escapes = Escapes()
        self.start_due: Callable[[int | None], bool] = lambda _: False
        """Starts the first reductions of this backward, up to this count (None: all); returns True
        if some of their gradients were still expected."""
        self.start_rest: Callable[[], None] = lambda: None
        """Starts the rest of this backward's reductions, or lets all ranks start them together."""
        self.drop: Callable[[], None] = lambda: None
        """Drops all gradients since the last update, on all ranks alike."""
        self.awaits: Callable[[Bucket], bool] = lambda _: True
        """Returns True if gradients of a bucket are still expected in this backward."""
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
            self.uses.replace(old, parts)
            self._restart()

    def _restart(self) -> None:
        """Forget everything but the buckets."""
        numels = [bucket.layout.numel for bucket in self._buckets]
        kept = kept_until_backward(numels, self._limits)
        self._reads_ahead = max((bucket.offload.reads_ahead for bucket in self._buckets), default=0)
        self._kept = {bucket for bucket, keep in zip(self._buckets, kept, strict=True) if keep}
        self._paths.restart([bucket.name for bucket in self._buckets], numels)

    @property
    def _buckets(self) -> Sequence[Bucket]:
        return self.uses.buckets

    @property
    def is_at_rest(self) -> bool:
        """Return True if no pass is running, and no context keeps buckets readable."""
        return self.phase is Phase.IDLE and not any(self._pins.values())

    @property
    def _all_pinned(self) -> bool:
        return all(self._pins[bucket] for bucket in self._buckets)

    def meet(self, marker: Marker) -> None:
        """Wait until every rank reaches this point, outside of forward, backward and update.

        Raises:
            MismatchError: a rank is at another point.
        """
        expect_in_step()
        self._meet(marker)

    # ---- one bucket ------------------------------------------------------------------------------

    def need(self, bucket: Bucket) -> None:
        """Make a bucket's weights readable."""
        number = self.uses.number.get(bucket)
        if number is None or bucket in self._open:
            return
        with self._own_moves():
            if self.phase is not Phase.IDLE:
                if self._walk.follows:
                    self._follow(number)
                self._walk.need(number)
            if bucket.state is Weights.ARRIVING:
                self.uses.gather(number)
            elif bucket.state is Weights.SHARDED:
                # Outside of forward and backward, weights are read and saved exactly.
                exact = self.phase is Phase.IDLE
                self.agreement.request(self.uses.code_of(number, exact=exact))
            if self.phase is not Phase.IDLE:
                self._open.add(bucket)

    @in_step
    def _follow(self, number: int) -> None:
        """Begin a use: take part in the plan up to it, or leave a plan that does not have it."""
        position = self._walk.next_use(number)
        if position is not None:
            self._pass_by(position)
            self._start_due()
            if self._buckets[number].state is not Weights.SHARDED:
                return
        self._leave(number)

    def _pass_by(self, stop: int) -> None:
        """Take part in the plan before position `stop`, whose uses this rank skips."""
        walk, plan = self._walk, self._walk.plan
        assert plan is not None  # it is followed
        while walk.position < stop:
            number, keeps = plan.path[walk.position], plan.keeps[walk.position]
            bucket = self._buckets[number]
            if bucket.state is Weights.FULL and bucket not in self._open:
                # Reads of weights that are whole already are not seen: it may have been used.
                walk.need(number)
                walk.done(number)
            self._start_due()
            if bucket.state is Weights.ARRIVING:
                self.uses.gather(number)
            is_read = bucket in self._open or self._is_busy(bucket) or bucket.has_other_views
            if not keeps and not is_read:
                self._free(bucket, is_noted=True)

    def _start_due(self) -> None:
        """Start the collectives that the plan schedules for its next use, and go past it."""
        walk, plan = self._walk, self._walk.plan
        assert plan is not None  # it is followed
        self._start_due_reductions()
        for number in plan.gathers[walk.issued : plan.started[walk.position]]:
            self._start(number)
            walk.issued += 1
        for number in plan.gathers[walk.issued : walk.issued + self._reads_ahead]:
            self._buckets[number].read_ahead()
        walk.position += 1

    def _start(self, number: int) -> None:
        bucket = self._buckets[number]
        if bucket.state is Weights.SHARDED:
            bucket.start_unshard()
        else:
            # It is still in use here, but the other ranks have freed it.
            bucket.serve()

    @in_step
    def _leave(self, wanted: int | None = None) -> None:
        """Take part in the rest of the plan's collectives; keep the wanted bucket."""
        walk, plan = self._walk, self._walk.plan
        assert plan is not None  # it was followed
        for stop in plan.started[walk.position :]:
            self._start_due_reductions()
            for number in plan.gathers[walk.issued : stop]:
                if number == wanted and self._buckets[number].state is Weights.SHARDED:
                    self.uses.gather(number)
                else:
                    self._buckets[number].serve()
                walk.issued += 1
            walk.position += 1
        if self.phase is Phase.BACKWARD:
            walk.was_early |= self.start_due(None)
        walk.has_left = True

    def _start_due_reductions(self) -> None:
        """Start the reductions that other ranks may wait for from the next use on."""
        walk = self._walk
        if walk.plan is not None and self.phase is Phase.BACKWARD:
            walk.was_early |= self.start_due(walk.plan.uses[walk.position].reduced)

    def record_reduction(self, bucket: Bucket) -> None:
        """Record that a reduction of this backward was started on this rank."""
        self._walk.reduce(self.uses.number.get(bucket, -1))

    @property
    def has_left(self) -> bool:
        """Return True if this rank left this backward's plan and started all its reductions."""
        return self._walk.has_left

    def compare_progress(self) -> None:
        """Exchange only the progress of this backward's reductions."""
        with self._own_moves():
            self.agreement.compare_progress()

    @property
    def starts_together(self) -> bool:
        """Return True if reductions start in an exchange, once they are ready on all ranks.

        They do while gathers are announced. If a rank started one by itself while another rank
        announces a gather, it might block: a communicator's first collectives, and a device's first
        kernels, may block the host until all ranks have started them.
        """
        walk = self._walk
        return self.phase is Phase.BACKWARD and walk.plan is None and bool(self.uses.units)

    @property
    def started_everywhere(self) -> int | None:
        """Return how many of this backward's reductions every rank will start by itself.

        None: all of them. A rank must wait only for these, because a waiting rank cannot help the
        others. On a plan they are the reductions due before its next use: a rank starts them before
        it takes part in that use's gathers.
        """
        walk = self._walk
        if self.phase is not Phase.BACKWARD or walk.has_left or walk.plan is None:
            return None
        uses = walk.plan.uses
        return uses[walk.position].reduced if walk.position < len(uses) else None

    @contextmanager
    def _own_moves(self) -> Iterator[None]:
        """Ignore reads in the block: they are the mechanism's own."""
        before, self._moves = self._moves, True
        try:
            yield
        finally:
            self._moves = before

    def done(self, bucket: Bucket) -> None:
        """End a use of a bucket and free it, unless it is used elsewhere or needed again soon."""
        number = self.uses.number.get(bucket)
        if number is None or bucket.state is not Weights.FULL or self._is_busy(bucket):
            return
        self._open.discard(bucket)
        if self._stays(bucket, self._walk.done(number)):
            return
        # Reads of a view are not announced, so a bucket that has one stays until the pass ends.
        if not self.escapes.note(bucket) or self.phase is Phase.IDLE:
            self._free(bucket, is_noted=True)

    def _is_busy(self, bucket: Bucket) -> bool:
        running = any(bucket in self.uses.of(unit) for unit in self._running)
        return running or bool(self._pins[bucket])

    def _stays(self, bucket: Bucket, use: int | None) -> bool:
        """Return True if a bucket stays gathered after a use, of position `use` in the plan."""
        walk = self._walk
        if self.phase is Phase.IDLE:
            return False
        if walk.plan is not None and walk.follows:
            return use is None or walk.plan.keeps[use]
        return bucket in self._kept and (self.phase is Phase.FORWARD or self._keeps)

    def _free(self, bucket: Bucket, *, is_noted: bool = False) -> None:
        if bucket.state is Weights.FULL and not is_noted:
            self.escapes.note(bucket)
        with self._own_moves():
            bucket.reshard(in_use=self.phase is not Phase.IDLE)

    def free_all(self) -> None:
        """Free all gathered buckets, because they become stale."""
        for bucket in self._buckets:
            self._free(bucket)

    # ---- units -----------------------------------------------------------------------------------

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

    def before_use(self, unit: Unit) -> None:
        """Gather before a unit's forward (the first, or a recomputation inside backward)."""
        self._running.append(unit)
        for bucket in self.uses.of(unit):
            self.need(bucket)

    def after_use(self, unit: Unit) -> None:
        """Free after a unit's forward, but not after a recomputation: its backward is next."""
        if unit in self._running:
            self._running.remove(unit)
        if self.phase is not Phase.BACKWARD:
            for bucket in self.uses.of(unit):
                self.done(bucket)

    def before_backward_of(self, unit: Unit) -> None:
        """Gather for a unit's backward: the gradient of its output has arrived."""
        for bucket in self.uses.of(unit):
            self.need(bucket)

    def after_backward_of(self, unit: Unit) -> None:
        """Free buckets that expect no more gradients: that of the unit's input is complete."""
        if self.phase is Phase.BACKWARD:
            for bucket in self.uses.of(unit):
                if not bucket.trainable or not self.awaits(bucket):
                    self.done(bucket)

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
        if bucket is None or bucket in self._open or self._moves:
            return
        if self._running and self.uses.learn(self._running[-1], bucket):
            self._walk.has_learned = True
        self.need(bucket)

    # ---- forward and backward --------------------------------------------------------------------

    def begin_forward(self) -> None:
        """Begin a forward of the whole model.

        An evaluation with weights that a context keeps whole needs no other rank: each rank may run
        as many as it likes, as in generating texts of its own lengths.
        """
        if self.phase is not Phase.IDLE or (self._all_pinned and not torch.is_grad_enabled()):
            return
        expect_in_step()
        walk = Walk(Kind.FORWARD if torch.is_grad_enabled() else Kind.EVALUATION)
        if self._is_behind:
            walk.plan, walk.has_left = self._walk.plan, True
        elif not self._announces_all:
            walk.plan, _ = self._meet_before(walk.kind, Marker.BEGINNING, last=False)
        self._begin(Phase.FORWARD, walk)

    def end_forward(self, error: BaseException | None) -> None:
        """End the model's forward, which may have raised an error on this rank only."""
        if self.phase is not Phase.FORWARD:
            return
        with self._ending():
            if error is None:
                self._end(Marker.END_OF_FORWARD)
                self._is_behind = False
            else:
                self._is_behind = True
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
            self._next, met = self._meet_before(Kind.BACKWARD, marker, last=boundary)
        return Marker.AT_FAULT in met.markers

    @contextmanager
    def backward(self, *, boundary: bool) -> Iterator[None]:
        """Run one backward inside the block.

        Raises:
            LossError: the block has raised on another rank.
        """
        self._keeps = not boundary
        plan, self._next = self._next, None
        self._begin(Phase.BACKWARD, Walk(Kind.BACKWARD, plan))
        with self._ending():
            try:
                yield
                self.start_rest()
            except BaseException as error:
                self._abandon(error)
                raise
            with self.meeting:
                self._end(Marker.END_OF_BACKWARD)

    def any_news(self, mine: bool) -> bool:
        """Return True if any rank has news that the others need before their update.

        Raises:
            MismatchError: a rank is at another point.
        """
        return any(self._meet(Marker.END_OF_UPDATE, int(mine)).words)

    def expect_another_backward(self) -> None:
        """Forget the backward's traces, because gradients will be complete at other moments."""
        self._paths.forget(Kind.BACKWARD)

    def _meet_before(self, kind: Kind, marker: Marker, *, last: bool) -> tuple[Plan | None, Met]:
        """Meet the other ranks; return the plan that all of them will follow, if any."""
        plan = None
        if self.uses.units and not self._announces_all:
            held = frozenset(n for n, b in enumerate(self._buckets) if b.state is Weights.FULL)
            plan = self._paths.plan_for(kind, held, last=last)
        met = self._meet(marker, 0 if plan is None else 1 + plan.digest)
        return (plan if met.is_alike else None), met

    def _meet(self, marker: Marker, word: int = 0) -> Met:
        with self._own_moves():
            return self.agreement.finish(marker, word)

    def _begin(self, phase: Phase, walk: Walk) -> None:
        self._walk = walk
        self._open.clear()
        if walk.plan is not None and walk.follows:
            for number, bucket in enumerate(self._buckets):
                if number not in walk.plan.held and not self._pins[bucket]:
                    self._free(bucket)
        self.escapes.begin()
        self._listener.start()
        self.phase = phase

    def _end(self, marker: Marker) -> None:
        """Meet the other ranks at the end; lend until all are there."""
        walk = self._walk
        if walk.plan is not None and walk.follows:
            with self._own_moves(), in_step:
                self._pass_by(len(walk.plan.uses))
        trace = walk.trace()
        met = self._meet(marker, walk.word(trace))
        self._wait_for_all()
        if Marker.AT_FAULT in met.markers:
            self.drop()
            raise LossError(
                f"rank {self._ranks.rank}: this backward raised on another rank, whose error says"
                " why; the gradients since the last update are dropped on all ranks"
            )
        if self.uses.units and not self._announces_all:
            self._paths.settle(walk, trace, met)

    def _abandon(self, error: BaseException) -> None:
        """Take part in the rest of a pass after an error, because the others rely on it."""
        for bucket in self._buckets:
            bucket.forget_ahead()
        if isinstance(error, (CommunicationError, MismatchError)) or is_cut_short():
            return
        try:
            if self._walk.plan:
                with self._own_moves():
                    self._leave()
            self._wait_for_all()
            if self.phase is Phase.BACKWARD:
                self.start_rest()
                self._meet(Marker.AT_FAULT)
                self.drop()
        except HadalError as second:
            # `error` is being raised already. Messages are matched by their order, so this rank
            # cannot take part in later ones either.
            _log.warning("other ranks wait for this one, which cannot go on: %s", second)

    def _wait_for_all(self) -> None:
        """Wait for the buckets that were gathered ahead and not used."""
        with self._own_moves():
            for number, bucket in enumerate(self._buckets):
                if bucket.state is Weights.ARRIVING:
                    self.uses.gather(number)

    @contextmanager
    def _ending(self) -> Iterator[None]:
        """End a pass after the block: only kept buckets stay gathered."""
        try:
            yield
        finally:
            self._listener.stop()
            self._running.clear()
            self._open.clear()
            kept = self._kept_at_end()
            try:
                for bucket in self._buckets:
                    is_unused = bucket.state is Weights.FULL and not self._pins[bucket]
                    if is_unused and bucket not in kept:
                        self._free(bucket)  # still as in the pass: it reads no disk
            finally:
                self.phase = Phase.IDLE

    def _kept_at_end(self) -> set[Bucket]:
        walk = self._walk
        if walk.plan is not None and walk.follows:
            return {self._buckets[number] for number in walk.plan.kept_at_end}
        return self._kept if self.phase is Phase.FORWARD or self._keeps else set()

    @contextmanager
    def whole(self, buckets: Iterable[Bucket]) -> Iterator[None]:
        """Keep buckets readable for a while, outside of forward and backward."""
        held = list(dict.fromkeys(buckets))
        if self.phase is Phase.IDLE and self.uses.units:
            expect_in_step()
        self._free_rounded(held)
        gathered = [bucket for bucket in held if bucket.state is not Weights.FULL]
        for bucket in held:
            self.need(bucket)
            self._pins[bucket] += 1
        if self.phase is Phase.IDLE and self.uses.units:
            self._meet(Marker.END_OF_ACCESS)
        try:
            yield
        finally:
            self._pins.subtract(held)
            for bucket in gathered:
                self.done(bucket)

    def _free_rounded(self, buckets: Iterable[Bucket]) -> None:
        """Free rounded buckets outside of forward and backward, to gather them exactly."""
        for bucket in buckets:
            if bucket.is_rounded and self.phase is Phase.IDLE and not self._pins[bucket]:
                self._free(bucket)

    def gather_for_good(self) -> None:
        """Gather every bucket for good."""
        if not self.uses.units:
            return
        expect_in_step()
        self._free_rounded(self._buckets)
        for bucket in self._buckets:
            self.need(bucket)
        self._meet(Marker.END_OF_ACCESS)
