"""Requests for weights to other ranks while their programs do something else.

In a steady round the ranks do not meet before its end. A rank requests the weights that its plan
lacks, and a thread of each other rank answers with its shard, which has not changed since the round
began there. So no rank waits for another's program, which may itself wait for this rank in a
collective.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

from torch import Tensor

from hadal.comm import Ranks
from hadal.comm.bell import Bell
from hadal.device import Event
from hadal.zero.bucket import Bucket
from hadal.zero.rounds import Rounds

# The time that a rank waits for the others to leave their plans at the same place as it does.
PATIENCE_S = 2.0


class _Way(NamedTuple):
    """The channel through which the ranks that share one copy send requests to each other."""

    bell: Bell
    desk: int
    ranks: Ranks


class Asking:
    """This rank's requests and answers, once rounds are steady."""

    def __init__(self, rounds: Rounds, buckets: Callable[[], Sequence[Bucket]]) -> None:
        self._rounds = rounds
        self._buckets = buckets
        self._way: _Way | None = None
        self._begun = 0, Event()
        """The last steady round that began here, and the event after which its weights exist."""
        self._alone_in = 0
        """The last round in which this rank could not follow its plan, while others could."""

    def begin(self) -> None:
        """Begin a pass of a steady round: weights do not change until the round ends."""
        number, buckets = self._rounds.number, self._buckets()
        if self._begun[0] == number or not buckets:
            return
        if self._way is None:
            bell, ranks = Bell.here(), buckets[0].sharing.shards
            if bell is None:
                return
            self._way = _Way(bell, bell.open(self, ranks), ranks)
        self._begun = number, Event.on(buckets[0].device)

    @property
    def is_asked(self) -> bool:
        """Return True in a steady round that has begun here, so that others may send requests."""
        return self._rounds.is_steady and self._begun[0] == self._rounds.number

    def all_leave(self) -> bool:
        """Return True if no rank can follow its plan in this pass; this one cannot.

        Then all may meet. A rank that finds it is the only one does not ask again in this round.
        """
        way, number = self._way, self._rounds.number
        if way is None or not self.is_asked:
            return True
        if self._alone_in != number:
            where = way.desk, number, self._rounds.place
            are_here = way.bell.all_come(where, self._rounds.ranks, PATIENCE_S)
            self._alone_in = 0 if are_here else number
        return self._alone_in != number

    def fetch(self, number: int) -> bool:
        """Fill sharded bucket number `number` from the other ranks' answers.

        Returns False if it cannot be requested.
        """
        bucket, way = self._buckets()[number], self._way
        if way is None or not self.is_asked or not bucket.lends_shard:
            return False
        if bucket.sharing.shards != way.ranks:
            return False
        label = f"the request to other ranks for {bucket.name}"
        what = [self._rounds.number, number]
        bucket.fetch(partial(way.bell.ask, way.desk, what, ranks=way.ranks, label=label))
        return True

    def answer(self, what: Sequence[int]) -> Tensor | None:
        """Return a bucket's shard on the host, or None if it is not ready. Called by a thread."""
        round_, number = what
        begun, there = self._begun
        return self._buckets()[number].shard_on_host(there) if begun == round_ else None
