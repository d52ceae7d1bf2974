"""The runtime of one model: it reduces gradients in one order, and gathers and frees weights."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import chain
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version

from hadal.comm import Ranks
from hadal.comm.coded import Messages
from hadal.comm.collectives import broadcast_, gather_objects, max_
from hadal.comm.works import expect_in_step, in_step
from hadal.device import (
    HostCopy,
    graph_task,
    is_in_backward,
    start_reading,
    unwatched,
    will_collect,
)
from hadal.errors import UsageError, few
from hadal.zero.agreement import Marker
from hadal.zero.bucket import Bucket, refresh_all
from hadal.zero.gathering import Gathering, Phase
from hadal.zero.gradients import Arrival, Gradients
from hadal.zero.grouping import Unit
from hadal.zero.policy import Divergence, Limits, Reduction
from hadal.zero.sanity import Sanity, unused_fault

_log = logging.getLogger(__name__)
# The runtimes whose backward is running; it may also produce gradients for other runtimes.
_in_backward: list[ZeroRuntime] = []

# A bucket without a gradient on any rank in this many updates is left out of the reductions.
_IDLE_UPDATES = 16


class OwnExchange(Protocol):
    """The interface of an optimizer that exchanges its own data instead of gradients.

    Gradients stay on their ranks (`Reduction.stays`). Between two of its exchanges the ranks'
    weights may differ.
    """

    def bring_together(self) -> None:
        """Make weights and optimizer state the same on all ranks, which must all call it."""

    def begin_anew(self) -> None:
        """Drop data still to be sent, because weights and optimizer state have been replaced."""

    def memory(self) -> Any:
        """Return this rank's data still to be sent, as dicts and lists of tensors; None if none."""

    def fits(self, memory: Any) -> bool:
        """Return True if a `memory` belongs to parameters with the same layout as here."""

    def remember(self, memory: Any) -> None:
        """Restore a `memory` that fits."""


