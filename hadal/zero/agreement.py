"""The protocol by which ranks on different paths agree on the bucket to gather next.

Every gather is announced. If all ranks announce the same bucket, it is gathered; if they differ,
each announced bucket is gathered in turn, and a rank that did not ask for it lends its shard. A
rank that has finished announces a marker and keeps lending until all have finished. So no rank ever
waits for one on another path.

With its marker a rank sends a word, a number that shows whether all ranks have done, or are about
to do, the same. If they are, they need not announce their gathers (see `gathering.py`).

Ranks meet at both ends of each pass (forward or backward). So between two passes no rank needs
anything from another, whatever collectives the program issues there.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from enum import Enum
from typing import NamedTuple

from hadal.comm import Ranks
from hadal.comm.collectives import gather_codes_and_least
from hadal.comm.interrupts import in_step
from hadal.errors import MismatchError


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
_OF_BACKWARD = {Marker.FINE, Marker.FINE_AND_LAST, Marker.END_OF_BACKWARD}
_PROGRESS = -_NUMBERS[Marker.PROGRESS]
_MARKER_BITS = 4
WORD_LIMIT = 1 << 59


class Met(NamedTuple):
    """The announcements of all ranks at one meeting."""

    markers: frozenset[Marker]
    words: tuple[int, ...]

    @property
    def is_alike(self) -> bool:
        """Return True if all ranks sent the same word."""
        return len(set(self.words)) == 1


class Agreement:
    """One rank's side of the agreement.

    `gather` gathers a bucket here; `lend` takes part in a gather for other ranks. `lend` gets the
    ranks that asked: if this rank gathers the bucket with none of them, it takes no part.
    """

    def __init__(
        self,
        ranks: Ranks,
        gather: Callable[[int], None],
        lend: Callable[[int, Collection[int]], None],
        name: Callable[[int], str] = str,
    ) -> None:
        self._ranks = ranks
        self._name = name
        self._gather = gather
        self._lend = lend
        self.progress: Callable[[], int] = lambda: 0
        """Returns the number of this backward's reductions that are ready on this rank."""
        self.start: Callable[[int], None] = lambda _: None
        """Starts the reductions that are ready on all ranks, at the same moment on all."""

    def request(self, bucket: int) -> None:
        """Gather bucket number `bucket`, together with those that other ranks ask for."""
        self._exchange(bucket, f"the agreement to gather {self._name(bucket)}")

    def finish(self, marker: Marker, word: int = 0) -> Met:
        """Lend shards until every rank reaches the same point; return the announcements there.

        `word` is in [0, `WORD_LIMIT`).

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
            if len(others) > 1 or not (others <= _OF_BACKWARD or others == markers):
                points = ", ".join(f"rank {r}: {each.value}" for r, each in enumerate(reached))
                raise MismatchError(
                    f"the ranks' programs differ: they reached different points ({points}). Call"
                    " forward, backward, step, save, load and the optimizer's methods"
                    " on every rank, equally often, with the same boundaries between updates."
                )
            return Met(markers, tuple(-code >> _MARKER_BITS for code in codes))

    def compare_progress(self) -> None:
        """Exchange only the progress, and lend what ranks at other points ask for."""
        self._exchange(_PROGRESS, f"the agreement of all ranks at {Marker.PROGRESS.value}")

    @in_step
    def _exchange(self, mine: int, label: str) -> list[int]:
        """Announce a code, and take part in all gathers that any rank asks for."""
        codes, least = gather_codes_and_least(mine, self.progress(), self._ranks, label)
        self.start(least)
        for bucket in sorted({code for code in codes if code >= 0}):
            if bucket == mine:
                self._gather(bucket)
            else:
                self._lend(bucket, [rank for rank, code in enumerate(codes) if code == bucket])
        return codes
