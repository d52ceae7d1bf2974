"""The loss scale of fp16 training: state in, state out."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from hadal.errors import LossScaleError

_FACTOR = 2.0


@dataclass(frozen=True, slots=True)
class ScaleRule:
    """How the scale moves (section `fp16`). A static scale never does.

    DeepSpeed has two machines. With ZeRO an overflow at the floor ends training and `hysteresis`
    forgives; without ZeRO the scale stays at its floor, and every overflow halves: `hysteresis` 1,
    `ends_at_floor` false.
    """

    initial: float = 1.0
    dynamic: bool = False
    window: int = 1000
    """Clean updates before the scale doubles."""
    minimum: float = 1.0
    hysteresis: int = 2
    """The overflow, since the start or the last doubling, that halves; 0 never halves."""
    consecutive_hysteresis: bool = False
    """Refill the forgiveness at every clean update, not only when the scale doubles."""
    ends_at_floor: bool = True
    """Whether an overflow at the floor is an error; else the scale stays there."""
    maximum: float = math.inf
    """Ceiling: the scale does not double beyond it."""


class ScaleState(NamedTuple):
    """The machine's state between updates."""

    scale: float
    spare: int
    """Overflows still forgiven; at 1 the next one halves the scale."""
    iteration: int = 0
    last_overflow: int = -1


def first_scale(rule: ScaleRule) -> ScaleState:
    """The state before the first update."""
    return ScaleState(rule.initial, rule.hysteresis)


def next_scale(state: ScaleState, overflow: bool, rule: ScaleRule) -> ScaleState:
    """The state after an update that did or did not overflow.

    The first doubling after the start or an overflow needs `window` + 1 clean updates, later ones
    come every `window`. The forgiveness does not refill after a halving.

    Raises:
        LossScaleError: an overflow although the scale stands at its floor, where that is the end.
    """
    if not rule.dynamic:
        return state
    scale, spare, iteration, last = state
    if overflow:
        if rule.hysteresis == 1 or spare == 1:
            if rule.ends_at_floor and scale == rule.minimum:
                raise LossScaleError(
                    f"gradients overflow at the floor of the loss scale ({scale:g}, update"
                    f" {iteration}). The weights or the data hold values that float16 cannot:"
                    " train in bf16, lower the learning rate or fp16.min_loss_scale, or look for"
                    " non-finite inputs. Were the weights trained in bf16, stay with it."
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
