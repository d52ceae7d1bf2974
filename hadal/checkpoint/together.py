"""What ranks do together around files: agree, and fail as one."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from hadal.comm import Ranks
from hadal.comm.collectives import gather_codes, gather_objects
from hadal.errors import CheckpointError, HadalError, few

_log = logging.getLogger(__name__)
_SHOWN = 4


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
    raise CheckpointError(f"{what}: {listed(gather_objects(told, ranks))}") from fault


def listed(faults: Sequence[str | None]) -> str:
    """What went wrong on which ranks, once for all that say the same; None: nothing."""
    ranks_of: dict[str, list[int]] = {}
    for rank, text in enumerate(faults):
        if text is not None:
            ranks_of.setdefault(text, []).append(rank)
    lines = [f"{_named(ranks, len(faults))}: {text}" for text, ranks in ranks_of.items()]
    more = [f"and {len(lines) - _SHOWN} more faults"] if len(lines) > _SHOWN else []
    return "; ".join(lines[:_SHOWN] + more)


def _named(ranks: list[int], world_size: int) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if len(ranks) == world_size:
        return "every rank"
    return f"ranks {few(ranks, _SHOWN)}"


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
