"""The loss scale of fp16 training, as pure functions of its state."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from hadal.errors import LossScaleError

_FACTOR = 2.0


@dataclass(frozen=True, slots=True)
class ScaleRule:
    """The rule by which the scale changes (section `fp16`). A static scale never does.

    DeepSpeed has two variants. With ZeRO an overflow at the floor ends training and `hysteresis`
    tolerates overflows; without ZeRO the scale stays at its floor and every overflow halves it:
    `hysteresis` 1, `ends_at_floor` false.
    """

    initial: float = 1.0
    dynamic: bool = False
    window: int = 1000
    """Clean updates before the scale doubles."""
    minimum: float = 1.0
    hysteresis: int = 2
    """The number of the overflow, since the start or last doubling, that halves; 0 never halves."""
    consecutive_hysteresis: bool = False
    """Reset the tolerance at every clean update, not only when the scale doubles."""
    ends_at_floor: bool = True
    """True if an overflow at the floor is an error; otherwise the scale stays there."""
    maximum: float = math.inf
    """The ceiling: the scale does not double beyond it."""


class ScaleState(NamedTuple):
    """The state of the loss scale between updates."""

    scale: float
    spare: int
    """The remaining tolerance; at 1 the next overflow halves the scale."""
    iteration: int = 0
    last_overflow: int = -1


def first_scale(rule: ScaleRule) -> ScaleState:
    """Return the state before the first update."""
    return ScaleState(rule.initial, rule.hysteresis)


def next_scale(state: ScaleState, overflow: bool, rule: ScaleRule) -> ScaleState:
    """Return the state after an update that did or did not overflow.

    The first doubling after the start or an overflow needs `window` + 1 clean updates, later ones
    `window`. A halving does not reset the tolerance.

    Raises:
        LossScaleError: an overflow with the scale at its floor, if that ends training.
    """
    if not rule.dynamic:
        return state
    scale, spare, iteration, last = state
    if overflow:
        if rule.hysteresis == 1 or spare == 1:
            if rule.ends_at_floor and scale == rule.minimum:
                raise LossScaleError(
                    f"gradients overflow at the floor of the loss scale ({scale:g}, update"
                    f" {iteration}). The weights or the data have values beyond float16's range:"
                    " train in bf16, lower the learning rate or fp16.min_loss_scale, or look for"
                    " non-finite inputs. Weights trained in bf16 need bf16."
                )
            scale = max(scale / _FACTOR, rule.minimum)
        else:
            spare -= 1
        last = iteration
    else:
        if rule.consecutive_hysteresis:
            spare = rule.hysteresis
        clean = iteration - last - 1
        if clean > 0 and clean % rule.window == 0:
            scale = min(scale * _FACTOR, rule.maximum)
            if not rule.consecutive_hysteresis:
                spare = rule.hysteresis
    return ScaleState(scale, spare, iteration + 1, last)
