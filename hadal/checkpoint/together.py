"""Collective handling of file operations: ranks agree, and fail together."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from hadal.checkpoint.files import Given, location_of
from hadal.checkpoint.storage import Location
from hadal.comm import Ranks
from hadal.comm.collectives import gather_codes, gather_objects
from hadal.comm.faults import is_same_everywhere
from hadal.errors import CheckpointError, HadalError, few

_log = logging.getLogger(__name__)
_SHOWN = 4


@contextmanager
def together(ranks: Ranks, what: str) -> Iterator[None]:
    """Run a block without collectives; if it raises on one rank, raise on all with the reason."""
    fault: Exception | None = None
    try:
        yield
    except Exception as error:  # any kind: the other ranks must not wait for this one
        fault = error
    if not any(gather_codes(int(fault is not None), ranks)):
        return
    message = None if fault is None else str(fault)
    if fault is not None and not isinstance(fault, HadalError):
        message = f"{type(fault).__name__}: {fault}"
    raise CheckpointError(f"{what}: {listed(gather_objects(message, ranks))}") from fault


def listed(faults: Sequence[str | None]) -> str:
    """Format the faults of all ranks, each text once with its ranks; None means no fault."""
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


def common_folder(given: Given, ranks: Ranks, what: str) -> Location:
    """Return the folder that rank 0 was given; if another rank has a different one, rank 0 warns.

    Each rank may have named it after its own clock, or created a temporary one. A collective.
    """
    folder = location_of(given)
    place = str(folder.absolute() if isinstance(folder, Path) else folder)
    if is_same_everywhere(place, ranks):
        return folder
    places: list[str] = gather_objects(place, ranks)
    if ranks.rank == 0:
        other = next(rank for rank, one in enumerate(places) if one != places[0])
        _log.warning(
            "%s: rank 0 passed the folder %s, and rank %d %s; rank 0's is used on every rank. Name"
            " it on rank 0 and broadcast the name, or set checkpoint.use_node_local_storage if"
            " each node has a folder of its own",
            what,
            places[0],
            other,
            places[other],
        )
    with together(ranks, what):
        folder = location_of(places[0])
    return folder


def compare_tags(tag: str, validation: str, ranks: Ranks) -> None:
    """Compare the ranks' tags; `validation` is "Warn", "Fail" or "Ignore" (no comparison).

    Raises:
        CheckpointError: the tags differ and `validation` is "Fail".
    """
    if validation == "Ignore":
        return
    tags: list[str] = gather_objects(tag, ranks)
    if len(set(tags)) > 1:
        message = f"the ranks save under different tags: {tags}; pass the same tag on every rank"
        if validation == "Fail":
            raise CheckpointError(message)
        _log.warning("%s (rank 0's tag is used)", message)
