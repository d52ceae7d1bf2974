"""What ranks do together around files: agree, and fail as one."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from hadal.comm import Ranks
from hadal.comm.collectives import gather_codes, gather_objects
from hadal.errors import CheckpointError, HadalError

_log = logging.getLogger(__name__)


@contextmanager
def together(ranks: Ranks, what: str) -> Iterator[None]:
    """Run a block without collectives; where it raises on one rank, raise on all, and say why."""
    fault: Exception | None = None
    try:
        yield
    except Exception as error:  # of whatever kind: the others must not wait for this rank
        fault = error
    if not any(gather_codes(int(fault is not None), ranks)):
        return
    told = None if fault is None else str(fault)
    if fault is not None and not isinstance(fault, HadalError):
        told = f"{type(fault).__name__}: {fault}"
    faults = [f"rank {r}: {text}" for r, text in enumerate(gather_objects(told, ranks)) if text]
    more = f"; and {len(faults) - 4} more ranks" if len(faults) > 4 else ""
    raise CheckpointError(f"{what}: {'; '.join(faults[:4])}{more}") from fault


def compare_tags(tag: str, validation: str, ranks: Ranks) -> None:
    """Compare a tag between the ranks: "Warn", "Fail" or, without a look, "Ignore".

    Raises:
        CheckpointError: the ranks have different ones, and that shall be an error.
    """
    if validation == "Ignore":
        return
    tags: list[str] = gather_objects(tag, ranks)
    if len(set(tags)) > 1:
        told = f"the ranks save under different tags: {tags}; give the same tag on every rank"
        if validation == "Fail":
            raise CheckpointError(told)
        _log.warning("%s (rank 0's is taken)", told)
