"""What stands around an update of the weights: what the gradients are like, and the loss scale."""

from __future__ import annotations

import logging
import math

from hadal.comm.collectives import gather_objects
from hadal.engine.parts import Finding, Parts
from hadal.optim.loss_scale import ScaleState, next_scale
from hadal.optim.norm import clip_coefficient, global_norm
from hadal.optim.overflow import first_overflow, has_overflow

_log = logging.getLogger(__name__)


def measure(parts: Parts, scale: float) -> Finding:
    """Look at the mean gradients of a loss that was multiplied with `scale`.

    All ranks must call it together, and find the same.
    """
    norm, overflow = _norm_and_overflow(parts, scale)
    if overflow:
        return Finding(norm, overflow=True, culprit=_culprit(parts))
    clip = 1.0 if norm is None else clip_coefficient(norm, parts.gradient_clipping)
    return Finding(norm, clip)


def _norm_and_overflow(parts: Parts, scale: float) -> tuple[float | None, bool]:
    """The gradients' norm, if it is wanted, and whether the update must be skipped."""
    gradients, model_parallel = parts.runtime.gradients, parts.topology.model_parallel
    if not parts.computes_norm:
        blown = parts.skip_overflow and has_overflow(gradients, parts.ranks, model_parallel)
        return None, blown
    norm = global_norm(gradients, parts.topology.sharing, model_parallel) / scale
    blown = parts.skip_overflow and not math.isfinite(norm)
    if parts.skip_overflow and model_parallel is not None:
        # The norm counts on the first rank alone what is not marked as a part: look at it all.
        blown = has_overflow(gradients, parts.ranks, model_parallel) or blown
    # A NaN says no more than infinity, and callers look for that.
    return (math.inf, True) if blown else (norm, False)


def _culprit(parts: Parts) -> str | None:
    names = [name for name, _ in parts.model.named_parameters()]
    culprit = first_overflow(parts.runtime.gradients, names, parts.ranks)
    model_parallel = parts.topology.model_parallel
    if model_parallel is not None:
        culprit = next(filter(None, gather_objects(culprit, model_parallel)), None)
    return culprit


def moved_scale(before: ScaleState, found: Finding, number: int, parts: Parts) -> ScaleState:
    """The loss scale after update `number` (from 0). An overflow is told, at the floor too.

    Raises:
        LossScaleError: the gradients overflowed at the floor of the scale.
    """
    after = before
    try:
        after = next_scale(before, found.overflow, parts.scale_rule)
    finally:
        if found.overflow and parts.ranks.rank == 0:
            _log.warning(
                "update %d skipped: %s; loss scale %g, now %g",
                number,
                _reason_of(found),
                before.scale,
                after.scale,
            )
    return after


def _reason_of(found: Finding) -> str:
    if found.is_asked:
        return "the program asked for it"
    if found.culprit:
        return f"the gradient of {found.culprit} is not finite"
    return "all gradients are finite, but their norm is not"
