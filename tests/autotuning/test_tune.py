"""Searches as users start them: real jobs of a tiny model on CPUs."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path
from shutil import which
from typing import Any, NamedTuple

import pytest
from launcher.jobs import (
    alive,
    command,
    environment,
    interrupt,
    run_interrupted_late,
    start,
    wait_for,
)

TRAIN = """
import argparse, json, os, time
parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", type=int)
parser.add_argument("--deepspeed")
parser.add_argument("--micro", type=int, default=0)
parser.add_argument("--limit", type=int, default=1 << 30)
told = parser.parse_args()
# Before torch is imported, which takes a while.
with open(told.deepspeed) as file:
    size = json.load(file)["train_micro_batch_size_per_gpu"]
if size > told.limit:
    raise ValueError(f"a batch of {size} is too much")
while os.path.exists("for_ever"):
    time.sleep(1)
import torch, hadal
engine, *_ = hadal.initialize(model=torch.nn.Linear(32, 32), config=told.deepspeed)
for _ in range(10):
    loss = engine(torch.randn(size, 32)).square().mean()
    engine.backward(loss)
    engine.step()
print("trained", size, told.micro, engine.global_steps)
"""
RESULTS = "autotuning_results"
GOOD, BAD = "z0_tmbspg2_gas2", "z0_tmbspg8_gas2"


def tune(kind: str, *words: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a search to its end: several jobs, which take a while on a busy machine."""
    return subprocess.run(
        command(f"--autotuning={kind}", *words),
        cwd=folder,
        env=environment(HOME=str(folder)),
        capture_output=True,
        text=True,
        timeout=300,
    )


def configure(folder: Path, *, zero: object = None, micro: object = 1, **section: Any) -> None:
    """Write a program and its configuration."""
    (folder / "train.py").write_text(TRAIN)
    config = {
        "train_micro_batch_size_per_gpu": micro,
        "gradient_accumulation_steps": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        "zero_optimization": zero or {"stage": 0},
        "autotuning": {"enabled": True, "start_profile_step": 1, "end_profile_step": 2, **section},
    }
    (folder / "ds.json").write_text(json.dumps(config))


def loaded(path: Path) -> dict[str, Any]:
    told: dict[str, Any] = json.loads(path.read_text())
    return told


# One rank; the size of the model is known, so that there is no first run.
SECTION = {
    "arg_mappings": {"train_micro_batch_size_per_gpu": "--micro"},
    "model_info": {"num_params": 1056},
    "metric": "FLOPS",
}
WORDS = ("--num_accelerators", "1", "train.py", "--deepspeed", "ds.json", "--limit", "4")


class Searched(NamedTuple):
    """The folder of a finished search, and its output."""

    folder: Path
    out: str
    error: str

    @property
    def results(self) -> Path:
        return self.folder / RESULTS


@pytest.fixture(scope="module")
def searched(tmp_path_factory: pytest.TempPathFactory) -> Searched:
    """Run a search over two micro-batches, one of which fails, and the training after it."""
    folder = tmp_path_factory.mktemp("searched")
    configure(folder, micro=[2, 8], **SECTION)
    done = tune("run", *WORDS, folder=folder)
    assert done.returncode == 0, done.stderr
    return Searched(folder, done.stdout, done.stderr)


@pytest.mark.slow
@pytest.mark.claims(
    "autotuning.enabled",
    "autotuning.metric",
    "autotuning.metric_path",
    "autotuning.start_profile_step",
    "autotuning.end_profile_step",
    "autotuning.results_dir",
    "autotuning.exps_dir",
    "autotuning.model_info",
    "autotuning.model_info.num_params",
)
def test_an_experiment_is_the_command_and_measures_its_updates(searched: Searched) -> None:
    results = searched.results
    told = loaded(searched.folder / "autotuning_exps" / f"{GOOD}.json")
    assert (told["name"], told["num_gpus"], told["num_nodes"]) == (GOOD, 1, 1)
    assert told["ds_config"] == loaded(results / GOOD / "ds_config.json")
    files = {"cmd.txt", "ds_config.json", "exp.json", "metrics.json", "stdout.log", "stderr.log"}
    assert set(os.listdir(results / GOOD)) == files
    assert (results / GOOD / "cmd.txt").read_text().endswith("--limit 4 --micro 2\n")
    found = loaded(results / GOOD / "metrics.json")
    spent = found["forward"] + found["backward"] + found["step"]
    assert found["latency"] == pytest.approx(spent)
    assert found["throughput"] == pytest.approx(4 * 1000 / spent)
    # Two micro-batches of two samples: one product forward, one for the weight's gradient.
    assert found["FLOPS_per_gpu"] * found["latency"] / 1000 == pytest.approx(4 * 2 * 2 * 32 * 32)
    assert (found["measured_steps"], found["train_batch_size"]) == (2, 4)
    assert f"{GOOD}: FLOPS_per_gpu {found['FLOPS_per_gpu']:.6g}" in searched.error


@pytest.mark.slow
def test_the_best_one_trains(searched: Searched) -> None:
    assert searched.out.splitlines()[-1] == "trained 2 2 5"
    best = loaded(searched.results / "ds_config_optimal.json")
    assert (best["train_batch_size"], best.get("autotuning")) == (4, None)
    assert (searched.results / "cmd_optimal.txt").read_text().startswith("hadal run --num_acc")


@pytest.mark.slow
def test_a_failure_is_reported_with_the_ranks_message_and_log(searched: Searched) -> None:
    log = searched.results / BAD / "stderr.log"
    told = f"rank 0: ValueError: a batch of 8 is too much (see {log})"
    assert told in searched.error
    assert f"{BAD} failed: {told}" in (searched.results / "summary.txt").read_text()
    assert "Traceback" in log.read_text()