class ZeroRuntime:
    """The buckets of one model and the order of their gathers and reductions.

    Two orders must be the same on all ranks: that of gathers, which `gathering` keeps, and that of
    reductions. Reductions follow `_order`, a list of buckets. At the start of each backward the
    autograd graph shows which gradients this rank will get; a bucket is reduced once they have
    arrived and all reductions before it in the order have been started. A missing gradient counts
    as zero.

    A rank waits for a reduction only if no other rank can need anything from it before starting
    that reduction (`Gathering.started_everywhere`); otherwise two ranks could wait for each other.
    A gradient that arrives after its bucket's reduction was started is late, and is reduced once
    more before the update.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        buckets: Sequence[Bucket],
        ranks: Ranks,
        limits: Limits,
        reduction: Reduction,
        divergence: Divergence,
        sanity: Sanity | None = None,
    ) -> None:
        self.buckets = list(buckets)
        self.ranks = ranks
        self.bucket_of: dict[nn.Parameter, Bucket] = {
            p: bucket for bucket in buckets for p in bucket.parameters
        }
        self.gathering = Gathering(units, buckets, ranks, limits, divergence, self)
        self.gradients = [Gradients(bucket, reduction) for bucket in buckets if bucket.trainable]
        self._gradients_of = {g.bucket: g for g in self.gradients}
        self._reduction = reduction
        # Gradients arrive in the reverse of the forward order.
        self._order = list(reversed(self.gradients))
        # Updates since any rank last had a gradient for a bucket; one without any in the first
        # update counts as idle.
        self._idle = dict.fromkeys(self.gradients, _IDLE_UPDATES - 1)
        self._brought: set[Gradients] = set()
        # Updates since the ranks last exchanged these, and the frozen parameters exchanged then.
        self._unreported = 0
        self._reported_frozen: list[bool] | None = None
        self._expectation = Expectation([g.bucket for g in self.gradients])
        self._in_flight: list[Gradients] = []
        self._edits = UncountedEdits()
        # The buckets with a parameter that any rank has frozen.
        self._frozen: list[Bucket] = []
        self._overlaps = limits.overlap
        # True: no rank lacks a gradient in this update, so that none is looked for again.
        self._has_all = False
        self._sanity = sanity
        if sanity is not None:
            sanity.watch(self.buckets)
        self._plan_reductions()
        self._begin_reductions(boundary=True)
        self.leaves_others_gradients = False
        """True: gradients of another engine's loss for these parameters are dropped; otherwise they
        are an error."""
        self._has_warned = False
        self.begins: Callable[[], None] | None = None
        """Begins a backward when the caller's own has produced a gradient; None: it is an error."""
        self.is_direct = False
        """True: the running backward is the caller's own."""
        self.away: tuple[str, ...] = ()
        """The states that are off the device for a while and cannot be used."""
        self.bring_back: Callable[[], None] | None = None
        """Brings back the optimizer's state if it is off the device for forward and backward."""
        self.exchange: OwnExchange | None = None
        """The optimizer's own exchange, if gradients stay on their ranks."""
        self.reducing: AbstractContextManager[Any] = nullcontext()
        """Context around starting and waiting for reductions, which measures their time."""

    def _plan_reductions(self) -> None:
        # Sharded gradients must not be held whole until the end of backward.
        is_cut = any(gradients.partitioned for gradients in self.gradients)
        self._reduces_inside = self._reduction.inside_backward or is_cut

    def expect_here(self, *, in_pass: bool = False) -> None:
        """Raise an error if states are off the device for a while, or after an interrupt.

        States that are away for forward and backward come back, unless it is called `in_pass`.
        """
        expect_in_step()
        if self.bring_back is not None and not in_pass:
            self.bring_back()
        if self.away:
            raise UsageError(
                f"rank {self.ranks.rank}: {', '.join(self.away)} were moved off the device by"
                " engine.offload_states; call engine.reload_states() first"
            )

    def bring_together(self) -> None:
        """Make weights the same on all ranks, outside of forward and backward.

        All ranks must call it.
        """
        if self.exchange is not None and self.gathering.phase is Phase.IDLE:
            self.expect_here()
            self.exchange.bring_together()

    def whole(self, buckets: Iterable[Bucket]) -> AbstractContextManager[None]:
        """Keep buckets readable for a while, outside of forward and backward."""
        self.expect_here()
        self.bring_together()
        held = list(buckets)
        for bucket in held:
            bucket.wait_refresh()
        return self.gathering.whole(held)

    @contextmanager
    def editing(self, bucket: Bucket) -> Iterator[None]:
        """Keep a bucket readable inside the block; then broadcast rank 0's values."""
        with self.whole([bucket]):
            try:
                yield
            finally:
                broadcast_(
                    bucket.full,
                    0,
                    bucket.ranks,
                    f"the broadcast of rank 0's edits of {bucket.name}",
                )
                increment_version(bucket.parameters)  # as torch does not count these writes

    def check_links(self) -> None:
        """Raise `ModelError` for a parameter that is no longer a view of its bucket."""
        for bucket in self.buckets:
            bucket.check_links()

    def check_freed(self) -> None:
        """Raise `ShardedAccessError` for a freed parameter that was written to."""
        for bucket in self.buckets:
            bucket.check_freed()

    def reshard_all(self, *, update_looks: bool = False) -> set[Bucket]:
        """Absorb the user's edits before an update, and free weights that it makes stale.

        `update_looks`, and the buckets that are returned: see `Bucket.absorb_edits`.
        """
        found: set[Bucket] = set()
        if self._device.type == "cpu":
            found = {one for one in self.buckets if one.absorb_edits(update_looks=update_looks)}
        else:
            self._edits.look(self.buckets)
        self.gathering.free_all()
        return found

    # ---- gradients -------------------------------------------------------------------------------

    @contextmanager
    def backward(self, *, boundary: bool) -> Iterator[None]:
        """Run one backward inside the block; reduce sharded gradients, or all at a boundary.

        Raises:
            ModelError: a parameter got no gradient in the update, and that is not allowed.
        """
        self._begin_reductions(boundary=boundary)
        self._expectation.begin()
        for bucket in self.buckets:
            bucket.wait_refresh()  # a read in the forward may not have been seen
        for gradients in self.gradients:
            gradients.place_views()
        try:
            _in_backward.append(self)
            with self.gathering.backward(boundary=boundary):
                yield
            self._expectation.end()
        finally:
            if self in _in_backward:  # or an interrupt came before
                _in_backward.remove(self)
            for gradients in self.gradients:
                gradients.remove_views()
        with self.reducing:
            self._finish_reductions()
        if boundary:
            self._refuse_unused()

    def _begin_reductions(self, *, boundary: bool) -> None:
        # Between boundaries only sharded gradients are reduced.
        self._turns = self._order if boundary else [g for g in self._order if g.partitioned]
        # True: a reduction that starts now is its bucket's last one in the update.
        self._is_last = boundary
        # How many reductions of this backward are due on this rank, and how many have started.
        self._ready = self._started = 0

    def survey(self) -> None:
        """Query the graph, at the root of a backward, for the gradients to expect."""
        self._expectation.survey(is_root=True)

    def _refuse_unused(self) -> None:
        """Raise `ModelError` for parameters without a gradient in the update, if configured."""
        if self._has_all or not self._reduction.refuses_unused:
            return
        fault = unused_fault(self.gradients, self.ranks)
        self._has_all = fault is None
        if fault is not None:
            self.clear_gradients()
            raise fault

    def on_gradient(self, bucket: Bucket, index: int) -> None:
        """Take a gradient that autograd has put on parameter number `index` of a bucket.

        Raises:
            UsageError: the backward is that of another engine.
        """
        if self.gathering.phase is not Phase.BACKWARD and not self._begin_for(bucket, index):
            return
        gradients = self._gradients_of[bucket]
        if self._sanity is not None:
            self._sanity.check_gradient(bucket, index)
        if self.gathering.has_left:
            # All ranks start all of these by themselves now. They free memory for late gradients.
            for earlier in self._in_flight:
                earlier.advance_first_hop()
        gradients.take(index)
        self._brought.add(gradients)
        if not self._expectation.came(bucket, index):
            return
        self.gathering.end_use(bucket)
        if self._reduces_inside:
            self._start_ready()
            if self.gathering.has_left:
                gradients.send_late_to_host()

    def before_backward_of(self, unit: Unit) -> None:
        """Prepare for a unit's backward: the gradient of its output has arrived."""
        if self._begins_at(unit) and self.begins is not None:
            self.begins()
        self.gathering.before_backward_of(unit)

    def _begins_at(self, unit: Unit) -> bool:
        """Return True if a backward not begun by the engine will produce a unit's gradients."""
        if self.gathering.phase is not Phase.IDLE or not all(r.is_direct for r in _in_backward):
            return False
        trained = (b for b in self.gathering.uses.of(unit) if b.trainable)
        parameters = (p for bucket in trained for p in bucket.parameters if p.requires_grad)
        return is_in_backward() and any(map(will_collect, parameters))

    def _begin_for(self, bucket: Bucket, index: int) -> bool:
        """Begin the caller's own backward at its first gradient; return True if it counts."""
        parameter, name = bucket.parameters[index], bucket.layout.slots[index].name
        is_anothers = any(not runtime.is_direct for runtime in _in_backward)
        if self.begins is not None and not is_anothers:
            # Collected gradients may replace it on the parameter.
            gradient, parameter.grad = parameter.grad, None
            self.begins()
            parameter.grad = gradient
            return True
        if self.leaves_others_gradients and is_anothers:
            self._drop_others(parameter, name)
            return False
        raise UsageError(
            f"rank {self.ranks.rank}: a gradient for {name} arrived in the backward of another"
            " engine, whose loss passes through the model of this one. Freeze the other's"
            " parameters meanwhile (requires_grad_(False)); or let both train: call"
            " loss.backward() in place of engine.backward(loss)."
        )

    def _drop_others(self, parameter: nn.Parameter, name: str) -> None:
        """Drop the gradient of another engine's loss; warn once."""
        parameter.grad = None
        if not self._has_warned:
            self._has_warned = True
            _log.warning(
                "the loss of another engine passes through the model of this one; its gradients for"
                " these parameters (first %s) are dropped, because only this engine's backward"
                " counts. Freeze them meanwhile (requires_grad_(False)) to avoid computing them",
                name,
            )

    def _start_ready(self) -> None:
        """Start every reduction whose turn has come, or let all ranks start it together."""
        self._count_ready(0)
        if not self.gathering.starts_together:
            self._start_until(self._ready)
        elif self._ready > self._started:
            # It starts in the next exchange. Earlier ones free memory before others are collected.
            with self.reducing:
                self._advance_in_flight()
            if self._ready - self._started > 1:
                self.gathering.compare_progress()

    def _count_ready(self, due: int) -> None:
        """Count the reductions that may start on this rank, and at least the first `due`."""
        while self._ready < len(self._turns):
            bucket = self._turns[self._ready].bucket
            if self._ready >= due and self.awaits(bucket):
                break
            self.gathering.record_reduction(bucket)
            self._ready += 1

    def _start_until(self, count: int) -> None:
        """Start reductions until `count` have started in this backward."""
        if self._started >= count:
            return
        with self.reducing:
            while self._started < count:
                # At most two are in flight, as far as a rank may wait, so that memory stays bounded
                # by the bucket size.
                self._advance_in_flight()
                with in_step:
                    self._turns[self._started].start_reduce(last=self._is_last)
                    self._in_flight.append(self._turns[self._started])
                    self._started += 1
                if not self._overlaps:
                    self._advance_in_flight(through=True)

    def _advance_in_flight(self, *, through: bool = False) -> None:
        known = self.gathering.started_everywhere
        if self.gathering.starts_together:
            known = self._started
        if known is None:
            for earlier in self._in_flight:
                earlier.advance(through=through)
        else:
            # Each rank starts the second hop after waiting for the first, so none may wait for the
            # second before all are at the end.
            first = self._started - len(self._in_flight)
            for earlier in self._in_flight[: max(0, known - first)]:
                earlier.advance_first_hop()
        self._in_flight = [g for g in self._in_flight if g.state is Arrival.REDUCING]

    # `Reductions`: what gathering and the ranks' agreement need.

    def progress(self) -> int:
        """Return how many reductions are ready on this rank to start with the other ranks'."""
        return self._ready if self.gathering.starts_together else 0

    def start_together(self, count: int) -> None:
        """Start `count` reductions, which an exchange has shown to be ready on all ranks."""
        if self.gathering.starts_together:
            self.start_due(count)

    def start_due(self, count: int | None) -> bool:
        """Start those of the first `count` reductions (None: all) that have not started.

        Gradients that their buckets still expect count as zero, and will be late.

        Returns:
            True if any gradient was still expected.
        """
        due = len(self._turns) if count is None else min(count, len(self._turns))
        if self._started >= due:
            return False
        is_early = any(self.awaits(g.bucket) for g in self._turns[self._started : due])
        self._count_ready(due)
        self._start_until(due)
        return is_early

    def start_rest(self) -> None:
        """Start the rest at the end of a backward, before ranks meet: others may wait for them."""
        if not self.gathering.starts_together:
            self.start_due(None)
        else:
            self._count_ready(len(self._turns))

    def awaits(self, bucket: Bucket) -> bool:
        """Return True if gradients of a bucket are still expected in this backward."""
        return self._expectation.awaits(bucket)

    def drop(self) -> None:
        """Drop all gradients after a backward that raised on a rank, and so lacks some of them."""
        self._finish_reductions()
        self.clear_gradients()

    @property
    def _device(self) -> torch.device:
        return self.buckets[0].device

    def reduce_all(self) -> None:
        """Average, before a step, the gradients that no backward has averaged.

        Raises:
            MismatchError: a rank is at another point.
            ModelError: as in `backward`, if no backward was known to be the update's last.
            UsageError: a write to weights before the last update was lost.
        """
        self._refuse_unused()
        with self.reducing, unwatched():
            frozen = [
                not all(parameter.requires_grad for parameter in g.bucket.parameters)
                for g in self.gradients
            ]
            self._unreported += 1
            # Whatever this rank has to report that the others do not expect.
            waits = any(g.waits or g.is_of_copy for g in self.gradients)
            is_due = self._unreported >= _IDLE_UPDATES and not self._brought.issuperset(self._order)
            news = waits or is_due or frozen != self._reported_frozen or self._edits.lost
            if self.gathering.any_news(news):
                self._reduce_late(frozen)
            for gradients in self.gradients:
                if gradients.state is Arrival.EMPTY:
                    gradients.count_as_zero()
                gradients.land()

    def _reduce_late(self, frozen: list[bool]) -> None:
        """Average the gradients that any rank reports as not averaged."""
        flags = zip(self.gradients, frozen, strict=True)
        seen = [[g.waits, is_frozen, g in self._brought] for g, is_frozen in flags]
        report = torch.tensor([*chain(*seen), self._edits.lost], dtype=torch.uint8)
        max_(report, self.ranks, "the agreement on unreduced gradients")
        *known, is_lost = report.tolist()
        if is_lost:
            raise self._edits.error(self.ranks)
        self._reported_frozen = frozen
        self._frozen = []
        brought: list[bool] = []
        found = zip(self.gradients, known[::3], known[1::3], known[2::3], strict=True)
        for gradients, is_waiting, is_frozen, was_brought in found:
            brought.append(was_brought)
            if is_waiting:
                gradients.start_reduce(last=True)
                self._in_flight.append(gradients)
            elif gradients.is_of_copy:
                gradients.start_second_hop()
                self._in_flight.append(gradients)
            if is_frozen:
                self._frozen.append(gradients.bucket)
        self._finish_reductions()
        self._choose_order(brought)

    def _choose_order(self, brought: Sequence[bool]) -> None:
        """Leave buckets that had no gradient on any rank for long out of the next reductions."""
        updates, self._unreported = self._unreported, 0
        self._brought.clear()
        for gradients, has_come in zip(self.gradients, brought, strict=True):
            self._idle[gradients] = 0 if has_come else self._idle[gradients] + updates
        order = [g for g in reversed(self.gradients) if self._idle[g] < _IDLE_UPDATES]
        if order != self._order:
            self._order = order
            self.gathering.expect_another_backward()

    def check_sanity(self, *, overflow_is_handled: bool) -> None:
        """Run the configured checks before an update.

        Raises:
            MismatchError, ModelError: something is wrong (see `sanity.py`).
        """
        if self._sanity is not None:
            self._sanity.check(self.gradients, overflow_is_handled=overflow_is_handled)

    @contextmanager
    def holding_frozen(self) -> Iterator[None]:
        """Hold frozen parameters still during an update, after `reduce_all`."""
        if not self._frozen:
            yield
            return
        # Frozen values must not differ between ranks, neither from the time before they were frozen
        # nor from this update.
        self.bring_together()
        with _held_still(self._frozen):
            yield
            self.bring_together()

    def _finish_reductions(self) -> None:
        # Second hops start in the same order on all ranks.
        for gradients in self._in_flight:
            gradients.advance_first_hop()
        for gradients in self._in_flight:
            gradients.finish_reduce()
        self._in_flight.clear()

    def clear_gradients(self) -> None:
        """Clear the gradients after a step."""
        for gradients in self.gradients:
            gradients.clear()
        self._has_all = False

    def forget_residuals(self) -> bool:
        """Drop the residuals of coded gradients; return True if there were any."""
        held = any(gradients.residuals for gradients in self.gradients)
        for messages in self._messages:
            messages.drop()
        return held

    def rescale_residuals(self, factor: float) -> None:
        """Scale the residuals after the loss scale has changed by `factor`."""
        for messages in self._messages:
            messages.rescale(factor)

    @property
    def _messages(self) -> list[Messages]:
        return [g.messages for g in self.gradients if g.messages is not None]

    # ---- parameters that are added or trained later ----------------------------------------------

    @property
    def is_between_updates(self) -> bool:
        """Return True if no pass is running, no weights are held, and no gradient is collected."""
        return self.gathering.is_at_rest and not self.holds_gradients

    @property
    def holds_gradients(self) -> bool:
        """Return True if there are gradients for the next update."""
        return any(g.state is not Arrival.EMPTY for g in self.gradients)

    def meet_at_checkpoint(self) -> None:
        """Wait until every rank is about to save or load.

        Raises:
            MismatchError: a rank is at another point.
        """
        self.gathering.meet(Marker.CHECKPOINT)
        self.bring_together()

    def replace(self, old: Bucket, parts: Sequence[Bucket]) -> None:
        """Replace an untrained bucket by new ones, which have taken over its parameters.

        The state of all others (order, expectations, units) is kept.
        """
        place = self.buckets.index(old)
        self.gathering.replace(old, parts)
        self._take_up([*self.buckets[:place], *parts, *self.buckets[place + 1 :]])

    def extend(self, buckets: Sequence[Bucket]) -> None:
        """Add buckets of parameters added to the model; `buckets` are all, in the new order.

        The state of the others is kept.
        """
        self.gathering.take_up(buckets)
        self._take_up(buckets)

    def _take_up(self, buckets: Sequence[Bucket]) -> None:
        self.buckets = list(buckets)
        if self._sanity is not None:
            self._sanity.watch(self.buckets)
        self.bucket_of.update((p, bucket) for bucket in buckets for p in bucket.parameters)
        self._gradients_of |= {
            bucket: Gradients(bucket, self._reduction)
            for bucket in buckets
            if bucket.trainable and bucket not in self._gradients_of
        }
        self.gradients = [self._gradients_of[bucket] for bucket in self.buckets if bucket.trainable]
        self._idle = {g: self._idle.get(g, 0) for g in self.gradients}
        self._reported_frozen = None
        self._order = [g for g in reversed(self.gradients) if self._idle[g] < _IDLE_UPDATES]
        self._expectation.take_up([g.bucket for g in self.gradients])
        self._plan_reductions()

    # ---- the end, and after a load ---------------------------------------------------------------

    def after_load(self) -> None:
        """Update whole weights after shards and masters were loaded."""
        self.clear_gradients()
        if self.exchange is not None:
            self.exchange.begin_anew()
        refresh_all(self.buckets)

    def release(self) -> None:
        """Give every parameter its own memory, with whole values."""
        self.bring_together()
        self.clear_gradients()  # after an error for lack of memory, they make room
        whole = [bucket for bucket in self.buckets if not bucket.partition.weights]
        for bucket in chain(whole, self.gathering.gathered_for_good()):
            bucket.release()


