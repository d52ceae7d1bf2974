"""Whether gradients overflowed, and whose: what the norm does not tell."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from hadal.comm import Ranks
from hadal.comm.collectives import gather_codes
from hadal.zero.gradients import Gradients


def has_overflow(
    gradients: Sequence[Gradients], ranks: Ranks, model_parallel: Ranks | None = None
) -> bool:
    """Whether any mean gradient on any rank is not finite, for those who want no norm.

    The ranks that hold the other parts of the model are asked too.
    """
    found = any(gather_codes(int(not all(map(_is_finite, gradients))), ranks))
    if model_parallel is not None:
        found = any(gather_codes(int(found), model_parallel))
    return found


def _is_finite(one: Gradients) -> bool:
    # The extremes tell it without a mask as long as the gradient; a NaN is both.
    extremes = torch.stack(torch.aminmax(one.mean)) if one.mean.numel() else one.mean
    return bool(extremes.isfinite().all())


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
