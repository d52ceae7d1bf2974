"""The experiments of a search, with formulas instead of jobs."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from inspect import signature
from pathlib import Path
from typing import Any

import pytest

from hadal.errors import LaunchError, TuningError
from hadal.launcher import choices
from hadal.launcher.choices import Choices
from hadal.launcher.hosts import Pool
from hadal.plugins.autotuning import runs
from hadal.plugins.autotuning.files import write_json
from hadal.plugins.autotuning.runs import CANDIDATES, CONFIG, ExperimentRun, Outcome, Runner
from hadal.plugins.autotuning.space import SearchRequest, read_request
from hadal.plugins.autotuning.tuner import PROFILE, Tuner

STATES, SAMPLE, MEMORY = 1_000, 100, 2_000
CHOSEN = ("launcher", "num_nodes", "num_slots")
OUT_OF_MEMORY = "rank 0: torch.OutOfMemoryError: CUDA out of memory."


@dataclass
class Formulas(Runner):
    """A runner whose jobs have computed speed, memory and duration, and end by a clock."""

    speed: Callable[..., float] = float
    """Samples a second of a stage and a micro-batch, and of a name if there is a third argument."""
    hidden: int = 0
    """Bytes that no prediction sees."""
    planned: Callable[[dict[str, Any]], float] | None = None
    """Samples a second as a plan of these settings has them."""
    saved: int = 0
    """Bytes that offloading saves."""
    losing: dict[str, str] = field(default_factory=dict)
    """Hosts that are lost by the experiment of a name."""
    broken: tuple[str, int] | None = None
    """A host and its broken device."""
    seconds: Callable[[str], float] = lambda name: 1.0
    """The duration of an experiment."""
    made: list[str] = field(default_factory=list)
    spans: list[tuple[float, float, tuple[str, ...]]] = field(default_factory=list)
    """The beginning, end and hosts of each."""
    pools: list[Pool] = field(default_factory=list)
    """The hosts and slots of each."""
    now: float = 0.0

    def _submit(self, experiment: ExperimentRun) -> Future[Outcome]:
        outcome = self.outcome_of(experiment)
        experiment.ended_at = self.now + self.seconds(experiment.name)
        self.spans.append((self.now, experiment.ended_at, tuple(experiment.pool)))
        self.pools.append(experiment.pool)
        if outcome.found is not None:
            write_json(experiment.answer, outcome.found)
            os.utime(experiment.answer, (experiment.ended_at, experiment.ended_at))
        done: Future[Outcome] = Future()
        done.set_result(outcome)
        return done

    def finished(self) -> Outcome:
        over = min(each.ended_at for each in self._running)
        self.now = max(self.now, over)
        return super().finished()

    def outcome_of(self, experiment: ExperimentRun) -> Outcome:
        name = experiment.name
        config = json.loads((experiment.answer.parent / CONFIG).read_text())
        stage, size = config["zero_optimization"]["stage"], config["train_micro_batch_size_per_gpu"]
        saved = self.saved * bool(config["zero_optimization"].get("offload_optimizer"))
        if name.startswith(PROFILE) and self.hidden - 10 * saved > MEMORY:
            return Outcome(name, None, OUT_OF_MEMORY, "e.log")
        if name.startswith(PROFILE):
            candidates = json.loads((experiment.answer.parent / CANDIDATES).read_text())
            sizes = {"num_params": 2 * 10**8, "largest_unit_num_params": 6 * 10**7}
            info: dict[str, Any] = {**sizes, "trainable_num_params": 9, "memory_per_gpu": MEMORY}
            info |= {"activation_mem_per_gpu": SAMPLE * size}
            return Outcome(name, info | {"plans": [self.plan(each) for each in candidates]})
        self.made.append(name.removesuffix("_gas1"))
        lost = self.losing.pop(name, None)
        if lost is not None:
            return Outcome(name, None, f"host {lost} is lost", lost_hosts=(lost,))
        host, device = self.broken or ("", 0)
        if device in experiment.pool.get(host, ()):
            return Outcome(name, None, "rank 0: RuntimeError: CUDA error: ECC error", "e.log")
        peak = STATES + self.hidden + SAMPLE * size - saved
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
        if not speed:
            return {"failure": "5 heads do not fit 2 ranks"}
        saved = self.saved * bool(patch["zero_optimization"].get("offload_optimizer"))
        nbytes = STATES + SAMPLE * size - saved
        return {"memory": nbytes, "seconds": samples / speed, "samples": samples}


@pytest.fixture
def searched(tmp_path: Path) -> Callable[..., tuple[Tuner, list[str]]]:
    """Return a function that searches with formulas; its second value is the runs, in order."""

    def search(
        speed: Callable[[int, int], float],
        stage: object = 0,
        micro: object = 1,
        hidden: int = 0,
        fails: bool = False,
        saved: int = 0,
        accumulation: int | None = 1,
        zero: dict[str, Any] | None = None,
        degrees: Sequence[int] = (),
        planned: Callable[[dict[str, Any]], float] | None = None,
        **section: Any,
    ) -> tuple[Tuner, list[str]]:
        path = tmp_path / "ds.json"
        config = {
            "train_micro_batch_size_per_gpu": micro,
            **({"gradient_accumulation_steps": accumulation} if accumulation else {}),
            "zero_optimization": {"stage": stage, **(zero or {})},
            **({"tensor_parallel": {"autotp_size": degrees}} if degrees else {}),
            "autotuning": {"enabled": True, "overwrite": True, **section},
            "csv_monitor": {"enabled": True},
        }
        path.write_text(json.dumps(config))
        fields = {"speed": speed, "hidden": hidden, "planned": planned, "saved": saved}
        tuner = Tuner(*formulas(tmp_path, **fields))
        if fails:
            with pytest.raises(TuningError) as caught:
                tuner.run()
            tuner.runner.made.append(str(caught.value))
        else:
            tuner.run()
        return tuner, tuner.runner.made

    return search


def formulas(folder: Path, pool: Pool | None = None, **fields: Any) -> tuple[SearchRequest, Any]:
    """Return the search that a folder's configuration requests, and a runner."""
    words = ("t.py", "--deepspeed", str(folder / "ds.json"))
    pool = pool or {"localhost": (0, 1)}
    wish = read_request(words, sum(map(len, pool.values())))
    hosts = folder / "hosts"
    named: dict[str, Any] = {key: fields.pop(key) for key in CHOSEN if key in fields}
    if hosts.exists():
        named |= {"hostfile": str(hosts), "num_nodes": len(pool)}
    chosen = Choices(words, **named)
    return wish, Formulas(chosen, (), {}, folder, wish.section, pool, print, **fields)


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
    assert best.gain >= 0.98 * max(every)[0]
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


