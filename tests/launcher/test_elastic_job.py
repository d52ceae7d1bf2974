"""Elastic jobs: hosts are lost and come back, and training continues unaffected."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from pace import paces
from torch import nn

from hadal.cli.run import elastic_bounds
from launcher.jobs import LIMIT_S, alive, descendants, interrupt, run, start, wait_for

# Stands for ssh: a host is this machine, and refuses while a file `down-HOST` exists.
SSH = """#!/bin/sh
while [ $# -gt 2 ]; do shift; done
if [ -e "$HOME/down-$1" ]; then echo "connect to host $1: refused" >&2; exit 255; fi
HOST_IS=$1 SSH_CONNECTION="127.0.0.1 1 127.0.0.1 2" exec sh -c "$2"
"""

SAMPLES, BATCH = 96, 24
# Three epochs and more; every second step is saved, so that a loss takes a step back.
TRAIN = """
import json, os, time
import hadal, torch
from torch import nn

hadal.init_distributed()
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 1))
x = torch.randn(96, 4)
data = torch.utils.data.TensorDataset(x, x.prod(dim=1, keepdim=True))
config = {
    "optimizer": {"type": "AdamW", "params": {"lr": 0.02, "weight_decay": 0.01}},
    "gradient_clipping": 0.0,
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
    "elasticity": {"enabled": True, "version": 0.1, "max_train_batch_size": 24,
                   "micro_batch_sizes": [4, 6], "max_gpus": 4},
}
engine, _, loader, _ = hadal.initialize(model=model, training_data=data, config=config)
batches = hadal.RepeatingLoader(loader)
engine.load_checkpoint("saved")
while True:
    total = torch.zeros(2)
    times = engine.gradient_accumulation_steps()
    for _ in range(times):
        inputs, targets = next(batches)
        loss = nn.functional.mse_loss(engine(inputs), targets)
        engine.backward(loss)
        engine.step()
        total[0] += loss.detach() / times
    total[1] = os.path.exists("enough")
    torch.distributed.all_reduce(total)
    if hadal.comm.get_rank() == 0:
        world = hadal.comm.get_world_size()
        told = [engine.global_steps, world, engine.train_batch_size(),
                total[0].item() / world]
        with open("losses", "a") as losses:
            print(json.dumps(told), file=losses)
    if engine.global_steps % 2 == 0:
        engine.save_checkpoint("saved")
    if total[1]:
        break
    time.sleep(0.05)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "ssh").write_text(SSH)
    (tmp_path / "bin" / "ssh").chmod(0o755)
    (tmp_path / "hosts").write_text("alpha slots=2\nbeta slots=2\n")
    (tmp_path / "train.py").write_text(TRAIN)
    return tmp_path


def surroundings(folder: Path, **variables: str) -> dict[str, str]:
    path = f"{folder}/bin:{os.environ['PATH']}"
    return {"PATH": path, "HADAL_LOST_S": "3", "HADAL_GRACE_S": "1", **variables}


FLAGS = ["-H", "hosts", "--elastic_training"]


def losses(folder: Path) -> list[list[Any]]:
    path = folder / "losses"
    lines = path.read_text().splitlines() if path.exists() else []
    return [json.loads(line) for line in lines]


def rounds(folder: Path) -> list[tuple[int, int]]:
    """Return each round's number of ranks and of steps, in order."""
    sizes = [world for _, world, _, _ in losses(folder)]
    return [(size, len(list(same))) for size, same in itertools.groupby(sizes)]


def until(job: subprocess.Popen[str], holds: Callable[[], bool]) -> None:
    wait_for(lambda: job.poll() is not None or holds())


def kill_host(job: subprocess.Popen[str], host: str) -> None:
    """Kill everything on a host, as a power cut would."""
    for pid, words in descendants(job.pid):
        if words[0] == "sh" or "hadal.launcher.node" not in words:
            continue
        with suppress(FileNotFoundError, ProcessLookupError):  # it has ended meanwhile
            if Path(f"/proc/{pid}/environ").read_bytes().count(f"HOST_IS={host}".encode()):
                os.kill(pid, signal.SIGKILL)


