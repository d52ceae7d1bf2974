"""The experiments of a search, with formulas instead of jobs."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from hadal.autotuning.runs import METRICS, Outcome
from hadal.autotuning.space import read_request
from hadal.autotuning.tuner import Tuner
from hadal.errors import TuningError

STATES, SAMPLE, MEMORY = 1_000, 100, 2_000
OUT_OF_MEMORY = "rank 0: torch.OutOfMemoryError: CUDA out of memory."


@dataclass
class Formulas:
    """A fake runner whose jobs have computed speed and memory use."""

    folder: Path
    speed: Callable[[int, int], float]
    """Samples a second of a stage and a micro-batch."""
    hidden: int = 0
    """Bytes that no prediction sees."""
    world_size: int = 2
    made: list[str] = field(default_factory=list)

    @property
    def results(self) -> Path:
        return self.folder / "results"

    experiments = results

    def words_with(self, config: Mapping[str, Any], file: Path) -> tuple[str, ...]:
        return ("t.py", json.dumps(config), str(file))

    def command(self, words: tuple[str, ...]) -> str:
        return " ".join(words)

    def run(
        self, name: str, config: Mapping[str, Any], section: Mapping[str, Any], answer: str
    ) -> Outcome:
        stage, size = config["zero_optimization"]["stage"], config["train_micro_batch_size_per_gpu"]
        if answer != METRICS and self.hidden > MEMORY:
            return Outcome(name, None, OUT_OF_MEMORY, "e.log")
        if answer != METRICS:
            info = {"num_params": 9, "trainable_num_params": 9, "memory_per_gpu": MEMORY}
            return Outcome(name, {**info, "activation_mem_per_gpu": SAMPLE * size})
        self.made.append(name.removesuffix("_gas1"))
        peak = STATES + self.hidden + SAMPLE * size
        if peak > MEMORY:
            return Outcome(name, None, OUT_OF_MEMORY, "e.log")
        speed = self.speed(stage, size)
        if speed == 0:
            return Outcome(name, None, "rank 0: KeyError: 'labels'", "e.log")
        found = {"throughput": speed, "latency": 1000 * size / speed, "peak_memory_per_gpu": peak}
        return Outcome(name, {**found, "memory_per_gpu": MEMORY})


@pytest.fixture
def searched(tmp_path: Path) -> Callable[..., tuple[Tuner, list[str]]]:
    """Return a function that searches with formulas; its second value is the runs, in order."""

    def search(
        speed: Callable[[int, int], float],
        stage: object = 0,
        micro: object = 1,
        hidden: int = 0,
        fails: bool = False,
        **section: Any,
    ) -> tuple[Tuner, list[str]]:
        path = tmp_path / "ds.json"
        config = {
            "train_micro_batch_size_per_gpu": micro,
            "gradient_accumulation_steps": 1,
            "zero_optimization": {"stage": stage},
            "autotuning": {"enabled": True, **section},
        }
        path.write_text(json.dumps(config))
        runner: Any = Formulas(tmp_path, speed, hidden)
        wish = read_request(("t.py", "--deepspeed", str(path)), 2)
        tuner = Tuner(wish, runner, lambda *_: STATES, lambda _: None)
        if fails:
            with pytest.raises(TuningError) as caught:
                tuner.run()
            runner.made.append(str(caught.value))
        else:
            tuner.run()
        return tuner, runner.made

    return search


def test_the_micro_batch_grows_while_it_gains_and_fits(searched: Any) -> None:
    # (0.95 x 2000 - 1000) / 100: 9 samples fit, which two peaks tell without a failure.
    tuner, made = searched(lambda stage, size: 10.0 * size)
    assert made == ["z0_tmbspg1", "z0_tmbspg2", "z0_tmbspg4", "z0_tmbspg8", "z0_tmbspg9"]
    assert tuner.findings.best().outcome.name == "z0_tmbspg9_gas1"
    # Where it gains less than 5 %, it is doubled no more.
    assert searched(lambda stage, size: min(size, 2))[1] == [
        "z0_tmbspg1",
        "z0_tmbspg2",
        "z0_tmbspg4",
    ]
    # Less latency is better: the smallest wins, and the search has looked once beyond it.
    tuner, made = searched(lambda stage, size: 10 + size, metric="latency", micro=2)
    assert made == ["z0_tmbspg2", "z0_tmbspg4"]
    assert tuner.findings.best().outcome.name == "z0_tmbspg2_gas1"


def test_trials_that_do_not_fit_are_skipped_and_reported(searched: Any) -> None:
    tuner, made = searched(lambda stage, size: 10.0 * size, micro=[4, 16])
    assert made == ["z0_tmbspg4"]
    told = "z0_tmbspg16_gas1 was not run: it needs 2.6e-06 GB, but a rank has 2e-06 GB"
    assert told in tuner.findings.failures()
    # The first one does not fit: smaller ones are tried.
    _, made = searched(lambda stage, size: 10.0 * size, micro=24)
    assert made == ["z0_tmbspg6", "z0_tmbspg8", "z0_tmbspg9"]


def test_unpredicted_memory_use_lowers_the_micro_batch(searched: Any) -> None:
    # 5 samples fit where 9 were foreseen: two jobs fail, then two peaks tell the rest.
    tuner, made = searched(lambda stage, size: 10.0 * size, micro=8, hidden=400)
    assert made == ["z0_tmbspg8", "z0_tmbspg4", "z0_tmbspg7", "z0_tmbspg5"]
    assert tuner.findings.best().outcome.name == "z0_tmbspg5_gas1"
    # What fails for another reason is not tried smaller.
    _, made = searched(lambda stage, size: size if size < 4 else 0.0, micro=2)
    assert made == ["z0_tmbspg2", "z0_tmbspg4"]


def test_later_stages_are_skipped_without_a_gain(searched: Any) -> None:
    def slower(stage: int, size: int) -> float:
        return {0: 10.0, 1: 20.0, 2: 15.0, 3: 30.0}[stage]

    # Each starts where the one before was best; a stage that a user names is always tried.
    assert searched(slower, stage="all", micro=[3])[1] == ["z0_tmbspg3", "z1_tmbspg3", "z2_tmbspg3"]
    assert searched(slower, stage=[1, 2, 3], micro=[3])[1][-1] == "z3_tmbspg3"
    grows = searched(lambda stage, size: size if size < 5 else 4, stage=[0, 1])[1]
    assert grows[-2:] == ["z1_tmbspg4", "z1_tmbspg8"]


def test_if_nothing_runs_each_reason_is_reported(searched: Any) -> None:
    _, made = searched(lambda stage, size: 0.0, stage=[0, 1], fails=True)
    assert made[:2] == ["z0_tmbspg1", "z1_tmbspg1"]
    for stage in (0, 1):
        told = f"z{stage}_tmbspg1_gas1 failed: rank 0: KeyError: 'labels' (see e.log)"
        assert told in made[2]


def test_a_model_that_cannot_be_profiled_ends_the_search(searched: Any, tmp_path: Path) -> None:
    searched(lambda stage, size: 10.0, micro=[1])
    assert (tmp_path / "results" / "cmd_optimal.txt").exists()
    _, made = searched(lambda stage, size: 10.0, hidden=10_000, fails=True)
    assert made == [f"the model cannot be profiled: {OUT_OF_MEMORY} (see e.log)"]
    assert OUT_OF_MEMORY in (tmp_path / "results" / "summary.txt").read_text()
    # What is left of an earlier search would pass for the best of this one.
    assert not list((tmp_path / "results").glob("*optimal*"))