def test_listed_degrees_are_candidates(searched: Any) -> None:
    def plan(told: dict[str, Any]) -> float:
        return 10.0 * told["micro"] * (3 if told["tensor_parallel"]["autotp_size"] == 2 else 2)

    tuner, made = searched(
        lambda stage, size, name: (5.0 if "tpas2" in name else 3.0) * size,
        degrees=[1, 2],
        planned=plan,
    )
    assert made == ["z0_tmbspg8_gas1_tpas2"]
    best = json.loads((tuner.runner.results / "ds_config_optimal.json").read_text())
    assert best["tensor_parallel"] == {"autotp_size": 2}
    assert best["train_batch_size"] == 8  # both ranks read the same samples
    # One that does not fit the model is left out, with the reason.
    tuner, made = searched(
        lambda stage, size, name: 3.0 * size,
        degrees=[1, 2],
        planned=lambda told: 2.0 - told["tensor_parallel"]["autotp_size"],
    )
    assert not any("tpas2" in name for name in made)
    assert sum("5 heads do not fit" in line for line in tuner.findings.failures()) == 1


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


def test_what_fits_with_offloading_alone_is_found(searched: Any) -> None:
    def speed(*_: Any) -> float:
        return 10.0

    large = {"micro": [12], "planned": lambda _: 10.0, "saved": 500}
    _, made = searched(speed, **large, fast=False)
    assert all("_oocpu" in name for name in made)
    _, made = searched(speed, **large, fails=True)
    assert (
        "no configuration runs; recomputation and offloading are tried if fast is false" in made[0]
    )
    # The first job offloads too, if it runs out of memory; candidates are planned without.
    small = {**large, "micro": [1], "hidden": MEMORY + 9}
    tuner, made = searched(speed, **small, fails=True)
    told = json.loads((tuner.runner.results / f"{PROFILE}_offloaded" / CONFIG).read_text())
    assert told["zero_optimization"]["offload_optimizer"] == {"device": "cpu", "pin_memory": True}
    (patch,) = json.loads((tuner.runner.results / f"{PROFILE}_offloaded" / CANDIDATES).read_text())
    assert patch["zero_optimization"] == {"offload_optimizer": None, "stage": 0}


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
    # The training writes what the user wants, experiments do not.
    ran = json.loads((tuner.runner.results / "z0_tmbspg8_gas1" / CONFIG).read_text())
    assert [config.get("csv_monitor") for config in (best, ran)] == [{"enabled": True}, None]
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
    assert (best.outcome.name, best.gain) == (own, 15.0)  # the other's mean is 14
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
    assert (tmp_path / "autotuning_results" / "cmd_optimal.txt").exists()
    _, made = searched(lambda stage, size: 10.0, hidden=10_000, fails=True)
    assert made == [f"the model cannot be profiled: {OUT_OF_MEMORY} (see e.log)"]
    assert OUT_OF_MEMORY in (tmp_path / "autotuning_results" / "summary.txt").read_text()
    # What is left of an earlier search would pass for the best of this one.
    assert not list((tmp_path / "autotuning_results").glob("*optimal*"))