def uninterrupted(steps: int) -> list[float]:
    """Return the losses of one process that trains with plain torch."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 1))
    x = torch.randn(SAMPLES, 4)
    y = x.prod(dim=1, keepdim=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02, weight_decay=0.01)
    told = []
    for step in range(steps):
        epoch, part = divmod(step, SAMPLES // BATCH)
        order = torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(epoch))
        rows = order[part * BATCH : (part + 1) * BATCH]
        loss = nn.functional.mse_loss(model(x[rows]), y[rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        told.append(loss.item())
    return told


@pytest.mark.slow
def test_half_of_the_ranks_are_lost_and_come_back(folder: Path) -> None:
    job = start(*FLAGS, "train.py", folder=folder, **surroundings(folder))
    until(job, lambda: len(losses(folder)) >= 7)
    (folder / "down-beta").touch()
    kill_host(job, "beta")
    until(job, lambda: rounds(folder)[1:2] >= [(2, 5)])
    (folder / "down-beta").unlink()
    until(job, lambda: len(rounds(folder)) == 3)
    (folder / "enough").touch()
    _, told = job.communicate(timeout=LIMIT_S)
    assert job.returncode == 0, told
    assert "round 1: 4 ranks on alpha, beta" in told
    assert "host beta is lost" in told
    assert "round 2: 2 ranks on alpha\n" in told
    assert "host beta is available again" in told
    assert "round 3: 4 ranks on alpha, beta" in told
    assert [world for world, _ in rounds(folder)] == [4, 2, 4]
    curve = losses(folder)
    expected = uninterrupted(curve[-1][0])
    for step, world, batch, loss in curve:
        assert batch == BATCH
        assert loss == pytest.approx(expected[step - 1], rel=1e-5), (step, world)
    assert {step for step, *_ in curve} == set(range(1, curve[-1][0] + 1))
    assert alive(folder) == []


# Fails in its first two rounds, by the number of files that it has written.
FAIL = """
import base64, glob, os, sys
process = os.getpid()
while process:  # what every user reads in `ps`
    words = open(f"/proc/{process}/cmdline").read().split("\\0")
    texts = [base64.urlsafe_b64decode(w + "===") for w in words if w.startswith("eyJ")]
    assert not any(b"hf_secret" in text for text in [*texts, *map(str.encode, words)]), words
    process = int(open(f"/proc/{process}/stat").read().rpartition(")")[2].split()[1])
assert os.environ["HF_TOKEN"] == "hf_secret"
names = glob.glob("start*")
open(f"start{len(names)}", "w").close()
if len(names) < 2:
    raise ValueError(f"bad sample {len(names)}")
