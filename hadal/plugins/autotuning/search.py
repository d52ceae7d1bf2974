"""The next trial: by plans that results correct, or without plans upwards. Pure."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence

from hadal.plugins.autotuning.space import TuningTrial

TRUST = 0.2
"""The error of a plan, corrected by the runs so far, up to which a trial may still win."""
_SEED = 0

Scores = Mapping[TuningTrial, float | None]
"""The score of each trial; more is better, None is a failure, infinity: it is under way."""


def score(metric: str, value: float) -> float:
    """Return a metric's value such that more is better: latency is negated."""
    return -value if metric == "latency" else value


def is_over(scores: Sequence[float | None], patience: int, most: int) -> bool:
    """Return whether the search of a stage is over, from its scores in order of time.

    Args:
        scores: more is better, None is a failure.
        patience: this many in a row without an improvement end it (`tuner_early_stopping`).
        most: this many in total end it (`tuner_num_trials`).
    """
    best, since = float("-inf"), 0
    for value in scores:
        if value is not None and value > best:
            best, since = value, 0
        else:
            since += 1
    return len(scores) >= most or since >= patience


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


def corrected(
    trial: TuningTrial,
    plans: Mapping[TuningTrial, float],
    measured: Mapping[TuningTrial, float],
) -> float:
    """Return what a trial's plan says, in the proportion that was measured of the nearest one."""
    near = nearest(trial, [one for one in measured if one in plans])
    if near is None:
        return plans[trial]
    return plans[trial] * measured[near] / plans[near]


def corrected_nbytes(
    trial: TuningTrial,
    plans: Mapping[TuningTrial, float],
    measured: Mapping[TuningTrial, float],
) -> float:
    """Return the bytes of a trial's plan, and those that the nearest one took beyond its own."""
    near = nearest(trial, [one for one in measured if one in plans])
    return plans[trial] + (0.0 if near is None else max(0.0, measured[near] - plans[near]))


def next_upwards(ladder: Sequence[TuningTrial], start: int, scores: Scores) -> TuningTrial | None:
    """Return the next trial of a stage without plans; None if no other size promises more.

    From `start` or the largest below it, micro-batches are about doubled while the score grows.

    Args:
        ladder: trials with the same other settings, micro-batches upwards.
        start: the first micro-batch.
        scores: of the finished trials.
    """
    usable = [trial for trial in ladder if scores.get(trial, 0.0) is not None]
    below = [trial for trial in usable if trial.micro_batch < start]
    here = next((t for t in usable if t.micro_batch >= start), below[-1] if below else None)
    best = float("-inf")
    while here is not None:
        now = scores.get(here)
        if now is None:
            return here
        if now <= best and now < math.inf:
            return None
        best, larger = now, usable[usable.index(here) + 1 :]
        near = [t for t in larger if t.micro_batch <= 2 * here.micro_batch]
        here = near[-1] if near else next(iter(larger), None)
    return None


def is_exhausted(reason: str) -> bool:
    """Return whether a failed experiment's message means that it ran out of memory."""
    text = reason.lower()
    words = ("out of memory", "outofmemory", "can't allocate memory", "memoryerror", "sigkill")
    return any(word in text for word in words)