def test_an_experiment_is_checked_with_the_ranks_that_read(tmp_path: Path) -> None:
    """Two ranks share a copy of the model by a program's mpu, which only `mp_size` knows."""
    config: dict[str, Any] = {
        "train_batch_size": 2,
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 1,
    }
    (tmp_path / "ds.json").write_text(json.dumps({"autotuning": {"enabled": True}}))

    def reason_with(readers: int) -> str:
        runner = formulas(tmp_path, speed=lambda *_: 1.0)[1]
        config["zero_optimization"] = {"stage": 0}
        runner.start(f"of_{readers}", config, {"enabled": True}, readers)
        return str(runner.finished().reason)

    assert reason_with(1) == ""
    assert "2 (micro-batch) x 1 (accumulation) x 2 ranks = 4" in reason_with(2)


def test_what_was_measured_is_not_measured_again(tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text(json.dumps({"autotuning": {"enabled": True}}))
    config = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 0}}
    runner = formulas(tmp_path, speed=lambda *_: 5.0, planned=lambda *_: 1.0)[1]

    def section_of(name: str, **others: Any) -> tuple[bool, dict[str, Any]]:
        section = {"enabled": True, **({"model_info": {}} if name == PROFILE else {})}
        runner.start(name, config, section, 2, **others)
        is_new = runner.finished().is_new
        told = json.loads((runner.results / name / CONFIG).read_text())["autotuning"]
        return is_new, told

    for best in (None, 7.0, 9.0):  # another best so far makes no other experiment
        is_new, section = section_of("one", to_beat=best)
        assert (is_new, "value_to_beat" in section) == (best is None, False)
    assert section_of("two", to_beat=9.0)[1]["value_to_beat"] == 9.0
    one = {"train_micro_batch_size_per_gpu": 1, "train_batch_size": 2, "zero_optimization": {}}
    patches = ([one], [one], [one, one])  # other candidates do
    news = [section_of(PROFILE, candidates=each)[0] for each in patches]
    assert news == [True, False, True]


# ---- side by side --------------------------------------------------------------------------------