print("good, of", os.environ["WORLD_SIZE"])
"""


@pytest.mark.fast_cells("1-1")
@pytest.mark.parametrize(("restarts", "code"), [(2, 0), (1, 1)])
def test_ranks_that_fail_are_started_again(tmp_path: Path, restarts: int, code: int) -> None:
    (tmp_path / "fail.py").write_text(FAIL)
    (tmp_path / ".hadal_env").write_text("HF_TOKEN=hf_secret\n")
    flags = ["--elastic_training", "--max_restarts", restarts, "--num_gpus", 1]
    done = run(*flags, "fail.py", folder=tmp_path)
    assert done.returncode == code, done.stderr
    assert "hadal run:   ValueError: bad sample 0\n" in done.stderr
    assert f"hadal run: starting again (1 of {restarts} times)\n" in done.stderr
    assert done.stderr.count("ValueError: bad sample 1") == 1
    assert done.stdout == ("good, of 1\n" if code == 0 else "")
    assert ("ranks have failed 2 times (--max_restarts)" in done.stderr) is (code == 1)


@pytest.mark.slow
def test_a_job_waits_for_hosts_and_ends(folder: Path) -> None:
    (folder / "down-beta").touch()
    (folder / "never.py").write_text("open('ran', 'w')\n")
    flags = [*FLAGS, "--num_nodes", "2:2"]
    for pace in paces(4):
        short = surroundings(folder, HADAL_JOIN_S=str(pace))
        done = run(*flags, "never.py", folder=folder, **short)
        if "alpha started, and did not come so far" not in done.stderr:
            break
    assert done.returncode == 255, done.stderr
    assert done.stderr.count("host beta cannot be reached (ssh ended with 255)") == 1
    assert "ready are alpha, and --min_elastic_nodes is 2\n" in done.stderr
    assert not (folder / "ran").exists()
    (folder / "down-alpha").touch()
    done = run(*flags, "never.py", folder=folder, **short)
    assert done.returncode == 255
    assert done.stderr.endswith("hadal run: no host is available\n")


@pytest.mark.slow
def test_an_interrupt_ends_an_elastic_job(folder: Path) -> None:
    (folder / "stay.py").write_text("import time\nopen('up', 'w')\ntime.sleep(600)\n")
    (folder / "down-beta").touch()
    job = start(*FLAGS, "stay.py", folder, folder=folder, **surroundings(folder))
    until(job, lambda: (folder / "up").exists())
    told, took = interrupt(job, signal.SIGINT)
    assert job.returncode == 130, told
    assert took < 9
    assert "round 1: 2 ranks on alpha\n" in told
    assert alive(folder) == []


@pytest.mark.slow
def test_hosts_stand_by_if_their_ranks_cannot_train_the_batch(folder: Path) -> None:
    (folder / "hosts").write_text("alpha slots=1\nbeta slots=1\ngamma slots=1\n")
    (folder / "who.py").write_text("import os; print(os.environ['WORLD_SIZE'], flush=True)\n")
    section = {"enabled": True, "version": 0.1, "max_train_batch_size": 8, "micro_batch_sizes": [2]}
    (folder / "ds.json").write_text(json.dumps({"elasticity": section}))
    words = ["who.py", "--deepspeed_config=ds.json"]
    given = elastic_bounds([*words[:1], "--deepspeed", str(folder / "ds.json")])
    assert given == ((1, 2, 4), 0.0)
    done = run(*FLAGS, *words, folder=folder, **surroundings(folder))
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["[alpha rank 0] 2", "[beta rank 1] 2"]
    assert done.stderr == "hadal run: round 1: 2 ranks on alpha, beta\n"


@pytest.mark.parametrize("told", ["{}", '{"elasticity": {"enabled": false}}'])
def test_without_elasticity_any_number_of_ranks_may_train(tmp_path: Path, told: str) -> None:
    (tmp_path / "ds.json").write_text(told)
    words = ["train.py", "--deepspeed_config", str(tmp_path / "ds.json")]
    assert elastic_bounds(words) == elastic_bounds(["train.py", "--deepspeed", "--lr=1"])
    assert elastic_bounds(words) == ((), 0.0)


# Each host's rank notes its round and stays.
NOTE = """
import os, time
with open("notes", "a") as notes:
    print(os.environ["WORLD_SIZE"], file=notes)
while not os.path.exists("enough"):
    time.sleep(0.05)
"""


@pytest.mark.slow
@pytest.mark.claims("elasticity.min_time")
def test_ranks_train_for_a_while_before_hosts_are_taken_in(folder: Path) -> None:
    (folder / "note.py").write_text(NOTE)
    (folder / "hosts").write_text("alpha slots=1\nbeta slots=1\n")
    (folder / "ds.json").write_text(
        '{"elasticity": {"enabled": true, "version": 0.1, "max_train_batch_size": 8,'
        ' "micro_batch_sizes": [2], "min_time": 1}}'
    )
    (folder / "down-beta").touch()
    words = ["note.py", "--deepspeed_config", folder / "ds.json"]
    assert elastic_bounds([str(word) for word in words]).pause_s == 60
    job = start(*FLAGS, *words, folder=folder, **surroundings(folder))
    until(job, lambda: (folder / "notes").exists())
    (folder / "down-beta").unlink()
    assert job.stderr is not None
    told = [job.stderr.readline()]
    while "host beta is available again" not in told[-1]:
        told.append(job.stderr.readline())
    time.sleep(1)  # without min_time the round would be over at once
    (folder / "enough").touch()
    _, rest = job.communicate(timeout=LIMIT_S)
    assert job.returncode == 0, told
    assert rest == ""
    assert (folder / "notes").read_text() == "1\n"
