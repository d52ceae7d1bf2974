"""Signals at which all ranks save at the same update, and leave."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from launcher.jobs import LIMIT_S, descendants, environment, start

from hadal.errors import EXIT_PREEMPTED

PROGRAM = """
import json, os, sys, time
from pathlib import Path
import torch
import hadal
from hadal import comm
from torch import nn
from torch.utils.data import TensorDataset

folder, updates, way = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
torch.manual_seed(3)
model = nn.Sequential(nn.Linear(6, 9), nn.Dropout(0.3), nn.Linear(9, 4))
data = TensorDataset(torch.randn(4000, 6), torch.randn(4000, 4))
engine, _, loader, _ = hadal.initialize(model=model, training_data=data, config={
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 2,
    "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 500}},
    "zero_optimization": {"stage": 2},
    "steps_per_print": 10**9,
    "checkpoint": {"async_save": way == "async", "on_signal": {
        "signals": ["SIGTERM", "SIGUSR1"],
        "save_dir": None if way == "own" else str(folder / "saved"),
    }},
})
engine.load_checkpoint(folder / "saved")
began = engine.global_steps
losses = []
batches = iter(loader)
while engine.global_steps < updates:
    inputs, targets = next(batches)
    loss = (engine(inputs) - targets).square().mean()
    engine.backward(loss)
    losses.append(loss.item())
    engine.step()
    if way != "fast":
        time.sleep(0.005)
    if engine.is_preempted:
        engine.save_checkpoint(folder / "saved", client_state={"losses": losses})
        engine.leave_preempted()
    if engine.global_steps == began + 5:
        (folder / f"up{comm.get_rank()}").touch()
(folder / f"end{comm.get_rank()}").write_text(json.dumps([began, losses]))
"""


def wait_for(folder: Path, ranks: int, job: Any) -> None:
    until = time.monotonic() + LIMIT_S
    while not all((folder / f"up{rank}").exists() for rank in range(ranks)):
        assert job.poll() is None, job.communicate()
        assert time.monotonic() < until
        time.sleep(0.02)


def begun(folder: Path) -> tuple[int, list[float]]:
    """The first update of rank 0's last run, and its losses."""
    first, losses = json.loads((folder / "end0").read_text())
    return first, losses


def ranks_of(job: int) -> list[int]:
    return [
        pid for pid, words in descendants(job) if any(w.endswith("train.py") for w in words[:3])
    ]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "train.py").write_text(PROGRAM)
    return tmp_path


def run_to(folder: Path, updates: int) -> tuple[int, list[float]]:
    """Go on in one process until so many updates are done."""
    done = subprocess.run(
        [sys.executable, "train.py", str(folder), str(updates), "fast"],
        *(),
        cwd=folder,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert done.returncode == 0, done.stderr
    return begun(folder)


@pytest.mark.slow
@pytest.mark.parametrize("way", ["save", "own"])
def test_one_process_saves_at_a_signal_and_resumes_bit_for_bit(folder: Path, way: str) -> None:
    job = subprocess.Popen(
        [sys.executable, "train.py", str(folder), "100000", way],
        cwd=folder,
        env=environment(),
        stderr=subprocess.PIPE,
        text=True,
    )
    wait_for(folder, 1, job)
    job.send_signal(signal.SIGUSR1)
    _, told = job.communicate(timeout=LIMIT_S)
    assert job.returncode == EXIT_PREEMPTED, told
    assert "SIGUSR1: saved; leaving with exit code 75" in told
    (tag,) = folder.glob("saved/global_step*")
    saved = int(tag.name.removeprefix("global_step"))
    first, resumed = run_to(folder, saved + 3)
    assert first == saved
    (folder / "saved").rename(folder / "aside")
    first, whole = run_to(folder, saved + 3)
    assert first == 0
    assert whole[-6:] == resumed


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sent", "way", "reached"),
    [
        ("SIGTERM", "save", "command"),
        ("SIGUSR1", "async", "command"),
        ("SIGUSR1", "save", "rank"),
    ],
)
def test_hadal_run_lets_its_ranks_save(folder: Path, sent: str, way: str, reached: str) -> None:
    job = start("--num_gpus", 2, "train.py", folder, 100000, way, folder=folder)
    wait_for(folder, 2, job)
    target = job.pid if reached == "command" else ranks_of(job.pid)[-1]
    os.kill(target, signal.Signals[sent])
    _, told = job.communicate(timeout=LIMIT_S)
    assert job.returncode == EXIT_PREEMPTED, told
    assert "ranks 0-1 saved and left (exit code 75)" in told
    assert "failed" not in told
    (tag,) = folder.glob("saved/global_step*")
    assert (folder / "saved" / "latest").read_text() == tag.name
    saved = int(tag.name.removeprefix("global_step"))
    first, _ = run_to(folder, saved + 1)
    assert first == saved


@pytest.mark.slow
@pytest.mark.parametrize("reached", ["torchrun", "rank"])
def test_torchrun_lets_its_ranks_save(folder: Path, reached: str) -> None:
    words = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    job = subprocess.Popen(
        [sys.executable, *words, "train.py", str(folder), "100000", "save"],
        cwd=folder,
        env=environment(OMP_NUM_THREADS="1"),
        stderr=subprocess.PIPE,
        text=True,
    )
    wait_for(folder, 2, job)
    if reached == "torchrun":
        job.send_signal(signal.SIGTERM)
    else:
        os.kill(ranks_of(job.pid)[0], signal.SIGUSR1)
    _, told = job.communicate(timeout=LIMIT_S)
    assert job.returncode == 1, told  # torchrun has no other
    if reached == "rank":
        assert re.search(rf"exitcode *: {EXIT_PREEMPTED}", told), told
    (tag,) = folder.glob("saved/global_step*")
    first, _ = run_to(folder, int(tag.name.removeprefix("global_step")))
    assert first == int(tag.name.removeprefix("global_step"))