# ---- parameters frozen while their bucket is trained ---------------------------------------------


@contextmanager
def _held_still(buckets: Iterable[Bucket]) -> Iterator[None]:
    """Restore the values of frozen parameters in these buckets after an update.

    A gradient of zero is not enough, because momentum and weight decay would change a frozen
    parameter. All ranks must pass the same buckets. The optimizer state does get a zero gradient.
    """
    held = list(buckets)
    kept = []
    for bucket in held:
        with bucket.present(writes=False):
            kept.append([cut.clone() for cut in _frozen_cuts(bucket)])
    yield
    for bucket, values in zip(held, kept, strict=True):
        with bucket.present():
            for cut, value in zip(_frozen_cuts(bucket), values, strict=True):
                cut.copy_(value)
            bucket.write_back()
    refresh_all(held)


def _frozen_cuts(bucket: Bucket) -> Iterator[Tensor]:
    """Yield the master values of frozen parameters in this rank's span."""
    assert bucket.master is not None  # it is trained
    for part in bucket.layout.fragments(*bucket.span):
        if not bucket.parameters[part.slot].requires_grad:
            yield bucket.master[part.offset : part.offset + part.numel]


# ---- writes that torch does not count ------------------------------------------------------------


class UncountedEdits:
    """A check of weights before each update that does not wait for the device.

    torch counts in-place writes under `torch.no_grad()`, which are absorbed. A write through
    `parameter.data` shows only in the values: the device compares them, and the host reads the
    result before the next update. By then such a write is lost.
    """

    def __init__(self) -> None:
        self._names: Sequence[str] = ()
        self._reading: HostCopy | None = None

    def look(self, buckets: Sequence[Bucket]) -> None:
        """Absorb counted writes, and begin to compare values for uncounted ones."""
        seen = [(bucket.absorb_unread(), bucket) for bucket in buckets]
        found = [(answer, bucket.name) for answer, bucket in seen if answer is not None]
        if self._reading is not None and (not self._reading.is_over or self.lost):
            return  # the device is more than an update behind, or a loss is not reported yet
        self._reading = None
        if found:
            self._names = [name for _, name in found]
            answers = torch.stack([answer for answer, _ in found])
            self._reading = start_reading(answers, "whether weights were written to")

    @property
    def lost(self) -> bool:
        """Return True if an uncounted write on this rank before the last update is known."""
        reading = self._reading
        return reading is not None and reading.is_over and bool(reading.values().any())

    def error(self, ranks: Ranks) -> UsageError:
        """Return the error to raise on every rank if any has lost a write; all must call it."""
        mine: list[str] = []
        if self.lost and self._reading is not None:
            answers = self._reading.values().tolist()
            mine = [name for name, is_lost in zip(self._names, answers, strict=True) if is_lost]
        self._reading = None
        names = sorted({name for names in gather_objects(mine, ranks) for name in names})
        return UsageError(
            f"weights of {few(names)} were written to through parameter.data"
            " (or a tensor made from it) before the last update, and the write is lost: on an"
            " accelerator torch does not count such a write, and finding it would mean to wait for"
            " the device. Write in place under torch.no_grad(), as in parameter.copy_(values), or"
            " inside `with hadal.zero.GatheredParameters(parameters, modifier_rank=0):`"
        )


