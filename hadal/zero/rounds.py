"""Rounds: the ranks' work from one update to the next, without announcements if it is regular.

A round is a sequence of passes (forwards and backwards), each along its plan. While its course is
not known, ranks meet at both ends of each pass. Once all have taken the same course often enough,
the next rounds are *steady*: each rank knows what all will do, and a single exchange before the
update shows if a rank did something else.

A rank requests weights that its plan lacks (see `asking.py`). If it needs anything else in a steady
round, it *leaves* the round. The others rely on its part in all collectives up to the update, so it
first does that part, with gradients of zero, and meets them in the exchange: the exchange is always
the next message of every rank. It reports which ranks have left, and where; from then on ranks meet
again. A rank that is behind the others continues from where it left: it announces what it needs,
and the others, which wait for it, lend their shards.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from hadal.comm import Ranks
from hadal.comm.collectives import sum_
from hadal.comm.interrupts import in_step
from hadal.errors import LossError, MismatchError
from hadal.zero.agreement import Marker, Met
from hadal.zero.planner import Plan
from hadal.zero.trace import Kind, digest_of

# The number of equal rounds in a row before the next is steady. It is doubled when a rank leaves
# before there were `_WORTH` steady rounds, except the first time, and is halved if there were.
_PATIENCE, _MOST_PATIENCE, _WORTH = 2, 64, 16

# Flags that are sent with a place or with the digest of a round, one bit each.
_FAULT, _EARLY, _STRAY, _MIXED, _BEHIND = (1 << bit for bit in range(5))
_BITS = 5
# Longer rounds are never steady.
_LONGEST = 4096


class RoundPass(NamedTuple):
    """A forward or backward that all ranks run."""

    kind: Kind
    is_last: bool
    """True: weights change after it."""
    plan: Plan | None
    """The plan of its gathers; None if no weights are gathered."""


class Stray(NamedTuple):
    """A pass in which this rank did not follow the plan of a steady round."""

    kind: Kind
    planned: tuple[int, ...]
    went: tuple[int, ...]
    """The buckets used so far."""


class Part(NamedTuple):
    """Callbacks for the part of a rank that leaves a round."""

    prepare: Callable[[], None]
    """Finish reductions that are under way, and set collected gradients aside."""
    play: Callable[[RoundPass], None]
    """Take part in a pass without running it."""
    take_back: Callable[[bool], None]
    """Restore the gradients set aside; its argument is True if no rank has gone on meanwhile."""
    drop: Callable[[], None]
    """Drop all gradients of this update."""


class Course:
    """The past rounds and the prediction of the next one, which are the same on all ranks.

    If steady rounds are interrupted at regular intervals, by an evaluation for example, the next
    interruption is expected, and that round is not steady.
    """

    def __init__(self) -> None:
        self.known: tuple[RoundPass, ...] = ()
        self._alike = 0
        self._patience = _PATIENCE
        self._since = 0
        self._interval: int | None = None
        self._is_regular = False

    def forget(self) -> None:
        """Forget how many rounds were equal, because the next ones will differ."""
        self._alike = 0

    @property
    def is_known(self) -> bool:
        """Return True if all ranks know the course of the next round."""
        is_due = self._is_regular and self._since == self._interval
        return self._alike >= self._patience and not is_due

    def left(self) -> None:
        """Record that a rank left a known round."""
        is_again = self._since == self._interval
        if self._since >= _WORTH:
            self._patience = max(_PATIENCE, self._patience // 2)
        elif self._interval is not None and not is_again:
            self._patience = min(2 * self._patience, _MOST_PATIENCE)
        self._is_regular, self._interval = is_again, self._since
        self._alike = self._since = 0

    def came(self, round_: tuple[RoundPass, ...] | None) -> None:
        """Record the end of a round in which ranks met; None if they did different things."""
        if round_ and round_ == self.known:
            self._alike += 1
        else:
            if self._alike >= self._patience:
                self.left()
            self._alike = 1 if round_ else 0
            self.known = round_ or self.known
        self._since += 1

    def held(self) -> None:
        """Record the end of a steady round that went as expected."""
        self._since += 1


class Rounds:
    """This rank's progress in the current round.

    Its `place` counts the beginnings and ends of passes: 2 n before pass n, 2 n + 1 in it.
    """

    _latest: ClassVar[weakref.ref[Rounds] | None] = None

    def __init__(
        self,
        ranks: Ranks,
        meet: Callable[[Marker, int], Met],
        report: Callable[[list[Stray]], None],
        forget: Callable[[], None],
    ) -> None:
        self.ranks = ranks
        self._meet = meet
        self._report = report
        self._forget = forget
        self._course = Course()
        self.part: Part
        """Set before the first round begins."""
        self.number = 0
        """The number of the current round, the same on all ranks."""
        self._begin_round()

    def _begin_round(self) -> None:
        self.number += 1
        self.is_steady = self.ranks.size > 1 and self._course.is_known
        """True: all ranks know the course of the round and do not meet."""
        self._record: list[RoundPass] = []
        self._is_even = True
        self.place = self._played = 0
        self._owed = 0
        self._is_inside = False
        self._is_faulty = self._is_early = self._is_mixed = False
        self._strays: list[Stray] = []

    def forget(self) -> None:
        """Forget the course, on all ranks alike, because the work will change."""
        self._course.forget()
        self.is_steady = False
        self.spoil()

    def spoil(self) -> None:
        """Mark the current round as irregular: the ranks have met for something outside of it."""
        self._is_even = False

    @property
    def _end(self) -> int:
        return 2 * len(self._course.known)

    @property
    def is_at_end(self) -> bool:
        """Return True if a steady round has reached its end as expected."""
        return self.is_steady and self.place == self._played == self._end

    @property
    def is_behind(self) -> bool:
        """Return True if other ranks wait for this one at a place that it has not reached."""
        return self._owed > 0

    # ---- passes -------------------------------------------------------------------------------

    def enter(self) -> None:
        """Enter a pass, whether or not ranks have met."""
        self._look_for_others()
        self._is_inside = True

    def _look_for_others(self) -> None:
        """Note if engines alternate within a round: they could wait for each other across ranks."""
        latest = None if Rounds._latest is None else Rounds._latest()
        if latest is not self:
            self._is_mixed |= self._is_inside
            Rounds._latest = weakref.ref(self)

    def next(self, kind: Kind, *, is_last: bool | None) -> RoundPass | None:
        """Return the pass of a steady round that begins here, or None if it is of another kind.

        `is_last`: None matches both.
        """
        self._look_for_others()
        if not self.is_steady or self._is_mixed or self._played > self.place + 2:
            return None
        number = self.place // 2
        if self.place % 2 or number == len(self._course.known):
            return None
        pass_ = self._course.known[number]
        fits = pass_.kind is kind and is_last in (None, pass_.is_last)
        return pass_ if fits else None

    @property
    def is_again(self) -> bool:
        """Return True if the pass was begun before, so that this rank's part in it is done."""
        return self._played > self.place

    def begin(self) -> None:
        """Begin the next pass of a steady round."""
        self.place += 1
        self._played = max(self._played, self.place)

    def end(self, stray: Stray | None, *, is_early: bool) -> None:
        """End a pass of a steady round; `is_early`: it reduced some gradients too early."""
        self._look_for_others()
        self.place += 1
        self._played = max(self._played, self.place)
        self._is_early |= is_early
        if stray is not None:
            self._strays.append(stray)

    def abandon(self) -> None:
        """Go back to before a forward that raised; its part is done, and it may run again."""
        if not self._is_inside:
            return  # its round is over
        if self.is_steady:
            self.place -= 1
            self._played = self.place + 2
        else:
            # The others wait at its end until this rank has run another forward.
            self._owed += 1

    def break_off(self) -> None:
        """End a backward that raised; its gradients are missing, and others may not wait for it."""
        if self.is_steady:
            self._is_faulty = True
            self.end(None, is_early=False)
        elif self.is_behind:
            self._is_faulty = self.passes()

    def passes(self) -> bool:
        """Return True if this rank is behind and goes on here without meeting the others."""
        is_behind = self.is_behind
        self._owed -= is_behind
        return is_behind

    def note(self, pass_: RoundPass, *, is_even: bool) -> None:
        """Record a pass at whose ends all ranks met; `is_even`: all followed its plan."""
        self._look_for_others()
        self._is_even &= is_even and len(self._record) < _LONGEST
        if self._is_even:
            self._record.append(pass_)

    def refuse(self) -> bool:
        """Refuse a backward on this rank while others may begin theirs without waiting.

        Returns:
            True if that backward counts as one without gradients on this rank.
        """
        self._is_faulty = True
        if not self.is_steady:
            self._owed -= min(2, self._owed)
            return True
        pass_ = self.next(Kind.BACKWARD, is_last=None)
        if pass_ is not None:
            self.part.play(pass_)
            self.place = self._played = self.place + 2
        if pass_ is None or self.place == self._end:
            self.leave()
        return pass_ is not None

    # ---- the end of a round ----------------------------------------------------------------------

    @in_step
    def leave(self, stray: Stray | None = None) -> None:
        """Leave a steady round, after doing the rest of this rank's part in it.

        Raises:
            LossError: a rank's gradients are missing, and the round is over.
            MismatchError: ranks took different paths, and that is not tolerated.
        """
        if stray is not None:
            self._strays.append(stray)
        part, is_mine = self.part, self._is_faulty
        part.prepare()
        for pass_ in self._course.known[(self._played + 1) // 2 :]:
            part.play(pass_)
        self._exchange(True, torch.zeros((), dtype=torch.float64))
        places = self._compare(self.place)
        part.take_back(places is not None and min(places) == max(places))
        if places is None:
            part.drop()
            if not is_mine:
                raise self._loss_error()

    @in_step
    def finish(self, is_news: bool, part: Tensor) -> Tensor | None:
        """End the round, before an update.

        Args:
            is_news: this rank has something to report that the others do not expect.
            part: a float64 scalar on the host.

        Returns:
            The sum of all ranks' `part` if no rank had any news; otherwise None.

        Raises:
            LossError: a rank's gradients are missing, and the round is over.
            MismatchError: the ranks' programs differ.
        """
        if self.ranks.size == 1:
            return None
        self._look_for_others()
        if self.is_steady and not self.is_at_end:
            self.leave()
        if self.is_steady:
            has_own = self._is_faulty or self._is_early or self._is_mixed or bool(self._strays)
            total = self._exchange(is_news or has_own, part)
            if total is not None:
                self._course.held()
                self._begin_round()
                return total
            places = self._compare(self._end + 1)
            if places is None:
                self.part.drop()
                raise self._loss_error()
            if min(places) > self._end:
                # All ranks are here, so none waits for another.
                self._course.held()
                self._begin_round()
                return None
        self._meet_all()
        return None

    def _exchange(self, is_news: bool, part: Tensor) -> Tensor | None:
        sums = torch.stack([torch.tensor(float(is_news), dtype=torch.float64), part])
        sum_(sums, self.ranks, "the agreement of all ranks at an update")
        return sums[1] if sums[0] == 0 else None

    def _word(self, value: int) -> int:
        flags = _FAULT * self._is_faulty | _EARLY * self._is_early | _MIXED * self._is_mixed
        return value << _BITS | flags | _STRAY * bool(self._strays) | _BEHIND * self.is_behind

    def _compare(self, mine: int) -> list[int] | None:
        """Return each rank's place at the end of a steady round that did not go as expected.

        None: a rank's gradients are missing, so the round is over for all.
        """
        met = self._meet(Marker.END_OF_UPDATE, self._word(mine))
        places, end, flags = [word >> _BITS for word in met.words], self._end, _flags_of(met)
        strays, self._strays = self._strays, []
        if flags or min(places) <= end:
            self._course.left()
            self.is_steady = self._is_even = False
            self._is_early = self._is_mixed = False
            self._owed = min(max(places), end) - min(mine, end)
        if flags & _FAULT:
            self._begin_round()
        self._learn(flags, strays)
        return None if flags & _FAULT else places

    def _meet_all(self) -> None:
        """End a round in which ranks meet."""
        course = digest_of(
            *((s.kind.value, s.is_last, s.plan and s.plan.digest) for s in self._record)
        )
        met = self._meet(Marker.END_OF_UPDATE, self._word(course))
        flags, strays = _flags_of(met), self._strays
        is_even = met.is_alike and self._is_even and not flags
        self._course.came(tuple(self._record) if is_even else None)
        self._begin_round()
        self._learn(flags, strays)
        behind = [rank for rank, word in enumerate(met.words) if word & _BEHIND]
        if behind:
            raise MismatchError(
                f"the ranks' programs differ: rank {behind[0]} reached its update with fewer"
                " forwards or backwards than others. Call forward, backward and step on every rank,"
                " equally often, with the same boundaries between updates."
            )
        if flags & _FAULT:
            self.part.drop()
            raise self._loss_error()

    def _learn(self, flags: int, strays: list[Stray]) -> None:
        if flags & _EARLY:
            self._forget()  # the next plan waits for the late gradients
        if flags & _STRAY:
            self._report(strays)

    def _loss_error(self) -> LossError:
        return LossError(
            f"rank {self.ranks.rank}: a backward of this update was refused, was skipped or raised"
            " on another rank (see its error); the update is skipped on all ranks"
        )


def _flags_of(met: Met) -> int:
    """Return the flags that any rank has sent."""
    flags = 0
    for word in met.words:
        flags |= word & ((1 << _BITS) - 1)
    return flags
