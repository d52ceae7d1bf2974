"""Search for gradients that are not finite, and for the first parameter that has one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from hadal.comm import Ranks
from hadal.comm.collectives import gather_codes
from hadal.device import read_on_host
from hadal.zero.gradients import Gradients


def has_overflow(
    gradients: Sequence[Gradients], ranks: Ranks, model_parallel: Ranks | None = None
) -> bool:
    """Whether any mean gradient on any rank is not finite: for updates that compute no norm.

    The ranks that hold the other parts of the model take part. The host waits at most once for
    each device that has gradients.
    """
    finite: dict[torch.device, list[Tensor]] = {}
    for one in gradients:
        if one.mean.numel():
            # The extremes need no mask as long as the gradient; a NaN is both.
            extremes = torch.stack(torch.aminmax(one.mean))
            finite.setdefault(one.mean.device, []).append(extremes.isfinite().all())
    mine = not all(
        bool(read_on_host(torch.stack(each).all(), "the search for overflowed gradients"))
        for each in finite.values()
    )
    found = any(gather_codes(int(mine), ranks))
    if model_parallel is not None:
        found = any(gather_codes(int(found), model_parallel))
    return found


def first_overflow(
    gradients: Sequence[Gradients], names: Sequence[str], ranks: Ranks
) -> str | None:
    """The first of `names` (full names, in the model's order) whose mean gradient is not finite.

    Each rank looks at its own cut of the gradients; all ranks must call it, and get the same name.
    None where every single gradient is finite, and only the square of their norm is too large.
    """
    place = {name: number for number, name in enumerate(names)}
    mine = [place[name] for one in gradients for name in _not_finite(one)]
    first = min(gather_codes(min(mine, default=len(names)), ranks))
    return names[first] if first < len(names) else None


def _not_finite(one: Gradients) -> Iterator[str]:
    layout = one.bucket.layout
    for part in layout.fragments(*one.bucket.span):
        values = one.mean[part.offset : part.offset + part.numel]
        if not bool(torch.isfinite(values).all()):
            yield layout.slots[part.slot].name