@pytest.mark.slow
def test_an_interrupt_leaves_no_process_and_keeps_the_measurements(searched: Searched) -> None:
    configure(searched.folder, micro=[2, 4], **SECTION)
    (searched.folder / "for_ever").touch()
    search = start("--autotuning", "tune", *WORDS, folder=searched.folder)
    wait_for(lambda: (searched.results / "z0_tmbspg4_gas2" / "exp.json").exists(), 200)
    told, _ = interrupt(search, signal.SIGINT)
    assert search.returncode == 130
    assert f"{GOOD}: FLOPS_per_gpu" in told
    assert "(measured earlier)" in told  # it was not run again
    assert "SIGINT: the search is stopped" in told
    assert alive(searched.folder) == []
    summary = (searched.results / "summary.txt").read_text()
    assert f"| {GOOD} |" in summary
    assert "Tuning stopped in" in summary


@pytest.mark.slow
def test_an_interrupt_between_two_experiments_stops_the_search(tmp_path: Path) -> None:
    configure(tmp_path, micro=[8, 16], **SECTION)
    done = run_interrupted_late("after", "--autotuning=tune", *WORDS, folder=tmp_path)
    assert done.returncode == 130
    assert "SIGINT: the search is stopped" in done.stderr
    assert len(os.listdir(tmp_path / "autotuning_exps")) == 1


@pytest.mark.slow
@pytest.mark.skipif(which("ssh") is None, reason="no ssh is installed")
def test_experiments_of_one_host_run_side_by_side(searched: Searched) -> None:
    folder = searched.folder
    hosts = ("localhost", "nowhere.invalid", "127.0.0.1")
    (folder / "hosts").write_text("".join(f"{host} slots=1\n" for host in hosts))
    words = ("--hostfile", "hosts", "--num_nodes", "1", *WORDS[2:])
    configure(folder, micro=[1, 3], **SECTION)
    (folder / "for_ever").touch()
    search = start("--autotuning", "tune", *words, folder=folder)
    wait_for(lambda: sum("--micro" in words for words in alive(folder)) == 2, 200)
    for size, host in ((1, "localhost"), (3, "127.0.0.1")):
        name = f"z0_tmbspg{size}_gas2"
        assert f"{name} runs on {host}:0\n" in (searched.results / name / "stderr.log").read_text()
    told, _ = interrupt(search, signal.SIGINT)
    assert search.returncode == 130
    assert "experiments run 3 side by side, each on 1 rank of 1 host" in told
    assert "nowhere.invalid is left out from now on: host nowhere.invalid cannot be" in told
    assert alive(folder) == []
    (folder / "for_ever").unlink()
    done = tune("tune", *words, folder=folder)
    assert done.returncode == 0, done.stderr
    assert "z0_tmbspg3_gas2: FLOPS_per_gpu" in done.stderr


@pytest.mark.slow
@pytest.mark.claims("autotuning.experiment_timeout")
def test_an_experiment_has_a_time_limit(tmp_path: Path) -> None:
    configure(tmp_path, micro=[2], **SECTION, experiment_timeout=2)
    (tmp_path / "for_ever").touch()
    done = tune("tune", *WORDS, folder=tmp_path)
    assert done.returncode == 1
    assert f"{GOOD} failed: not at its end after 2 s, the time limit" in done.stderr
    assert alive(tmp_path) == []


@pytest.mark.slow
@pytest.mark.claims("autotuning.overwrite")
def test_if_nothing_runs_the_error_has_the_reason(tmp_path: Path) -> None:
    configure(tmp_path, micro=[2], **SECTION)
    assert tune("tune", *WORDS, folder=tmp_path).returncode == 0
    (tmp_path / RESULTS / "mine.txt").touch()
    configure(tmp_path, micro=[8], **SECTION, overwrite=True)
    done = tune("tune", *WORDS, folder=tmp_path)
    assert done.returncode == 1
    told = done.stderr.partition("no configuration runs:")[2]
    assert f"{BAD} failed: rank 0: ValueError: a batch of 8 is too much (see " in told
    assert sorted(os.listdir(tmp_path / RESULTS)) == ["mine.txt", "summary.txt", BAD]


@pytest.mark.slow
@pytest.mark.claims(
    "autotuning.model_info.profile",
    "autotuning.model_info.num_layers",
    "autotuning.model_info_path",
    "autotuning.num_tuning_micro_batch_sizes",
)
def test_a_search_over_settings_on_two_ranks(tmp_path: Path) -> None:
    configure(
        tmp_path,
        zero={"stage": [3], "overlap_comm": [True, False]},
        max_train_micro_batch_size_per_gpu=2,
        num_tuning_micro_batch_sizes=1,
        model_info={"num_layers": 1},
    )
    done = tune("tune", "--num_accelerators", "2", *WORDS[2:], folder=tmp_path)
    assert done.returncode == 0, done.stderr
    info = loaded(tmp_path / RESULTS / "profile_model_info" / "model_info.json")
    assert (info["num_params"], info["trainable_num_params"], info["rank"]) == (1056, 1056, 0)
    assert info["largest_unit_num_params"] == 1056
    assert (info["activation_mem_per_gpu"] >= 0, info["num_layers"]) == (True, 1)
    assert [plan["samples"] for plan in info["plans"]] == [4, 8, 4, 8]
    names = set(os.listdir(tmp_path / RESULTS))
    assert any(name.endswith("octrue") for name in names)
    # One micro-batch alone, the faster, is tried with the other settings.
    assert sum("ocfalse" in name for name in names if "again" not in name) <= 1
    assert len(names & {GOOD} | {name for name in names if name.startswith("z3")}) <= 3
