"""What is tried next, and the end of a search: arithmetic."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from hadal.cli import tuning
from hadal.plugins.autotuning.runs import Outcome, is_exhausted, is_of_place
from hadal.plugins.autotuning.search import (
    corrected,
    corrected_nbytes,
    is_over,
    nearest,
    next_upwards,
    shuffled,
)
from hadal.plugins.autotuning.space import NO_GAIN, TuningTrial
from hadal.plugins.autotuning.summary import Findings

SPACE = [
    TuningTrial(stage, size, planned=10.0 * size / (1 + stage), nbytes=100.0 * size)
    for stage in (0, 1)
    for size in (1, 2, 4, 8)
]


def measured(trial: TuningTrial, gain: float, peak: int = 0, name: str = "") -> TuningTrial:
    """Return a trial that has run."""
    outcome = Outcome(name, {"peak_memory_per_gpu": peak, "throughput": gain})
    return replace(trial, number=1, runs=1, outcome=outcome, gain=gain)


def test_results_correct_the_plans_of_trials_like_theirs() -> None:
    one, other = SPACE[3], SPACE[4]
    assert corrected(one, []) == one.planned
    # Half as fast as planned; then stage 1 is measured, and is as planned.
    slow = [measured(one, 40.0)]
    assert corrected(SPACE[0], slow) == 5.0
    assert corrected(other, slow) == other.planned / 2
    both = [*slow, measured(other, other.planned)]
    assert [corrected(trial, both) for trial in (SPACE[2], SPACE[7])] == [20.0, 40.0]
    # Settings that differ less are more alike.
    near, far = (TuningTrial(0, 8, (("overlap_comm", text),)) for text in ("true", "false"))
    assert nearest(near, [SPACE[3], far]) == SPACE[3]
    assert nearest(SPACE[0], [SPACE[2], SPACE[1]]) == SPACE[1]
    assert nearest(one, []) is None


def test_memory_beyond_the_plan_is_expected_of_others_too() -> None:
    assert corrected_nbytes(SPACE[3], [measured(SPACE[0], 1.0, 150)]) == 850.0
    # An allocator's peak may lack what others hold: less than planned changes nothing.
    assert corrected_nbytes(SPACE[3], [measured(SPACE[0], 1.0, 50)]) == 800.0


def test_a_shuffled_order_is_always_the_same() -> None:
    assert shuffled(SPACE) == shuffled(SPACE) != SPACE
    assert set(shuffled(SPACE)) == set(SPACE)


def test_without_plans_sizes_grow_around_failures() -> None:
    def order(start: int, speed: dict[int, float]) -> list[int]:
        row = [TuningTrial(0, size) for size in (1, 2, 3, 4, 6, 8)]
        done = []
        while (trial := next_upwards(row, start)) is not None:
            trial.number, trial.runs, trial.gain = 1, 1, speed[trial.micro_batch]
            done.append(trial.micro_batch)
        return done

    grows = {size: float(size) for size in (1, 2, 3, 4, 6, 8)}
    assert order(2, grows) == [2, 4, 8]
    assert order(1, grows | {4: 1.5}) == [1, 2, 4]
    assert order(4, grows | {8: NO_GAIN}) == [4, 8, 6]
    assert order(8, grows | {8: NO_GAIN, 6: NO_GAIN}) == [8, 6, 4]
    assert order(9, dict.fromkeys(grows, NO_GAIN)) == [8, 6, 4, 3, 2, 1]


@pytest.mark.claims("autotuning.tuner_early_stopping", "autotuning.tuner_num_trials")
@pytest.mark.parametrize(
    ("gains", "over"),
    [
        ([], False),
        ([1.0, 2.0, 1.5], False),
        ([2.0, 1.0, NO_GAIN], True),
        ([NO_GAIN, NO_GAIN], True),
        ([1.0, 2.0, 3.0, 4.0, 5.0], True),
        ([-3.0, -2.0, -1.0], False),
    ],
)
def test_the_search_of_a_stage_ends(gains: list[float], over: bool) -> None:
    assert is_over(gains, patience=2, most=5) is over


@given(st.floats(0.01, 1e9), st.floats(0.01, 1e9))
def test_less_latency_is_a_gain(one: float, other: float) -> None:
    for metric, is_more in (("latency", one < other), ("throughput", one > other)):
        gains = [Findings(metric, [], {}).gain_of({metric: value}) for value in (one, other)]
        assert (gains[0] > gains[1]) == is_more


def test_out_of_memory_is_recognized() -> None:
    assert is_exhausted(
        "rank 1: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB"
    )
    assert is_exhausted("rank 0: ended by SIGKILL: loading")
    assert not is_exhausted("rank 0: ValueError: bad batch")


def test_failures_of_a_device_or_host_are_recognized() -> None:
    for reason in (
        "torch.AcceleratorError: CUDA error: uncorrectable ECC error encountered",
        "torch.distributed.DistBackendError: NCCL error: unhandled system error",
        "ended by SIGBUS: loading",
        "ModuleNotFoundError: No module named 'transformers'",
    ):
        assert is_of_place(f"rank 3: {reason}")
    for reason in ("torch.OutOfMemoryError: CUDA out of memory", "ValueError: bad batch"):
        assert not is_of_place(f"rank 3: {reason}")
    assert not is_of_place("not at its end after 9 s, the time limit")


# ---- the summary -------------------------------------------------------------------------------


def test_the_summary_lists_the_best_and_every_failure() -> None:
    results = [
        measured(TuningTrial(stage, 3), gain, 0, f"z{stage}_tmbspg3_gas1")
        for stage, gain in ((0, 59.0229), (1, 87.30171), (3, NO_GAIN))
    ]
    results[2].outcome = Outcome("z3_tmbspg3_gas1", None, "rank 0: OSError: no", "z.log")
    findings = Findings("throughput", results, {"z2_tmbspg9_gas1": "it would take 9 GB"})
    assert findings.text(1653.988447, is_whole=True).splitlines() == [
        "| tuning_space | num_experiments | best_metric_val | best_exp_name   |",
        "| :----------- | --------------: | --------------: | :-------------- |",
        "| z0           |               1 |         59.0229 | z0_tmbspg3_gas1 |",
        "| z1           |               1 |         87.3017 | z1_tmbspg3_gas1 |",
        "| z3           |               1 |          failed | -               |",
        "| global       |               3 |         87.3017 | z1_tmbspg3_gas1 |",
        "",
        "| experiment      | throughput, samples/s | memory, GB |       |",
        "| :-------------- | --------------------: | ---------: | :---- |",
        "| z0_tmbspg3_gas1 |               59.0229 |          0 |       |",
        "| z1_tmbspg3_gas1 |               87.3017 |          0 | front |",
        "",
        "z3_tmbspg3_gas1 failed: rank 0: OSError: no (see z.log)",
        "z2_tmbspg9_gas1 was not run: it would take 9 GB",
        "Tuning completed in 0:27:33.988447. Total number of experiments: 3.",
    ]


def test_the_second_best_with_less_memory_is_named(tmp_path: Path) -> None:
    def result(size: int, gain: float, peak: int) -> TuningTrial:
        return measured(TuningTrial(0, size), gain, peak, f"m{size}")

    results = [result(8, 100.0, 9 * 10**9), result(4, 98.5, 6 * 10**9), result(2, 50.0, 7 * 10**9)]
    findings = Findings("throughput", [*results, result(1, 40.0, 10**9)], {})
    assert [r.outcome.name for r in findings.front()] == ["m8", "m4", "m1"]
    assert findings.notes() == [
        "m4 is within 2% of the best (98.5) with 3 GB less memory",
    ]
    findings.results.pop(1)
    assert findings.notes() == []
    # Of latencies less is better.
    slow = [result(1, -98.5, 6 * 10**9), result(2, -100.0, 5 * 10**9)]
    assert "m2 is within 2%" in Findings("latency", slow, {}).notes()[0]
    pytest.importorskip("matplotlib")
    tuning._draw(findings, tmp_path / "summary.png")
    assert (tmp_path / "summary.png").stat().st_size > 1000
