"""The protocol by which ranks on different paths agree on the bucket to gather next.

Every gather is announced. If all ranks announce the same bucket, it is gathered; if they differ,
each announced bucket is gathered in turn, and a rank that did not ask for it serves its shard. A
rank that has finished announces a marker and keeps serving until all have finished. So no rank ever
waits for one on another path.

With its marker a rank sends a word, a number that shows whether all ranks have done, or are about
to do, the same. If they are, they need not announce their gathers (see `gathering.py`).

Ranks meet at both ends of each pass (forward or backward). So between two passes no rank needs
anything from another, whatever collectives the program issues there.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import NamedTuple, Protocol

from hadal.comm import Ranks
from hadal.comm.collectives import gather_codes_and_least
from hadal.comm.works import in_step
from hadal.errors import MismatchError
from hadal.zero.bucket import Bucket


class Marker(Enum):
    """The points of a program at which ranks meet."""

    BEGINNING = "the beginning of a forward"
    FINE = "the beginning of a backward that does not end an update"
    FINE_AND_LAST = "the beginning of an update's last backward"
    AT_FAULT = "a backward that was refused, left out or raised"
    END_OF_FORWARD = "the end of a forward"
    END_OF_BACKWARD = "the end of a backward"
    END_OF_ACCESS = "the end of GatheredParameters or of a step"
    END_OF_UPDATE = "an update"
    REGROUP = "optimizer.add_param_group"
    METHOD = "a method of the optimizer"
    CHECKPOINT = "engine.save_checkpoint or load_checkpoint"
    PROGRESS = "the next gather, or the end of a backward"


_MARKERS = dict(enumerate(Marker, start=1))
_NUMBERS = {marker: number for number, marker in _MARKERS.items()}
_BACKWARD_MARKERS = {Marker.FINE, Marker.FINE_AND_LAST, Marker.END_OF_BACKWARD}
_PROGRESS = -_NUMBERS[Marker.PROGRESS]
_MARKER_BITS = 4


class Meeting(NamedTuple):
    """The announcements of all ranks at one meeting."""

    markers: frozenset[Marker]
    words: tuple[int, ...]

    @property
    def is_alike(self) -> bool:
        """Return True if all ranks sent the same word."""
        return len(set(self.words)) == 1


class Reductions(Protocol):
    """The reductions of the running backward, which ranks start in one order."""

    def progress(self) -> int:
        """Return how many are ready on this rank to start together with the other ranks'."""

    def start_together(self, count: int) -> None:
        """Start the first `count`, which are ready on all ranks, at the same moment on all."""

    def start_due(self, count: int | None) -> bool:
        """Start the first `count` (None: all); return True if a gradient was still expected."""

    def start_rest(self) -> None:
        """Start the rest, or let all ranks start them together."""

    def awaits(self, bucket: Bucket) -> bool:
        """Return True if gradients of a bucket are still expected in this backward."""

    def drop(self) -> None:
        """Drop all gradients since the last update, on all ranks alike."""


class Agreement:
    """One rank's side of the agreement on the gathers of `buckets`.

    A gather is announced by its bucket's number, plus the number of buckets if it is exact.
    """

    def __init__(self, ranks: Ranks, reductions: Reductions) -> None:
        self.buckets: Sequence[Bucket] = ()
        self._ranks = ranks
        self._reductions = reductions

    def request(self, number: int, *, exact: bool = False) -> None:
        """Gather a bucket, together with those that other ranks ask for."""
        bucket = self.buckets[number]
        code = number + len(self.buckets) if exact and bucket.rounds else number
        self._exchange(code, f"the agreement to gather {bucket.name}")

    def finish(self, marker: Marker, word: int = 0) -> Meeting:
        """Serve shards until every rank reaches the same point; return the announcements there.

        `word` has at most 59 bits.

        Raises:
            MismatchError: the ranks reached different markers, so their programs differ.
        """
        mine = -(_NUMBERS[marker] | word << _MARKER_BITS)
        label = f"the agreement of all ranks at {marker.value}"
        while True:
            codes = self._exchange(mine, label)
            if any(code >= 0 or code == _PROGRESS for code in codes):
                continue
            reached = [_MARKERS[-code & ((1 << _MARKER_BITS) - 1)] for code in codes]
            markers = frozenset(reached)
            # A rank with a fault fits the beginning of either kind of backward, and the end.
            others = markers - {Marker.AT_FAULT}
            if len(others) > 1 or not (others <= _BACKWARD_MARKERS or others == markers):
                points = ", ".join(f"rank {r}: {each.value}" for r, each in enumerate(reached))
                raise MismatchError(
                    f"the ranks' programs differ: they reached different points ({points}). Call"
                    " forward, backward, step, save, load and the optimizer's methods"
                    " on every rank, equally often, with the same boundaries between updates."
                )
            return Meeting(markers, tuple(-code >> _MARKER_BITS for code in codes))

    def compare_progress(self) -> None:
        """Exchange only the progress, and serve ranks at other points."""
        self._exchange(_PROGRESS, f"the agreement of all ranks at {Marker.PROGRESS.value}")

    @in_step
    def _exchange(self, mine: int, label: str) -> list[int]:
        """Announce a code, and take part in all gathers that any rank asks for."""
        progress = self._reductions.progress()
        codes, least = gather_codes_and_least(mine, progress, self._ranks, label)
        self._reductions.start_together(least)
        for code in sorted({code for code in codes if code >= 0}):
            is_exact, number = divmod(code, len(self.buckets))
            bucket, exact = self.buckets[number], bool(is_exact)
            askers = (rank for rank, asked in enumerate(codes) if asked == code)
            if code == mine:
                bucket.unshard(exact=exact)
            elif any(asker in bucket.gatherers_of(exact=exact) for asker in askers):
                # The ranks that gather it together all know which ranks asked, so all of them take
                # part or none does.
                bucket.serve(exact=exact)
        return codes
