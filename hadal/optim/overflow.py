"""The search for non-finite gradients, and for the first parameter with one.

Tests: tests/engine/test_precision_fp16.py
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain

import torch
from torch import Tensor

from hadal.comm import Ranks
from hadal.comm.collectives import gather_codes, sum_
from hadal.device import read_on_host
from hadal.optim.norm import ROW_NUMEL, RowNorms, device_of_sum
from hadal.zero.gradients import Gradients
from hadal.zero.sharing import ModelParts


def has_overflow(
    gradients: Sequence[Gradients], ranks: Ranks, parts: ModelParts | None = None
) -> Tensor:
    """Return whether any mean gradient on any rank is non-finite, for updates without a norm.

    The ranks of the model's other parts take part. The flag is on the accelerator if all
    gradients are.
    """
    device = device_of_sum(gradients)
    found = torch.zeros((), device=device)
    for one in gradients:
        if one.mean.numel():
            # The extremes avoid a mask as long as the gradient; a NaN is both of them.
            extremes = torch.stack(torch.aminmax(one.mean))
            if one.mean.device != device:
                extremes = read_on_host(extremes, "the extremes of the gradients")
            found += extremes.isfinite().all().logical_not()
    sum_(found, ranks, "the search for overflowed gradients")
    if parts is not None:
        sum_(found, parts.ranks, "the search for overflowed gradients")
    return found > 0


def first_overflow(
    gradients: Sequence[Gradients], names: Sequence[str], ranks: Ranks
) -> str | None:
    """Return the first of `names` (full, in the model's order) with a non-finite mean gradient.

    Each rank checks its own slice of the gradients; all ranks must call it, and get the same name.
    None if every gradient is finite and only the square of their norm is too large.
    """
    return _first_of((name for one in gradients for name in _not_finite(one)), names, ranks)


def _first_of(found: Iterable[str], names: Sequence[str], ranks: Ranks) -> str | None:
    """Return the first of `names` that any rank has found."""
    place = {name: number for number, name in enumerate(names)}
    mine = min((place[name] for name in found), default=len(names))
    first = min(gather_codes(mine, ranks))
    return names[first] if first < len(names) else None


def _not_finite(one: Gradients) -> Iterator[str]:
    layout = one.bucket.layout
    for part in layout.fragments(*one.bucket.span):
        values = one.mean[part.offset : part.offset + part.numel]
        where = layout.slots[part.slot].name
        if not bool(read_on_host(torch.isfinite(values).all(), f"whether {where} overflowed")):
            yield where


def first_row_overflow(rows: RowNorms, names: Sequence[str], ranks: Ranks) -> str | None:
    """Search like `first_overflow`, by the norms of rows, if the gradients are already freed.

    It cannot distinguish parameters that share a row.
    """
    near = (_near(one, start, norms) for one, (start, norms) in rows.items())
    return _first_of(chain.from_iterable(near), names, ranks)


def _near(one: Gradients, start: int, norms: Tensor) -> Iterator[str]:
    layout = one.bucket.layout
    finite = read_on_host(norms, "the norms of the gradients' rows").isfinite()
    for row in finite.logical_not().nonzero().flatten().tolist():
        low = start + row * ROW_NUMEL
        for part in layout.fragments(low, min(low + ROW_NUMEL, layout.numel)):
            yield layout.slots[part.slot].name
