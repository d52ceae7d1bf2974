"""The next trial: by plans that results correct, or without plans upwards. Pure."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

from hadal.plugins.autotuning.space import NO_GAIN, TuningTrial

TRUST = 0.2
"""The error of a plan, corrected by the runs so far, up to which a trial may still win."""
_SEED = 0


def is_over(gains: Sequence[float], patience: int, most: int) -> bool:
    """Return whether the search of a stage is over, from its gains in order of time.

    Args:
        gains: more is better, NO_GAIN is a failure.
        patience: this many in a row without an improvement end it (`tuner_early_stopping`).
        most: this many in total end it (`tuner_num_trials`).
    """
    best, since = NO_GAIN, 0
    for gain in gains:
        if gain > best:
            best, since = gain, 0
        else:
            since += 1
    return len(gains) >= most or since >= patience


def shuffled(space: Sequence[TuningTrial]) -> list[TuningTrial]:
    """Return a space in the order of `tuner_type` random, which is always the same."""
    return random.Random(_SEED).sample(space, len(space))


def nearest(trial: TuningTrial, measured: Sequence[TuningTrial]) -> TuningTrial | None:
    """Return the measured trial that is most like another: in stage, settings, and size."""

    def likeness(other: TuningTrial) -> tuple[bool, int, float]:
        differing = len(set(trial.others) ^ set(other.others))
        distance = abs(math.log(trial.micro_batch / other.micro_batch))
        return trial.stage == other.stage, -differing, -distance

    return max(measured, key=likeness, default=None)


def corrected(trial: TuningTrial, measured: Sequence[TuningTrial]) -> float:
    """Return a trial's planned gain, in the proportion that was measured of the nearest one."""
    near = nearest(trial, measured)
    return trial.planned if near is None else trial.planned * near.gain / near.planned


def corrected_nbytes(trial: TuningTrial, measured: Sequence[TuningTrial]) -> float:
    """Return the bytes of a trial's plan, and those that the nearest one took beyond its own."""
    near = nearest(trial, measured)
    return trial.nbytes + (0.0 if near is None else max(0.0, near.peak - near.nbytes))


def next_upwards(row: Sequence[TuningTrial], start: int) -> TuningTrial | None:
    """Return the next trial of a stage without plans; None if no other size promises more.

    From `start` or the largest below it, micro-batches are about doubled while they gain; those
    under way are assumed to.

    Args:
        row: trials with the same other settings, micro-batches upwards.
        start: the first micro-batch.
    """
    usable = [trial for trial in row if trial.gain > NO_GAIN or not trial.runs]
    tried = [trial for trial in usable if trial.number]
    if not tried:
        below = [trial for trial in usable if trial.micro_batch < start]
        return next((t for t in usable if t.micro_batch >= start), below[-1] if below else None)
    top, best = tried[-1], max((trial.gain for trial in tried[:-1]), default=NO_GAIN)
    if top.runs and best >= top.gain:
        return None
    larger = usable[usable.index(top) + 1 :]
    near = [trial for trial in larger if trial.micro_batch <= 2 * top.micro_batch]
    return near[-1] if near else next(iter(larger), None)
