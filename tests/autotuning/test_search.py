"""The order of trials, the end of a search, and the micro-batch that fits: arithmetic."""

from __future__ import annotations

from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hadal.plugins.autotuning.measuring import numbers_of
from hadal.plugins.autotuning.runs import Outcome
from hadal.plugins.autotuning.search import (
    Need,
    fitted_need,
    has_gained,
    is_exhausted,
    is_over,
    largest_that_fits,
    next_trial,
    predicted_need,
    score,
)
from hadal.plugins.autotuning.space import TuningTrial
from hadal.plugins.autotuning.summary import Findings, Result

SPACE = [
    TuningTrial(1, size, (("reduce_bucket_size", f"{bucket}"),))
    for bucket in (10**6, 10**8)
    for size in (1, 2, 4, 8)
]


def order(kind: str, worth: dict[TuningTrial, float]) -> list[TuningTrial]:
    """Return all trials of a space in the order of the search."""
    done: dict[TuningTrial, float | None] = {}
    while (trial := next_trial(kind, SPACE, done)) is not None:
        assert trial not in done
        done[trial] = worth[trial]
    return list(done)


@pytest.mark.claims("autotuning.tuner_type")
def test_each_order_tries_all_trials() -> None:
    # Large micro-batches are best, and large buckets next to them.
    worth = {t: t.micro_batch * 10.0 + t.value_of("reduce_bucket_size") / 1e8 for t in SPACE}
    assert order("gridsearch", worth) == SPACE
    shuffled = order("random", worth)
    assert shuffled == order("random", worth) != SPACE
    assert set(shuffled) == set(SPACE)
    guided = order("model_based", worth)
    assert set(guided) == set(SPACE)
    assert guided[:2] == [SPACE[0], SPACE[-1]]
    # From the two ends on it finds the next best ones, which the list has far apart.
    ranked = sorted(SPACE, key=worth.__getitem__, reverse=True)
    assert set(guided[1:4]) == {SPACE[7], SPACE[3], SPACE[6]} == {*ranked[:2], ranked[2]}


def test_failures_are_ignored_by_the_model() -> None:
    done: dict[TuningTrial, float | None] = dict.fromkeys(SPACE[:3])
    assert next_trial("model_based", SPACE, done) == SPACE[3]


@pytest.mark.claims("autotuning.tuner_early_stopping", "autotuning.tuner_num_trials")
@pytest.mark.parametrize(
    ("scores", "over"),
    [
        ([], False),
        ([1.0, 2.0, 1.5], False),
        ([2.0, 1.0, None], True),
        ([None, None], True),
        ([1.0, 2.0, 3.0, 4.0, 5.0], True),
        ([-3.0, -2.0, -1.0], False),
    ],
)
def test_the_search_of_a_stage_ends(scores: list[float | None], over: bool) -> None:
    assert is_over(scores, patience=2, most=5) is over


@given(st.floats(0.01, 1e9), st.floats(0.01, 1e9))
def test_less_latency_scores_higher(one: float, other: float) -> None:
    assert (score("latency", one) > score("latency", other)) == (one < other)
    assert (score("throughput", one) > score("throughput", other)) == (one > other)
    assert has_gained(score("latency", one), score("latency", other)) == (
        other - one > 0.05 * other
    )


@given(st.floats(0, 1e3), st.floats(0.001, 1e3), st.floats(0, 1e3), st.floats(1, 1e5))
def test_latency_and_throughput(
    forward: float, backward: float, step: float, samples: float
) -> None:
    means = {"forward": forward, "backward": backward, "step": step, "backward_inner": 1e9}
    latency, throughput = numbers_of(means, samples)
    assert latency == forward + backward + step
    assert throughput * latency == pytest.approx(samples * 1000)


# ---- memory ------------------------------------------------------------------------------------


@given(st.integers(0, 10**12), st.integers(1, 10**9), st.integers(1, 64), st.integers(1, 10**12))
def test_the_largest_micro_batch_just_fits(
    states: int, activations: int, micro: int, memory: int
) -> None:
    need = predicted_need(states, activations, micro)
    fits = largest_that_fits(need, memory)
    assert fits is not None
    assert need.at(micro) == pytest.approx(states + activations)
    assert not fits or need.at(fits) <= 0.951 * memory
    assert need.at(fits + 1) > 0.949 * memory


def test_measured_peaks_replace_the_prediction() -> None:
    assert fitted_need([(4, 900)]) is None
    assert fitted_need([(4, 900), (8, 900)]) is None  # the peak was older than the batch
    need = fitted_need([(4, 900), (2, 700), (8, 1300)])
    assert need == Need(500.0, 100.0)
    assert largest_that_fits(need, 2000) == 14
    assert largest_that_fits(Need(0, 0), 10) is None
    assert largest_that_fits(Need(11, 0), 10) == 0
    assert largest_that_fits(Need(inf, 0), 10) == 0


def test_out_of_memory_is_recognized() -> None:
    assert is_exhausted(
        "rank 1: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB"
    )
    assert is_exhausted("rank 0: ended by SIGKILL: loading")
    assert not is_exhausted("rank 0: ValueError: bad batch")


# ---- the summary -------------------------------------------------------------------------------


def test_the_summary_lists_the_best_and_every_failure() -> None:
    def result(stage: int, value: float | None, why: str = "") -> Result:
        trial = TuningTrial(stage, 3)
        return Result(trial, Outcome(trial.name(1), {}, why, "z.log" if why else ""), value)

    results = [result(0, 59.0229), result(1, 87.30171), result(3, None, "rank 0: OSError: no")]
    findings = Findings("throughput", results, {"z2_tmbspg9_gas1": "it would take 9 GB"})
    assert findings.text(1653.988447, is_whole=True).splitlines() == [
        "| tuning_space | num_experiments | best_metric_val | best_exp_name   |",
        "| :----------- | --------------: | --------------: | :-------------- |",
        "| z0           |               1 |         59.0229 | z0_tmbspg3_gas1 |",
        "| z1           |               1 |         87.3017 | z1_tmbspg3_gas1 |",
        "| z3           |               1 |          failed | -               |",
        "| global       |               3 |         87.3017 | z1_tmbspg3_gas1 |",
        "",
        "throughput in samples/s, more is better",
        "z3_tmbspg3_gas1 failed: rank 0: OSError: no (see z.log)",
        "z2_tmbspg9_gas1 was not run: it would take 9 GB",
        "Tuning completed in 0:27:33.988447. Total number of experiments: 3.",
    ]
    slow = Findings("latency", results, {}).best()
    assert slow is not None and slow.value == 59.0229
