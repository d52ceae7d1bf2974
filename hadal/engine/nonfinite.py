"""Handling of gradients that are not finite: updates skipped in a row, and fp32 weights."""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Sequence

from torch import Tensor

from hadal.comm.collectives import gather_codes
from hadal.device import read_on_host
from hadal.engine.parts import Parts
from hadal.errors import NonFiniteError
from hadal.optim.norm import first_nonfinite_weight

_log = logging.getLogger(__name__)


class SkippedInARow:
    """Count of updates skipped in a row; too many are an error.

    An overflow that lowers the loss scale does not count: fp16 training begins with some of them.
    """

    def __init__(self, limit: int) -> None:
        """Set the number that is an error; 0 allows any number."""
        self._limit = limit
        self._reasons: list[str] = []

    def clear(self) -> None:
        """Restart: an update was not skipped."""
        self._reasons.clear()

    def add(self, number: int, reason: str) -> None:
        """Count a skipped update `number`.

        Raises:
            NonFiniteError: it is one too many.
        """
        self._reasons.append(reason)
        count = len(self._reasons)
        if not self._limit or count < self._limit:
            return
        seen = Counter(self._reasons).most_common()
        self.clear()
        listed = "".join(f"\n  {many} times: {why}" for why, many in seen)
        raise NonFiniteError(
            f"the last {count} updates were skipped, the last one is update {number}; nothing is"
            f" being trained.{listed}\nLook for NaN in the data and in the weights, or lower the"
            " learning rate. max_skipped_updates changes how many are allowed (0: any number)"
        )


def sources_of(losses: Sequence[Tensor], parts: Parts) -> str:
    """Return which losses and which weight are not finite either, as the end of a sentence.

    All ranks must call it together. Weights are searched unless all losses are known to be finite.
    """
    ranks = parts.ranks
    values = [float(read_on_host(loss.reshape(()), "the loss")) for loss in losses]
    codes = gather_codes(-1 if not values else int(not all(map(math.isfinite, values))), ranks)
    found = [str(rank) for rank, code in enumerate(codes) if code > 0]
    sources = [f"the loss on rank {', '.join(found)}"] if found else []
    if any(codes):
        names = [name for name, _ in parts.model.named_parameters()]
        weight = first_nonfinite_weight(parts.runtime.buckets, names, ranks)
        sources += [] if weight is None else [f"the weight {weight}"]
    return "".join(f", nor is {source}" for source in sources)


def warn_of_nonfinite(number: int, culprit: str | None, sources: str) -> None:
    """Warn that fp32 weights receive a non-finite gradient."""
    _log.warning(
        "update %d: %s is not finite%s. This training does not skip such updates, so weights become"
        " NaN; this is logged once",
        number,
        "their norm" if culprit is None else f"the gradient of {culprit}",
        sources,
    )
