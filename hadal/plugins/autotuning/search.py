"""The order of trials, when to stop, and the micro-batches that fit in memory. Pure."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from hadal.plugins.autotuning.space import TuningTrial

GAIN = 0.05
"""The relative gain that a larger micro-batch must bring for the climb to continue."""
_SEED = 0

Scores = Mapping[TuningTrial, float | None]
"""The score of each finished trial; more is better, None is a failure."""


def score(metric: str, value: float) -> float:
    """Return a metric's value such that more is better: latency is negated."""
    return -value if metric == "latency" else value


def has_gained(now: float, before: float) -> bool:
    """Return whether a score improves on another by enough for the climb to continue."""
    return now - before > GAIN * abs(before)


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


def next_trial(kind: str, space: Sequence[TuningTrial], done: Scores) -> TuningTrial | None:
    """Return the next trial of a space in the order of `tuner_type`; None if all are done."""
    left = [trial for trial in space if trial not in done]
    if not left:
        return None
    if kind == "random":
        order = random.Random(_SEED).sample(range(len(space)), len(space))
        return next(space[at] for at in order if space[at] in left)
    if kind == "model_based":
        return _promising(left, {t: s for t, s in done.items() if s is not None})
    return left[0]


def _promising(left: Sequence[TuningTrial], scores: Mapping[TuningTrial, float]) -> TuningTrial:
    """Return the best trial by a linear model of the scores; with too few, the first or last."""
    if len(scores) < 2:
        return left[-1] if scores else left[0]
    features = np.array(_features([*scores, *left]))
    spread = features.std(axis=0)
    features = (features - features.mean(axis=0)) / np.where(spread > 0, spread, 1.0)
    features = np.hstack([features, np.ones((len(features), 1))])
    known, wanted = features[: len(scores)], features[len(scores) :]
    # A ridge penalty keeps weights at zero that the results do not determine.
    matrix = known.T @ known + 0.1 * np.eye(known.shape[1])
    weights = np.linalg.solve(matrix, known.T @ np.array(list(scores.values())))
    return left[int(np.argmax(wanted @ weights))]


def _features(trials: Sequence[TuningTrial]) -> list[list[float]]:
    """Return features of trials: logarithms, as the effect of sizes depends on their ratios."""
    keys = sorted({key for trial in trials for key, _ in trial.others})
    return [
        [float(np.log2(trial.micro_batch)), *(_feature(trial.value_of(key)) for key in keys)]
        for trial in trials
    ]


def _feature(value: object) -> float:
    if isinstance(value, int | float):
        return float(np.log2(1 + value))
    return float(value is not None and value != {"device": "none"})


# ---- memory ------------------------------------------------------------------------------------

# A rank's memory has a part that is independent of the micro-batch (model states), and one that is
# proportional to it (activations).

_USABLE = 0.95
"""The usable fraction of the memory; fragmentation takes the rest."""


class Need(NamedTuple):
    """The memory that one rank needs, in bytes."""

    fixed: float
    per_sample: float

    def at(self, micro_batch: int) -> float:
        """Return the bytes needed with a micro-batch."""
        return self.fixed + self.per_sample * micro_batch


def predicted_need(states_nbytes: int, activation_nbytes: int, micro_batch: int) -> Need:
    """Predict the need from model states and the activations of a forward with `micro_batch`."""
    return Need(states_nbytes, activation_nbytes / micro_batch)


def fitted_need(peaks: Sequence[tuple[int, int]]) -> Need | None:
    """Fit the need to the (micro-batch, peak bytes) of two or more runs; None if inconclusive."""
    if len(peaks) < 2:
        return None
    (small, low), *_, (large, high) = sorted(peaks)
    if large == small or high <= low:
        return None
    per_sample = (high - low) / (large - small)
    return Need(high - per_sample * large, per_sample)


def largest_that_fits(need: Need, memory_nbytes: int) -> int | None:
    """Return the largest micro-batch that fits, 0 if none does, or None if there is no limit."""
    room = _USABLE * memory_nbytes - need.fixed
    if room < need.per_sample:
        return 0
    return int(room // need.per_sample) if need.per_sample else None


def is_exhausted(reason: str) -> bool:
    """Return whether a failed experiment's message means that it ran out of memory."""
    text = reason.lower()
    words = ("out of memory", "outofmemory", "can't allocate memory", "memoryerror", "sigkill")
    return any(word in text for word in words)