@pytest.fixture
def spread(tmp_path: Path) -> Callable[..., Tuner]:
    """Return a function that searches over micro-batches on several hosts, with two slots each."""

    def search(hosts: str, nodes: int = 1, fails: bool = False, **fields: Any) -> Tuner:
        lines = [f"{host} slots={1 if host == 'small' else 2}" for host in hosts.split()]
        (tmp_path / "hosts").write_text("\n".join(lines))
        config = {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": 1,
            "zero_optimization": {"stage": [0, 1]},
            "autotuning": {"enabled": True},
        }
        (tmp_path / "ds.json").write_text(json.dumps(config))
        pool = {host: (0, 1) for host in hosts.split()[:nodes]}
        fields = {"speed": lambda stage, size: 10.0 * size - stage, **fields}
        tuner = Tuner(*formulas(tmp_path, pool, **fields))
        if fails:
            with pytest.raises(LaunchError, match="takes 2 hosts, and 1 are left"):
                tuner.run()
        else:
            tuner.run()
        return tuner

    return search


def planned_speed(told: Mapping[str, Any]) -> float:
    return 9.0 * told["micro"] - told["stage"]


def test_experiments_run_side_by_side_on_free_hosts(spread: Any) -> None:
    runner = spread("a b c small", planned=planned_speed).runner
    # The profile, then one on each host; the others follow as hosts become free.
    assert runner.made[:3] == ["z0_tmbspg8", "z1_tmbspg8", "z0_tmbspg6"]
    profile, *first = runner.spans[:4]
    assert (profile, first) == ((0, 1, ("a",)), [(1, 2, (host,)) for host in "abc"])
    assert {host for _, _, hosts in runner.spans for host in hosts} == {*"abc"}
    # A host has one at a time, and the one that is free first gets the next.
    slow = {"z0_tmbspg8_gas1": 5.0}
    runner = spread("a b c d e", 2, seconds=lambda name: slow.get(name, 1.0)).runner
    spans = runner.spans
    for begin, end, hosts in spans:
        others = [each for each in spans if each[0] < end and begin < each[1]]
        assert sum(bool({*hosts} & {*each[2]}) for each in others) == 1
    assert {hosts for _, _, hosts in spans} == {("a", "b"), ("c", "d")}


def test_only_an_unexpected_winner_is_measured_again(spread: Any) -> None:
    # The first by plan is the best, though another one ends before it.
    slow = {"seconds": lambda name: 9.0 if name == "z0_tmbspg8_gas1" else 1.0}
    runner = spread("a b c", planned=planned_speed, **slow).runner
    assert not [name for name in runner.made if "again" in name]


def test_without_plans_larger_micro_batches_are_tried_ahead(spread: Any) -> None:
    runner = spread("a b").runner
    assert runner.made[:4] == [f"z0_tmbspg{size}" for size in (1, 2, 4, 8)]
    assert [begin for begin, *_ in runner.spans[:5]] == [0, 1, 1, 2, 2]


def test_a_lost_host_is_left_out_and_its_experiment_repeated(spread: Any, capsys: Any) -> None:
    best = "z0_tmbspg8_gas1"
    tuner = spread("a b c", losing={best: "a"}, planned=planned_speed)
    assert tuner.runner.made.count("z0_tmbspg8") == 2
    assert tuner.findings.best().outcome.name == best
    assert all("a" not in hosts for begin, _, hosts in tuner.runner.spans if begin >= 2)
    assert "a is left out from now on: host a is lost" in capsys.readouterr().out
    # Too few are left: what was measured stays, and is taken up again.
    tuner = spread("a b", 2, fails=True, losing={"z1_tmbspg8_gas1": "b"}, planned=planned_speed)
    assert tuner.findings.best().outcome.name == best


def test_what_fails_on_a_broken_host_is_no_bad_configuration(spread: Any, capsys: Any) -> None:
    best = "z0_tmbspg8_gas1"
    tuner = spread("a b c", broken=("a", 1), planned=planned_speed)
    assert tuner.findings.best().outcome.name == best
    assert tuner.runner.made.count("z0_tmbspg8") == 2
    told = capsys.readouterr().out
    assert f"{best} failed on a:0,1 and is repeated on others" in told
    assert f"{best} runs on b:0,1; a:0,1, where it failed, is left out from now on" in told
    assert all("a" not in hosts for begin, _, hosts in tuner.runner.spans if begin >= 3)
    assert not any("CUDA error" in line for line in tuner.findings.failures())