class Expectation:
    """The gradients that each bucket still waits for in one backward.

    The autograd graph shows them in advance: an expert without tokens or an unused head is not in
    it. Recomputation with `use_reentrant=True` hides its parameters from the graph; they are
    expected as often as in the last backward.
    """

    def __init__(self, buckets: Sequence[Bucket]) -> None:
        self._hidden: dict[Bucket, dict[int, int]] = {}
        self._last: dict[Bucket, list[int]] = {}
        # True if backwards are nested, which is assumed until the first one has ended.
        self._nests = True
        self.take_up(buckets)

    def take_up(self, buckets: Sequence[Bucket]) -> None:
        """Expect gradients for these buckets from now on."""
        self._hidden = {bucket: self._hidden.get(bucket, {}) for bucket in buckets}
        self._last = {b: self._last.get(b) or [1] * len(b.parameters) for b in buckets}
        self.begin()

    def begin(self) -> None:
        """Begin a backward."""
        self._is_surveyed = False
        self._tasks: set[int] = set()
        self._in_graph: dict[Bucket, list[bool]] = {}
        self._expected: dict[Bucket, list[int]] = {}
        self._came = {bucket: [0] * len(bucket.parameters) for bucket in self._hidden}
        self._missing: dict[Bucket, int] = {}

    def survey(self, *, is_root: bool = False) -> None:
        """Query the graph of the running backward, once.

        `is_root`: this is the outermost backward. A recomputation's own graph contains only its
        parameters; if that may be the running one, the same gradients as in the last backward are
        expected.
        """
        if self._is_surveyed:
            return
        self._is_surveyed = True
        for bucket, hidden in self._hidden.items():
            if is_root or not self._nests:
                found = [p.requires_grad and will_collect(p) for p in bucket.parameters]
                expected = [is_in + hidden.get(index, 0) for index, is_in in enumerate(found)]
                self._in_graph[bucket] = found
            else:
                expected = self._last[bucket]
            self._expected[bucket] = expected
            self._missing[bucket] = sum(expected)

    def came(self, bucket: Bucket, index: int) -> bool:
        """Count a gradient of parameter number `index`; return True if it is the last expected."""
        self.survey()
        self._tasks.add(graph_task())
        counts = self._came[bucket]
        counts[index] += 1
        if counts[index] > self._expected[bucket][index]:
            return False
        self._missing[bucket] -= 1
        return not self._missing[bucket]

    def awaits(self, bucket: Bucket) -> bool:
        """Return True if gradients of a bucket are still expected, or may be before `survey`."""
        return bool(self._missing.get(bucket, not self._is_surveyed))

    def end(self) -> None:
        """End a backward: remember the gradients that arrived without being in the graph."""
        if self._tasks:
            self._nests, self._last = len(self._tasks) > 1, self._came
        for bucket, found in self._in_graph.items():
            for index, count in enumerate(self._came[bucket]):
                if count:
                    self._hidden[bucket][index] = count - found[index]
