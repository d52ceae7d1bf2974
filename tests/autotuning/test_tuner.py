"""The experiments of a search, with formulas instead of jobs."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from inspect import signature
from pathlib import Path
from typing import Any

import pytest

from hadal.errors import TuningError
from hadal.launcher.choices import Choices
from hadal.plugins.autotuning.runs import METRICS, Outcome, Runner
from hadal.plugins.autotuning.space import read_request
from hadal.plugins.autotuning.tuner import Tuner

STATES, SAMPLE, MEMORY = 1_000, 100, 2_000
OUT_OF_MEMORY = "rank 0: torch.OutOfMemoryError: CUDA out of memory."


@dataclass
class Formulas:
    """A fake runner whose jobs have computed speed and memory use."""

    folder: Path
    speed: Callable[..., float]
    """Samples a second of a stage and a micro-batch, and of a name if there is a third argument."""
    hidden: int = 0
    """Bytes that no prediction sees."""
    planned: Callable[[dict[str, Any]], float] | None = None
    """Samples a second as a plan of these settings has them."""
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
        self,
        name: str,
        config: Mapping[str, Any],
        section: Mapping[str, Any],
        answer: str,
        candidates: Sequence[Mapping[str, Any]] = (),
        to_beat: float | None = None,
    ) -> Outcome:
        stage, size = config["zero_optimization"]["stage"], config["train_micro_batch_size_per_gpu"]
        if answer != METRICS and self.hidden > MEMORY:
            return Outcome(name, None, OUT_OF_MEMORY, "e.log")
        if answer != METRICS:
            sizes = {"num_params": 2 * 10**8, "largest_unit_num_params": 6 * 10**7}
            info: dict[str, Any] = {**sizes, "trainable_num_params": 9, "memory_per_gpu": MEMORY}
            info |= {"activation_mem_per_gpu": SAMPLE * size}
            return Outcome(name, info | {"plans": [self.plan(each) for each in candidates]})
        self.made.append(name.removesuffix("_gas1"))
        peak = STATES + self.hidden + SAMPLE * size
        if peak > MEMORY:
            return Outcome(name, None, OUT_OF_MEMORY, "e.log")
        named = signature(self.speed).parameters.keys() - {"stage", "size"}
        speed = self.speed(stage, size, *[name] * len(named))
        if speed == 0:
            return Outcome(name, None, "rank 0: KeyError: 'labels'", "e.log")
        found = {"throughput": speed, "latency": 1000 * size / speed, "peak_memory_per_gpu": peak}
        return Outcome(name, {**found, "memory_per_gpu": MEMORY})

    def plan(self, patch: Mapping[str, Any]) -> dict[str, Any]:
        if self.planned is None:
            return {"memory": STATES}
        size, samples = patch["train_micro_batch_size_per_gpu"], patch["train_batch_size"]
        speed = self.planned(dict(patch["zero_optimization"]) | {"micro": size} | dict(patch))
        return {"memory": STATES + SAMPLE * size, "seconds": samples / speed, "samples": samples}


@pytest.fixture
def searched(tmp_path: Path) -> Callable[..., tuple[Tuner, list[str]]]:
    """Return a function that searches with formulas; its second value is the runs, in order."""

    def search(
        speed: Callable[[int, int], float],
        stage: object = 0,
        micro: object = 1,
        hidden: int = 0,
        fails: bool = False,
        accumulation: int | None = 1,
        zero: dict[str, Any] | None = None,
        planned: Callable[[dict[str, Any]], float] | None = None,
        **section: Any,
    ) -> tuple[Tuner, list[str]]:
        path = tmp_path / "ds.json"
        config = {
            "train_micro_batch_size_per_gpu": micro,
            **({"gradient_accumulation_steps": accumulation} if accumulation else {}),
            "zero_optimization": {"stage": stage, **(zero or {})},
            "autotuning": {"enabled": True, **section},
        }
        path.write_text(json.dumps(config))
        runner: Any = Formulas(tmp_path, speed, hidden, planned)
        wish = read_request(("t.py", "--deepspeed", str(path)), 2)
        tuner = Tuner(wish, runner, lambda _: None)
        if fails:
            with pytest.raises(TuningError) as caught:
                tuner.run()
            runner.made.append(str(caught.value))
        else:
            tuner.run()
        return tuner, runner.made

    return search


# ---- with plans ----------------------------------------------------------------------------------


@pytest.mark.claims("autotuning.tuner_type")
def test_each_order_of_planned_trials(searched: Any) -> None:
    def speed(stage: int, size: int) -> float:
        return float(size)

    three = {"micro": [2, 4, 8], "planned": lambda told: 1.0 * told["micro"]}
    grid = [f"z0_tmbspg{size}" for size in (2, 4, 8)]
    assert searched(speed, **three, tuner_type="gridsearch")[1] == grid
    assert sorted(searched(speed, **three, tuner_type="random")[1]) == grid
    assert searched(speed, **three)[1] == grid[2:]
    # Where all are tried, a failure of the smallest leaves the others.
    fails = searched(lambda stage, size: size - 2.0, **three, tuner_type="gridsearch")[1]
    assert fails == grid


def test_the_best_by_plan_is_found_in_three_runs(searched: Any) -> None:
    def plan(told: dict[str, Any]) -> float:
        return 50.0 * told["micro"] / (told["micro"] + 4) / (1 + 0.1 * told["stage"])

    # A machine of a third of the planned speed: the first run is the best.
    tuner, made = searched(lambda stage, size: plan({"micro": size, "stage": stage}) / 3, "all")
    assert made == ["z0_tmbspg1", "z0_tmbspg2", "z0_tmbspg4", *made[3:]]  # without plans
    tuner, made = searched(
        lambda stage, size: plan({"micro": size, "stage": stage}) / 3, "all", planned=plan
    )
    assert (made[0], len(made)) == ("z0_tmbspg8", 3)
    assert tuner.findings.best().outcome.name == "z0_tmbspg8_gas1"
    (rest,) = [line for line in tuner.findings.failures() if "others was not run" in line]
    assert "z2_tmbspg8_gas1" in rest
    # Stage 0 is slower than planned: the next one is tried, wins and is confirmed.
    tuner, made = searched(
        lambda stage, size: plan({"micro": size, "stage": stage}) / (2 - (stage == 1)),
        stage=[0, 1],
        micro=[8],
        planned=plan,
    )
    assert made == ["z0_tmbspg8", "z1_tmbspg8", "z1_tmbspg8_gas1_again"]
    # A winner in the last run stands as it is.
    _, made = searched(
        lambda stage, size: {0: 9.0, 1: 8.0, 2: 10.0}[stage],
        stage=[0, 1, 2],
        micro=[8],
        planned=lambda told: 10.0 - told["stage"] / 10,
    )
    assert made == ["z0_tmbspg8", "z1_tmbspg8", "z2_tmbspg8"]
    # What cannot win by its corrected plan does not run.
    _, made = searched(
        lambda stage, size: 10.0, micro=[1, 8], planned=lambda told: 1.0 * told["micro"]
    )
    assert made == ["z0_tmbspg8"]


def test_the_best_of_all_settings_is_found_in_eight_runs(searched: Any) -> None:
    def truth(stage: int, size: int, name: str) -> float:
        recomputes = "acmunits" in name
        faster = 1 + 0.05 * ("rbs5e7" in name) + 0.02 * ("abs5e8" in name)
        return faster * size / (size + 4) * (0.75 if recomputes else 1.0) / (1 + 0.02 * stage)

    def plan(told: dict[str, Any]) -> float:
        recomputes = "activation_checkpointing" in told
        faster = 1 + 0.03 * (told.get("reduce_bucket_size") == 50_000_000)
        size, stage = told["micro"], told["stage"]
        return 7 * faster * size / (size + 5) * (0.7 if recomputes else 1.0) / (1 + 0.03 * stage)

    tuner, made = searched(truth, "all", fast=False, planned=plan)
    assert len(made) <= 8
    every = [
        (truth(t.stage, t.micro_batch, t.name(1)), t.name(1))
        for t in tuner._space
        if not tuner._lack(t)
    ]
    best = tuner.findings.best()
    assert best.value >= 0.98 * max(every)[0]
    assert any("acmunits" in name for _, name in every)


def test_plans_leave_out_what_lacks_memory_or_does_the_same(searched: Any) -> None:
    tuner, made = searched(lambda stage, size: 10.0 * size, micro=[4, 16], planned=lambda _: 1.0)
    assert made == ["z0_tmbspg4"]
    told = "z0_tmbspg16_gas1 was not run: it needs 2.6e-06 GB, but a rank has 2e-06 GB"
    assert told in tuner.findings.failures()
    # Bucket sizes that make no difference to the plan are tried once; all that a user lists are.
    slow = {"stage": 1, "micro": [4], "fast": False, "tuner_type": "gridsearch"}
    tuner, made = searched(lambda stage, size: 10.0, **slow, planned=lambda _: 1.0)
    assert made == ["z1_tmbspg4"]
    assert any(
        line.startswith("each of 13 more of 14 was not run") for line in tuner.findings.failures()
    )
    zero = {"reduce_bucket_size": [1e6, 1e9], "overlap_comm": True, "offload_optimizer": None}
    _, made = searched(lambda stage, size: 10.0, **slow, zero=zero, planned=lambda _: 1.0)
    assert [name.split("_")[-1] for name in made] == ["rbs1e6", "rbs1e9"]


def test_what_runs_out_of_memory_leaves_out_what_needs_as_much(searched: Any) -> None:
    # 4 samples fit where 9 were foreseen.
    tuner, made = searched(
        lambda stage, size: 10.0 * size,
        stage=[0, 1],
        hidden=450,
        planned=lambda told: 10.0 * told["micro"] - told["stage"],
    )
    assert made == ["z0_tmbspg8", "z0_tmbspg6", "z0_tmbspg4", "z1_tmbspg4"]
    assert tuner.findings.best().outcome.name == "z0_tmbspg4_gas1"


def test_a_program_that_always_fails_is_not_tried_for_ever(searched: Any) -> None:
    _, made = searched(lambda *_: 0.0, "all", planned=lambda t: 1.0 * t["micro"], fails=True)
    assert len(made) == 5 + 1


# ---- without plans -------------------------------------------------------------------------------


def test_the_micro_batch_grows_while_it_gains_and_fits(searched: Any) -> None:
    # (0.95 x 2000 - 1000) / 100: 9 samples fit.
    tuner, made = searched(lambda stage, size: 10.0 * size)
    assert made == ["z0_tmbspg1", "z0_tmbspg2", "z0_tmbspg4", "z0_tmbspg8"]
    assert tuner.findings.best().outcome.name == "z0_tmbspg8_gas1"
    assert searched(lambda stage, size: min(size, 2))[1] == made[:3]
    # Less latency is better: the smallest wins, and the search has looked once beyond it.
    tuner, made = searched(lambda stage, size: 10 + size, metric="latency", micro=2)
    assert made == ["z0_tmbspg2", "z0_tmbspg4"]
    assert tuner.findings.best().outcome.name == "z0_tmbspg2_gas1"
    # The first one does not fit: smaller ones are tried.
    assert searched(lambda stage, size: 10.0 * size, micro=24)[1] == ["z0_tmbspg9"]


def test_unpredicted_memory_use_lowers_the_micro_batch(searched: Any) -> None:
    # 4 samples fit where 9 were foreseen.
    tuner, made = searched(lambda stage, size: 10.0 * size, micro=8, hidden=450)
    assert made == ["z0_tmbspg8", "z0_tmbspg6", "z0_tmbspg4"]
    assert tuner.findings.best().outcome.name == "z0_tmbspg4_gas1"
    _, made = searched(lambda stage, size: size if size < 4 else 0.0, micro=2)
    assert made == ["z0_tmbspg2", "z0_tmbspg4", "z0_tmbspg3"]


def test_later_stages_are_skipped_without_a_gain(searched: Any) -> None:
    def slower(stage: int, size: int) -> float:
        return {0: 10.0, 1: 20.0, 2: 15.0, 3: 30.0}[stage]

    # Each starts where the one before was best; a stage that a user names is always tried.
    assert searched(slower, stage="all", micro=[3])[1] == ["z0_tmbspg3", "z1_tmbspg3", "z2_tmbspg3"]
    assert searched(slower, stage=[1, 2, 3], micro=[3])[1][-1] == "z3_tmbspg3"
    grows = searched(lambda stage, size: size if size < 5 else 4, stage=[0, 1])[1]
    assert grows[-2:] == ["z1_tmbspg4", "z1_tmbspg8"]


def test_pairs_of_micro_batch_and_accumulation_fill_the_batch(searched: Any) -> None:
    # Per rank 8 samples, where the configuration leaves the accumulation open.
    tuner, made = searched(
        lambda stage, size: 10.0 * size, accumulation=None, max_train_batch_size=16
    )
    pairs = ["1_gas8", "2_gas4", "4_gas2", "8"]
    assert made == [f"z0_tmbspg{pair}" for pair in pairs]
    best = json.loads((tuner.runner.results / "ds_config_optimal.json").read_text())
    sizes = ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "train_batch_size")
    assert [best[key] for key in sizes] == [8, 1, 16]
    # As near as integers come, never above; but not below the minimum.
    some = {"accumulation": None, "micro": [2, 3], "max_train_batch_size": 16}
    assert searched(lambda stage, size: 10.0, **some)[1] == ["z0_tmbspg2_gas4", "z0_tmbspg3_gas2"]
    tuner, made = searched(lambda stage, size: 10.0, **some, min_train_batch_size=16)
    assert made == ["z0_tmbspg2_gas4"]
    told = "z0_tmbspg3_gas2 was not run: its update has 12 samples, fewer than min_train_batch_size"
    assert f"{told} 16" in tuner.findings.failures()


def test_a_gain_is_measured_again_before_it_counts(searched: Any) -> None:
    lucky = iter([20.0, 8.0])

    def speed(stage: int, size: int, name: str) -> float:
        return next(lucky) if "false" in name else 15.0

    both = {"zero": {"overlap_comm": [True, False]}, "stage": 1, "micro": [4]}
    tuner, made = searched(speed, **both)
    own, other = "z1_tmbspg4_gas1_octrue", "z1_tmbspg4_gas1_ocfalse"
    assert made == [own, other, f"{other}_again"]
    best = tuner.findings.best()
    assert (best.outcome.name, best.value) == (own, 15.0)  # the other's mean is 14
    assert "Total number of experiments: 3" in (tuner.runner.results / "summary.txt").read_text()
    # A gain that is there again counts.
    better = searched(lambda stage, size, name: 20.0 if "false" in name else 15.0, **both)[0]
    assert better.findings.best().outcome.name == other


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


def test_an_experiment_is_checked_with_the_ranks_that_read(tmp_path: Path) -> None:
    """Two ranks share a copy of the model by a program's mpu, which only `mp_size` knows."""
    config = {
        "train_batch_size": 2,
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 1,
    }
    words = ("t.py", "--deepspeed", "ds.json")

    def reason_with(readers: int) -> str:
        runner = Runner(
            Choices(words), (), {}, tmp_path, tmp_path, tmp_path, {}, 2, readers, hosts=1
        )
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Runner, "_launched", lambda self, name, *_: Outcome(name, {}))
            return runner.run("one", config, {"enabled": True}, METRICS).reason

    assert reason_with(1) == ""
    assert "2 (micro-batch) x 1 (accumulation) x 2 ranks = 4" in reason_with(2)


def test_what_was_measured_is_not_measured_again(tmp_path: Path) -> None:
    config = {"train_micro_batch_size_per_gpu": 2}
    choices = Choices(("t.py", "--deepspeed", "ds.json"))
    runner = Runner(choices, (), {}, tmp_path, tmp_path, tmp_path, {}, 2, 2, hosts=1)
    launched: list[Any] = []

    def launch(self: Runner, name: str, words: object, folder: Path, answer: str) -> Outcome:
        launched.append(json.loads((folder / "ds_config.json").read_text())["autotuning"])
        (folder / answer).write_text("{}")
        return Outcome(name, {})

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Runner, "_launched", launch)
        for best in (None, 7.0, 9.0):  # another best so far makes no other experiment
            outcome = runner.run("one", config, {"enabled": True}, METRICS, to_beat=best)
            assert outcome.is_new == (best is None)
        assert "value_to_beat" not in launched.pop()
        runner.run("two", config, {"enabled": True}, METRICS, to_beat=9.0)
        assert launched.pop()["value_to_beat"] == 9.0
        for sizes in ([1], [1], [1, 2]):  # other candidates do
            runner.run("three", config, {"enabled": True}, METRICS, [{"micro": s} for s in sizes])
        assert len(launched) == 2
