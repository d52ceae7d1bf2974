"""Plays the moves of all buckets of one model: gathers on use, reductions in one order, frees."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from enum import Enum, auto
from typing import Any

import torch
from torch import Tensor, nn

from hadal.comm import Ranks
from hadal.comm.collectives import broadcast_, max_
from hadal.errors import ShardedAccessError, UsageError
from hadal.zero.agreement import (
    AT_FAULT,
    CHECKPOINT,
    END_OF_ACCESS,
    END_OF_BACKWARD,
    END_OF_FORWARD,
    FINE,
    FINE_AND_LAST,
    REGROUP,
    Agreement,
)
from hadal.zero.bucket import Bucket, Weights
from hadal.zero.gradients import Arrival, Gradients
from hadal.zero.grouping import Unit
from hadal.zero.planner import kept_until_backward
from hadal.zero.policy import Limits, Reduction
from hadal.zero.still import has_frozen, held_still
from hadal.zero.unused import UnusedCheck

# How long a rank in backward waits for the others' part of an earlier reduction. Ranks that do the
# same come within milliseconds.
_PATIENCE_S = 0.05

_PLAIN = Reduction()


class Phase(Enum):
    """What the model is doing."""

    IDLE = auto()
    FORWARD = auto()
    BACKWARD = auto()


class ZeroRuntime:
    """The buckets of one model and the order of their moves.

    Two orders must be the same on all ranks. Gathers go through an `Agreement`. Reductions follow
    `_order`, a list of buckets; a bucket is reduced when all gradients that it expects have arrived
    and everything before it in the order has been started.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        buckets: Sequence[Bucket],
        ranks: Ranks,
        limits: Limits,
        reduction: Reduction = _PLAIN,
    ) -> None:
        self.buckets = list(buckets)
        self.ranks = ranks
        self.phase = Phase.IDLE
        self.bucket_of = {p: bucket for bucket in buckets for p in bucket.parameters}
        self.gradients = [Gradients(bucket, reduction) for bucket in buckets if bucket.trainable]
        self._gradients_of = {g.bucket: g for g in self.gradients}
        self._number = {bucket: number for number, bucket in enumerate(self.buckets)}
        self._uses: dict[Unit, list[Bucket]] = {}
        self._limits = limits
        self._reduction = reduction
        self._plan_uses(units)
        self._agreement = Agreement(ranks, self._gather, self._lend)
        self._running: list[Unit] = []
        # How many `whole` contexts hold a bucket: nothing inside them may free it.
        self._pins: Counter[Bucket] = Counter()
        # The gathered buckets of sharded weights, by the address of their storage.
        self._storages: dict[int, Bucket] = {}
        # The first guess: gradients come in the reverse of the forward order, each once.
        self._order = list(reversed(self.gradients))
        self._expected = {g: [1] * len(g.bucket.parameters) for g in self.gradients}
        self._arrived: dict[Gradients, list[int]] = {}
        self._missing: dict[Gradients, int] = {}
        self._started = 0
        self._in_flight: list[Gradients] = []
        # The buckets that hold a parameter which any rank has frozen meanwhile.
        self._frozen: list[Bucket] = []
        self._overlaps = limits.overlap
        self._unused: UnusedCheck | None = None
        self._plan_reductions()
        self._reduces = False
        self._keeps = False
        self._moves = False
        self.reducing: AbstractContextManager[Any] = nullcontext()
        """Around the work and the waiting for reductions inside backward: a clock, or nothing."""

    def _plan_sharded(self) -> None:
        sharded = [bucket for bucket in self.buckets if bucket.partition.weights]
        # The buckets of sharded weights, by the storage of their full buffer, which outlives its
        # contents: torch gives one object for one storage as long as somebody holds it.
        storages = [bucket.full.untyped_storage() for bucket in sharded]
        self._fulls = {id(s): (s, bucket) for s, bucket in zip(storages, sharded, strict=True)}
        kept = kept_until_backward([bucket.layout.numel for bucket in sharded], self._limits)
        self._kept = {bucket for bucket, keep in zip(sharded, kept, strict=True) if keep}

    def _plan_uses(self, units: Sequence[Unit]) -> None:
        self._plan_sharded()
        for unit in units:
            mine = dict.fromkeys(self.bucket_of[member.parameter] for member in unit.members)
            uses = [bucket for bucket in mine if bucket.partition.weights]
            if uses:
                self._uses[unit] = uses

    def _plan_reductions(self) -> None:
        # Gradients that are cut over the ranks are not held whole until the end of backward.
        is_cut = any(gradients.partitioned for gradients in self.gradients)
        self._reduces_inside = self._reduction.inside_backward or is_cut
        if self._reduction.refuses_unused:
            self._unused = UnusedCheck(self.gradients, self.ranks)

    @property
    def gathered_units(self) -> Iterable[Unit]:
        """The units whose weights must be gathered before they are used."""
        return self._uses.keys()

    def bucket_at(self, tensor: Tensor) -> Bucket | None:
        """The bucket of sharded weights whose full buffer a tensor looks into, if any."""
        return self._storages.get(tensor.untyped_storage().data_ptr())

    # ---- weights ---------------------------------------------------------------------------------

    def need(self, bucket: Bucket) -> None:
        """Make a bucket's weights readable."""
        if bucket.state is Weights.FULL:
            return
        with self._own_moves():
            if self.ranks.size == 1:
                self._gather(self._number[bucket])
            else:
                self._agreement.request(self._number[bucket])

    @contextmanager
    def _own_moves(self) -> Iterator[None]:
        """While buckets are moved, parameters are touched by the mechanism itself: no reads."""
        before, self._moves = self._moves, True
        try:
            yield
        finally:
            self._moves = before

    def _gather(self, number: int) -> None:
        bucket = self.buckets[number]
        bucket.unshard()
        self._storages[bucket.storage_key] = bucket

    def _free(self, bucket: Bucket) -> None:
        with self._own_moves():
            self._storages.pop(bucket.storage_key, None)
            bucket.reshard()

    def _lend(self, number: int) -> None:
        self.buckets[number].serve()

    def check_readable(self, unit: Unit) -> None:
        """Raise `ShardedAccessError` where a unit's values are asked for while they are freed."""
        for bucket in self._uses[unit]:
            if bucket.state is not Weights.FULL:
                raise ShardedAccessError(
                    f"rank {self.ranks.rank}: the state of {unit.name} was asked for or loaded"
                    f" while its values are spread over the ranks (first"
                    f" {bucket.layout.slots[0].name})."
                    " Take engine.state_dict() on every rank, or go inside `with"
                    " hadal.zero.GatheredParameters(module.parameters(), modifier_rank=0):`."
                )

    def before_use(self, unit: Unit) -> None:
        """A unit is about to run forward (for the first time, or again inside backward)."""
        self._running.append(unit)
        for bucket in self._uses[unit]:
            self.need(bucket)

    def after_use(self, unit: Unit) -> None:
        """A unit has run forward. A recomputation inside backward frees nothing: use is next."""
        if unit in self._running:
            self._running.remove(unit)
        if self.phase is not Phase.BACKWARD:
            for bucket in self._uses[unit]:
                if bucket not in self._kept:
                    self._drop(bucket)

    def before_backward_of(self, unit: Unit) -> None:
        """The gradient of a unit's output has arrived."""
        for bucket in self._uses[unit]:
            self.need(bucket)

    def after_backward_of(self, unit: Unit) -> None:
        """The gradient of a unit's input is complete: frozen weights have done their work."""
        if self.phase is Phase.BACKWARD and not self._keeps:
            for bucket in self._uses[unit]:
                if not bucket.trainable:
                    self._drop(bucket)

    def _drop(self, bucket: Bucket) -> None:
        """Free a bucket's full weights, unless something else still needs them."""
        if bucket.state is Weights.FULL and not (
            self._pins[bucket] or any(bucket in self._uses[unit] for unit in self._running)
        ):
            self._free(bucket)

    def on_read(self, parameter: nn.Parameter) -> None:
        """A parameter is about to be read by an operation, whether a unit announced it or not.

        A read that no unit announces (a module that reaches into another one) is remembered: from
        now on the running unit gathers that bucket too.
        """
        self._read(self.bucket_of.get(parameter))

    def on_view(self, tensor: Tensor) -> None:
        """A plain tensor is about to be read: it may look into weights that are freed by now.

        A module may return a view of its weight (`weight.t()`), for another one to use.
        """
        held = self._fulls.get(id(tensor.untyped_storage()))
        self._read(None if held is None else held[1])

    def _read(self, bucket: Bucket | None) -> None:
        if bucket is None or bucket.state is Weights.FULL or self._moves:
            return
        if self._running and bucket not in self._uses[self._running[-1]]:
            self._uses[self._running[-1]].append(bucket)
        self.need(bucket)

    def begin_forward(self) -> None:
        """The whole model starts to run forward."""
        if self.phase is Phase.IDLE:
            self.phase = Phase.FORWARD

    def end_forward(self, *, raised: bool) -> None:
        """The whole model has run forward, or raised what the other ranks may not have."""
        if self.phase is not Phase.FORWARD:
            return
        self.phase = Phase.IDLE
        self._running.clear()
        if not raised:
            self._finish(END_OF_FORWARD)
        for bucket in self.buckets:
            if bucket not in self._kept:
                self._drop(bucket)

    def _finish(self, marker: int) -> None:
        if self._uses and self.ranks.size > 1:
            self._agreement.finish(marker)

    def any_fault(self, mine: bool, *, boundary: bool = False) -> bool:
        """Whether any rank is at fault here, at the beginning of a backward.

        Raises:
            MismatchError: the ranks disagree on whether it ends an update.
        """
        fine = FINE_AND_LAST if boundary else FINE
        return AT_FAULT in self._agreement.finish(AT_FAULT if mine else fine)

    @contextmanager
    def whole(self, buckets: Iterable[Bucket]) -> Iterator[None]:
        """Keep buckets readable for a while, outside of forward and backward."""
        held = list(dict.fromkeys(buckets))
        gathered = [bucket for bucket in held if bucket.state is not Weights.FULL]
        for bucket in held:
            self.need(bucket)
            self._pins[bucket] += 1
        if self.phase is Phase.IDLE:
            self._finish(END_OF_ACCESS)
        try:
            yield
        finally:
            self._pins.subtract(held)
            for bucket in gathered:
                self._drop(bucket)

    @contextmanager
    def editing(self, bucket: Bucket) -> Iterator[None]:
        """Keep a bucket readable for a while; afterwards rank 0's values hold, on every rank."""
        with self.whole([bucket]):
            try:
                yield
            finally:
                broadcast_(bucket.full, 0, self.ranks, f"rank 0's edits of {bucket.name}")

    def check_links(self) -> None:
        """Raise `ModelError` for a parameter that no longer looks into its bucket."""
        for bucket in self.buckets:
            bucket.check_links()

    def reshard_all(self) -> None:
        """Before a step: what is gathered will be stale."""
        for bucket in self.buckets:
            bucket.absorb_edits()
            self._free(bucket)

    # ---- gradients -------------------------------------------------------------------------------

    @contextmanager
    def backward(self, *, boundary: bool) -> Iterator[None]:
        """Around one backward. Reduces where gradients are cut, and everywhere at a boundary.

        Raises:
            ModelError: a parameter got no gradient in the update, and that is to be told.
        """
        self._reduces = boundary or any(g.partitioned for g in self.gradients)
        self._keeps = not boundary
        self._started = 0
        self._arrived = {g: [0] * len(g.bucket.parameters) for g in self.gradients}
        self._missing = {g: sum(counts) for g, counts in self._expected.items()}
        for gradients in self.gradients:
            gradients.place_views()
        self.phase = Phase.BACKWARD
        try:
            yield
            self._finish(END_OF_BACKWARD)
        finally:
            self.phase = Phase.IDLE
            self._running.clear()
            for gradients in self.gradients:
                gradients.remove_views()
        if self._reduces:
            with self.reducing:
                self._reduce_rest()
        for bucket in self.buckets:
            if not (self._keeps and bucket in self._kept):
                self._drop(bucket)
        if boundary:
            self._refuse_unused()

    def _refuse_unused(self) -> None:
        """Raise `ModelError` for what got no gradient in the update, where that is to be told."""
        fault = None if self._unused is None else self._unused.fault()
        if fault is not None:
            self.clear_gradients()
            raise fault

    def on_gradient(self, bucket: Bucket, index: int) -> None:
        """Autograd has put a gradient on parameter number `index` of a bucket.

        Raises:
            UsageError: the backward was not started by the engine.
        """
        if self.phase is not Phase.BACKWARD:
            raise UsageError(
                f"rank {self.ranks.rank}: a gradient for {bucket.layout.slots[index].name} arrived"
                " outside the backward of its own engine. Call engine.backward(loss) in place of"
                " loss.backward(): it scales, reduces and counts. Where the loss of one engine"
                " passes through the model of another, freeze the other's parameters meanwhile"
                " (requires_grad_(False))."
            )
        gradients = self._gradients_of[bucket]
        gradients.take(index)
        if self._unused is not None:
            self._unused.came(gradients, index)
        counts = self._arrived[gradients]
        counts[index] += 1
        if counts[index] > self._expected[gradients][index]:
            return
        self._missing[gradients] -= 1
        if self._missing[gradients]:
            return
        if not (self._keeps and bucket in self._kept):
            self._drop(bucket)
        if self._reduces and self._reduces_inside:
            with self.reducing:
                self._start_ready()

    def _start_ready(self) -> None:
        """Start every reduction whose turn has come."""
        while self._started < len(self._order) and not self._missing[self._order[self._started]]:
            self._start_next()

    def _start_next(self) -> None:
        gradients = self._order[self._started]
        self._started += 1
        self._start(gradients)

    def _start(self, gradients: Gradients) -> None:
        # At most two are in flight, so that memory stays bounded by the bucket size. Where weights
        # are gathered on use, a rank that went another way may wait for me before it reduces:
        # then patience ends, and memory gives way.
        self._advance_in_flight()
        gradients.start_reduce()
        self._in_flight.append(gradients)
        if not self._overlaps:
            self._advance_in_flight(through=True)

    def _advance_in_flight(self, *, through: bool = False) -> None:
        for earlier in self._in_flight:
            # In one order: a later phase's messages are told apart by their order only.
            if not earlier.advance(_PATIENCE_S if self._uses else None, through=through):
                break
        self._in_flight = [g for g in self._in_flight if g.state is Arrival.REDUCING]

    def _reduce_rest(self) -> None:
        """At the end of a backward: reduce what was not complete, and once more what came late."""
        on_time = not any(self._missing[gradients] for gradients in self._order)
        while self._started < len(self._order):
            self._start_next()
        # Late: it came behind its bucket's reduction, or into a bucket that none was expected for.
        late = [g.waits for g in self.gradients]
        report = torch.tensor([not on_time, *late], dtype=torch.uint8, device=self._device)
        max_(report, self.ranks, "the agreement on late gradients")
        surprised, *late_anywhere = report.tolist()
        self._finish_reductions()
        for gradients, is_late in zip(self.gradients, late_anywhere, strict=True):
            if is_late:
                self._start(gradients)
        self._finish_reductions()
        if surprised or any(late_anywhere):
            self._learn()

    def _learn(self) -> None:
        """Expect from the next backward what this one brought on any rank."""
        mine = [count for g in self.gradients for count in self._arrived[g]]
        counts = torch.tensor(mine, dtype=torch.int32, device=self._device)
        max_(counts, self.ranks, "the agreement on expected gradients")
        brought = iter(counts.tolist())
        for gradients in self.gradients:
            self._expected[gradients] = [next(brought) for _ in gradients.bucket.parameters]
        self._order = [g for g in reversed(self.gradients) if any(self._expected[g])]

    @property
    def _device(self) -> torch.device:
        return self.buckets[0].device

    def reduce_all(self) -> None:
        """Before a step: average whatever no backward has averaged yet.

        Raises:
            ModelError: as `backward`, where no backward was known to be the update's last.
        """
        self._refuse_unused()
        seen = [[g.waits, has_frozen(g.bucket)] for g in self.gradients]
        report = torch.tensor(seen, dtype=torch.uint8, device=self._device)
        max_(report, self.ranks, "the agreement on unreduced gradients")
        self._frozen = []
        for gradients, (is_waiting, is_frozen) in zip(self.gradients, report.tolist(), strict=True):
            if is_waiting:
                self._start(gradients)
            if is_frozen:
                self._frozen.append(gradients.bucket)
        self._finish_reductions()
        for gradients in self.gradients:
            if gradients.state is Arrival.EMPTY:
                gradients.count_as_zero()

    def holding_frozen(self) -> AbstractContextManager[None]:
        """Around an update, behind `reduce_all`: what was frozen since the start does not move."""
        return held_still(self._frozen)

    def _finish_reductions(self) -> None:
        for gradients in self._in_flight:
            gradients.finish_reduce()
        self._in_flight.clear()

    def clear_gradients(self) -> None:
        """After a step: the next gradients start from nothing."""
        for gradients in self.gradients:
            gradients.clear()
        if self._unused is not None:
            self._unused.clear()

    # ---- parameters that come to be trained later ------------------------------------------------

    @property
    def is_between_updates(self) -> bool:
        """Whether nothing runs, nobody reads, and no gradient waits for an update."""
        idle = self.phase is Phase.IDLE and not any(self._pins.values())
        return idle and not self.holds_gradients

    @property
    def holds_gradients(self) -> bool:
        """Whether gradients wait for an update."""
        return any(g.state is not Arrival.EMPTY for g in self.gradients)

    def meet_at_checkpoint(self) -> None:
        """Wait until every rank wants to save or to load.

        Raises:
            MismatchError: a rank is elsewhere.
        """
        self._agreement.finish(CHECKPOINT)

    def meet_to_regroup(self) -> None:
        """Wait until every rank wants buckets replaced.

        Raises:
            MismatchError: a rank is elsewhere.
        """
        self._agreement.finish(REGROUP)

    def replace(self, old: Bucket, parts: Sequence[Bucket]) -> None:
        """Put new buckets in the place of an untrained one whose parameters they have taken over.

        What is known of all others (their order, what to expect, who uses them) stays.
        """
        self._storages.pop(old.storage_key, None)
        place = self._number[old]
        self.buckets[place : place + 1] = parts
        self._number = {bucket: number for number, bucket in enumerate(self.buckets)}
        self.bucket_of.update((p, bucket) for bucket in parts for p in bucket.parameters)
        for uses in self._uses.values():
            if old in uses:
                place = uses.index(old)
                uses[place : place + 1] = parts
        self._plan_sharded()
        self._gradients_of |= {
            bucket: Gradients(bucket, self._reduction) for bucket in parts if bucket.trainable
        }
        self.gradients = [self._gradients_of[bucket] for bucket in self.buckets if bucket.trainable]
        for one in self.gradients:
            self._expected.setdefault(one, [1] * len(one.bucket.parameters))
        self._order = [g for g in reversed(self.gradients) if any(self._expected[g])]
        self._plan_reductions()

    # ---- the end, and after a load ---------------------------------------------------------------

    def after_load(self) -> None:
        """Shards and masters have new values: bring whole weights up to date."""
        self.clear_gradients()
        pendings = [bucket.start_refresh() for bucket in self.buckets]
        for pending in pendings:
            if pending is not None:
                pending.wait()

    def release(self) -> None:
        """Give every parameter whole memory of its own."""
        for bucket in self.buckets:
            self.need(bucket)
        self._finish(END_OF_ACCESS)
        for bucket in self.buckets:
            bucket.release()
