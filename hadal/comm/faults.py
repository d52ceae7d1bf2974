"""Faults of one rank that are raised on all, so that none waits for a rank that has stopped."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from hadal.comm import functions
from hadal.comm.collectives import gather_codes, gather_objects
from hadal.comm.functions import labelled
from hadal.comm.ranks import Ranks
from hadal.errors import HadalError, MismatchError


@contextmanager
def raised_on_all(
    ranks: Ranks, where: str, kind: type[HadalError] = MismatchError
) -> Iterator[None]:
    """Run a block without collectives; if it raises on one rank, raise on every rank.

    A rank whose own block raised keeps its own exception; the others raise a `kind` that quotes it.
    """
    fault: Exception | None = None
    try:
        yield
    except Exception as error:
        fault = error
    if any(gather_codes(int(fault is not None), ranks)):
        messages = gather_objects(
            None if fault is None else f"{type(fault).__name__}: {fault}", ranks
        )
        if fault is not None:
            raise fault
        rank, first = next((r, text) for r, text in enumerate(messages) if text is not None)
        raise kind(f"{where} stopped on rank {rank}, and so on every rank: {first}")


def is_same_everywhere(text: str, ranks: Ranks, *, is_by_torch: bool = False) -> bool:
    """Return True if all ranks passed the same text; one small exchange for any number of ranks.

    With `is_by_torch` it is torch's own collective, which other versions of Hadal know too.
    """
    code = int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")
    if not is_by_torch:
        return len(set(gather_codes(code, ranks))) == 1
    bounds = torch.tensor([code, -code], device="cpu")
    if ranks.size > 1:
        label, operation = "the comparison of versions", dist.ReduceOp.MAX
        labelled(label, functions.all_reduce, bounds, operation, ranks.host_group)
    return int(bounds[0]) == -int(bounds[1])
