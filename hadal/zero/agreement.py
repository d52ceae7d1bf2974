"""The agreement of ranks on different paths about which bucket to gather next.

Every gather is announced. If all ranks announce the same bucket it is gathered; if they differ,
each announced bucket is gathered in turn, and a rank that did not ask for it lends its shard. A
rank that is through announces a marker and keeps lending until all are through. So no rank ever
waits for one on another path.

With its marker a rank sends a word: a number that shows all whether they have done the same, or
are about to. Ranks that are need not announce (see `gathering.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

from hadal.comm import Ranks
from hadal.comm.collectives import gather_codes_and_least
from hadal.errors import MismatchError

(
    END_OF_FORWARD,
    END_OF_BACKWARD,
    END_OF_ACCESS,
    FINE,
    FINE_AND_LAST,
    AT_FAULT,
    BEGINNING,
    REGROUP,
    CHECKPOINT,
    PROGRESS,
    END_OF_UPDATE,
) = range(1, 12)
_MARKERS = {
    BEGINNING: "the beginning of a forward",
    FINE: "the beginning of a backward that does not end an update",
    FINE_AND_LAST: "the beginning of an update's last backward",
    AT_FAULT: "the beginning of a backward, with a fault",
    END_OF_FORWARD: "the end of a forward",
    END_OF_BACKWARD: "the end of a backward",
    END_OF_ACCESS: "the end of GatheredParameters or of a step",
    REGROUP: "optimizer.add_param_group",
    CHECKPOINT: "engine.save_checkpoint or load_checkpoint",
    END_OF_UPDATE: "an update",
    PROGRESS: "the next gather, or the end of a backward",
}
_MARKER_BITS = 4
WORD_LIMIT = 1 << 59


class Met(NamedTuple):
    """The announcements of all ranks at one meeting."""

    markers: frozenset[int]
    words: tuple[int, ...]

    @property
    def is_alike(self) -> bool:
        """Return True if all ranks sent the same word."""
        return len(set(self.words)) == 1


class Agreement:
    """One rank's side of the agreement. It owns only the means to gather and to lend.

    `lend` gets the ranks that have asked: if none of those that a rank gathers with has, it takes
    no part in the gather.
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
        """Returns how many reductions of the present backward this rank has ready."""
        self.start: Callable[[int], None] = lambda _: None
        """Starts as many as all ranks have ready, at the same moment on all."""

    def request(self, bucket: int) -> None:
        """Gather bucket number `bucket`, together with whatever the other ranks ask for."""
        label = f"the agreement to gather {self._name(bucket)}"
        while True:
            codes = self._talk(bucket, label)
            wanted = sorted({code for code in codes if code >= 0})
            self._serve(wanted, bucket, codes)
            if bucket in wanted:
                return

    def finish(self, marker: int, word: int = 0) -> Met:
        """Lend shards until every rank has come to the same point; return the announcements there.

        `word` is in [0, `WORD_LIMIT`).

        Raises:
            MismatchError: ranks came to different markers: their programs differ.
        """
        mine = -(marker | word << _MARKER_BITS)
        label = f"all ranks to come to {_MARKERS[marker]}"
        while True:
            codes = self._talk(mine, label)
            wanted = sorted({code for code in codes if code >= 0})
            self._serve(wanted, mine, codes)
            if wanted or -PROGRESS in codes:
                continue
            told = [-code & ((1 << _MARKER_BITS) - 1) for code in codes]
            markers = frozenset(told)
            # A rank at fault counts as at the beginning of either kind of backward.
            excused = {AT_FAULT} if markers <= {AT_FAULT, FINE, FINE_AND_LAST} else set()
            if len(markers - excused) > 1:
                points = ", ".join(f"rank {r}: {_MARKERS[each]}" for r, each in enumerate(told))
                raise MismatchError(
                    f"the ranks' programs differ: they came to different points ({points}). Call"
                    " forward, backward, step, save and load on every rank, equally"
                    " often, with the same boundaries between updates."
                )
            return Met(markers, tuple(-code >> _MARKER_BITS for code in codes))

    def compare_progress(self) -> None:
        """Exchange progress alone; ranks elsewhere are lent what they ask for."""
        codes = self._talk(-PROGRESS, f"all ranks to come to {_MARKERS[PROGRESS]}")
        self._serve(sorted({code for code in codes if code >= 0}), -PROGRESS, codes)

    def _talk(self, code: int, label: str) -> list[int]:
        count = self.progress()
        codes, least = gather_codes_and_least(code, count, self._ranks, label)
        self.start(least)
        return codes

    def _serve(self, wanted: Sequence[int], mine: int, codes: Sequence[int]) -> None:
        for bucket in wanted:
            if bucket == mine:
                self._gather(bucket)
            else:
                self._lend(bucket, [rank for rank, code in enumerate(codes) if code == bucket])