@pytest.fixture
def devices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Formulas]:
    """Return a function that searches with one of a host's four devices for each experiment."""
    for module in (choices, runs):
        monkeypatch.setattr(module, "devices_here", lambda: 4)

    def search(zero: dict[str, Any], **fields: Any) -> Formulas:
        config = {
            "train_micro_batch_size_per_gpu": [1, 2, 3, 4],
            "gradient_accumulation_steps": 1,
            "zero_optimization": {"stage": 0, **zero},
            "autotuning": {"enabled": True, "tuner_type": "gridsearch"},
        }
        (tmp_path / "ds.json").write_text(json.dumps(config))
        fields = {"speed": lambda *_: 10.0, "planned": lambda _: 10.0, **fields}
        tuner = Tuner(*formulas(tmp_path, {"localhost": (0,)}, num_slots=1, **fields))
        tuner.run()
        assert isinstance(tuner.runner, Formulas)
        return tuner.runner

    return search


def test_experiments_run_side_by_side_on_the_devices_of_one_host(devices: Any) -> None:
    runner = devices({})
    assert runner.lanes == 4
    assert runner.pools[1:5] == [{"localhost": (slot,)} for slot in range(4)]
    assert {begin for begin, *_ in runner.spans[1:5]} == {1}
    plan = runner._planned_on({"localhost": (2,)}, runner.choices.words)
    assert (plan.job.pool, plan.job.shows_slots, plan.job.port) == ({"localhost": (2,)}, True, 0)


def test_an_experiment_that_computes_on_the_host_has_it_alone(devices: Any) -> None:
    spans = devices({"offload_optimizer": [{"device": "none"}, {"device": "cpu"}]}).spans[1:]
    alone = [span for span in spans if sum(span[0] < e and b < span[1] for b, e, _ in spans) == 1]
    assert (len(spans), len(alone)) == (8, 4)


def test_a_broken_device_is_left_out(devices: Any) -> None:
    runner = devices({}, broken=("localhost", 3))
    assert sorted(runner.made) == sorted([f"z0_tmbspg{size}" for size in (1, 2, 3, 4, 4)])
    assert runner.lanes == 3


def test_nodes_of_an_allocation_run_experiments_side_by_side(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "ds.json").write_text(json.dumps({"autotuning": {"enabled": True}}))
    monkeypatch.setattr(runs, "_nodes_of", lambda nodes: ["n1", "n2", "n3", "n4"])
    own: Pool = {"node 0": (0, 1), "node 1": (0, 1)}
    runner = formulas(tmp_path, own, launcher="slurm", num_nodes=2, num_slots=2, speed=float)[1]
    assert runner.lanes == 2
    plan = runner._planned_on({"n3": (0, 1), "n4": (0, 1)}, runner.choices.words)
    words = plan.start_commands["srun"].words
    assert ("--nodes=2" in words, "--nodelist=n3,n4" in words) == (True, True)


def test_a_stopped_search_on_several_hosts_goes_on_as_it_was(spread: Any) -> None:
    lasts = {"z0_tmbspg8_gas1": 3.0, "z1_tmbspg8_gas1": 1.5}
    one = {"seconds": lambda name: lasts.get(name, 1.0), "planned": planned_speed}
    whole = spread("a b", **one)
    order = [result.outcome.name for result in whole.findings.results]
    again = spread("a b", **one)
    assert again.runner.made == []
    assert [result.outcome.name for result in again.findings.results] == order
    # The last two are missing: they alone run.
    for name in order[-2:]:
        (whole.runner.results / name / "metrics.json").unlink()
    assert sorted(f"{name}_gas1" for name in spread("a b", **one).runner.made) == sorted(order[-2:])
