"""How ranks that may take different paths agree on which bucket to gather next.

Every gather is announced. Where all ranks announce the same bucket it is gathered; where they
differ each announced bucket is gathered in turn, and a rank that did not ask for it lends its
shard. A rank that is through announces a marker and keeps lending until all are through. So no
rank ever waits for one that went another way.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from hadal.comm import Ranks
from hadal.comm.collectives import gather_codes
from hadal.errors import MismatchError

END_OF_FORWARD, END_OF_BACKWARD, END_OF_ACCESS, FINE, AT_FAULT, REGROUP = -1, -2, -3, -4, -5, -6
FINE_AND_LAST, CHECKPOINT = -7, -8
_MARKERS = {
    FINE: "the beginning of a backward that does not end an update",
    FINE_AND_LAST: "the beginning of an update's last backward",
    AT_FAULT: "the beginning of a backward, with a fault",
    END_OF_FORWARD: "the end of a forward",
    END_OF_BACKWARD: "the end of a backward",
    END_OF_ACCESS: "the end of GatheredParameters or of a step",
    REGROUP: "optimizer.add_param_group",
    CHECKPOINT: "engine.save_checkpoint or load_checkpoint",
}


class Agreement:
    """One rank's side of the agreement. It owns nothing but the means to gather and to lend."""

    def __init__(
        self, ranks: Ranks, gather: Callable[[int], None], lend: Callable[[int], None]
    ) -> None:
        self._ranks = ranks
        self._gather = gather
        self._lend = lend

    def request(self, bucket: int) -> None:
        """Gather bucket number `bucket`, together with whatever the other ranks ask for."""
        while True:
            wanted = self._wanted(bucket)
            self._serve(wanted, bucket)
            if bucket in wanted:
                return

    def finish(self, marker: int) -> set[int]:
        """Lend shards until every rank has come to the same point; the markers announced there.

        Raises:
            MismatchError: ranks came to different markers: their programs differ.
        """
        while True:
            codes = gather_codes(marker, self._ranks)
            wanted = sorted({code for code in codes if code >= 0})
            self._serve(wanted, marker)
            markers = {code for code in codes if code < 0}
            # A rank at fault stands at the beginning of a backward too, whichever it is.
            excused = {AT_FAULT} if markers <= {AT_FAULT, FINE, FINE_AND_LAST} else set()
            if not wanted and len(markers - excused) > 1:
                told = ", ".join(f"rank {r}: {_MARKERS[code]}" for r, code in enumerate(codes))
                raise MismatchError(
                    f"the ranks' programs differ: they came to different points ({told}). Call"
                    " forward, backward, step, and what saves and loads, on every rank, equally"
                    " often, with the same boundaries between updates."
                )
            if not wanted:
                return markers

    def _wanted(self, mine: int) -> Sequence[int]:
        return sorted({code for code in gather_codes(mine, self._ranks) if code >= 0})

    def _serve(self, wanted: Sequence[int], mine: int) -> None:
        for bucket in wanted:
            if bucket == mine:
                self._gather(bucket)
            else:
                self._lend(bucket)
