"""Tiny runs of the programs in benchmarks/: they end, and their tables are complete."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import forks
import pytest

from hadal.plugins.data_efficiency.indexed import IndexedRows

ROOT = Path(__file__).resolve().parents[1]


def run(program: str, *words: str, is_fresh: bool = False) -> str:
    """The output of a benchmark; a fresh interpreter imports everything itself."""
    env = {**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    args = [f"benchmarks/{program}", *words]
    if is_fresh:
        command = [sys.executable, *args]
        done = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True)
    else:
        done = forks.run(args, env=env, timeout=600, cwd=str(ROOT))
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


# ---- updates in every tier -----------------------------------------------------------------------

NUMEL, ROUNDS = 1 << 16, 2
COPY, REQUESTS = "copy", "the same requests, and nothing else"


@pytest.mark.slow
def test_updates_of_available_libraries_and_tiers(tmp_path: Path) -> None:
    kept, nowhere = tmp_path / "found.json", str(tmp_path / "nowhere")
    size = [f"--numel={NUMEL}", f"--rounds={ROUNDS}", "--seconds=0.01"]
    places = [f"--disk={tmp_path}", f"--deepspeed={nowhere}", f"--json={kept}"]
    assert "DeepSpeed is not installed" in run("offload.py", "--step", *size, *places)
    found = json.loads(kept.read_text())
    rows = {place: {row["who"]: row for row in of} for place, of in found.items()}
    assert COPY in rows["in memory"] and REQUESTS in rows["on the disk"]
    # A bf16 gradient in, bf16 weights out, master and two moments read and written; on the disk
    # these three alone.
    assert {row["nbytes"] for row in rows["in memory"].values()} == {28 * NUMEL}
    assert {row["nbytes"] for row in rows["on the disk"].values()} == {24 * NUMEL}
    every = [row for of in rows.values() for row in of.values()]
    assert all(len(row["seconds"]) == ROUNDS and min(row["seconds"]) > 0 for row in every)
    assert {of["Hadal"]["ratio"] for of in rows.values()} == {1.0}
    assert [path.name for path in tmp_path.iterdir()] == [kept.name]  # the disk is left as it was


# ---- long sequences ------------------------------------------------------------------------------


@pytest.mark.slow
def test_techniques_for_long_sequences_train_identically_in_less_memory(tmp_path: Path) -> None:
    techniques = ["nothing", "checkpointing and tiles", "ring attention, 2 ranks"]
    figures, picture = tmp_path / "figures.json", tmp_path / "picture.svg"
    words = ["--lengths", "256", "--techniques", ";".join(techniques)]
    told = run("long_sequences.py", *words, f"--json={figures}", f"--output={picture}")
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", told)]
    assert losses == pytest.approx([losses[0]] * 3, rel=1e-5)
    peaks = json.loads(figures.read_text())
    assert all(peaks[one] < peaks["nothing"] for one in techniques[1:])
    assert picture.read_text().startswith("<?xml")


# ---- sparse attention ----------------------------------------------------------------------------


def test_sparse_attention_is_measured_and_drawn(tmp_path: Path) -> None:
    figures, picture = tmp_path / "figures.json", tmp_path / "picture.svg"
    words = f"--lengths 64,128 --patterns fixed;bigbird --rounds 1 --no-memory --json {figures}"
    told = run("sparse_attention.py", *words.split(), f"--output={picture}", "--threads=1")
    rows = json.loads(figures.read_text())
    assert {(row["pattern"], row["length"]) for row in rows} == {
        (name, length) for name in ("dense", "fixed", "bigbird") for length in (64, 128)
    }
    assert all(row["ms"] > 0 and ("ratio" in row) == (row["pattern"] != "dense") for row in rows)
    assert "| 128 | bigbird |" in told
    assert picture.read_text().count("<svg") == 1


# ---- data files ----------------------------------------------------------------------------------


def data_files(*words: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(run("data_files.py", *words, is_fresh=True))
    return found


@pytest.mark.slow
def test_starts(tmp_path: Path) -> None:
    start = ("start", "--samples=1e4", f"--folder={tmp_path}")
    assert "written" in data_files(*start)
    found = data_files(*start, "--first=10")
    assert found["samples"] == 10**4 and found["first_percent"] == 10
    assert found["start_s"] > 0 and found["peak_gb"] >= found["base_gb"]


@pytest.mark.slow
def test_measures() -> None:
    found = data_files("analyze", "--samples=1e4", "--workers=2")
    assert found["length_samples_per_s"] > 0 and found["rarity_samples_per_s"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("tokenizer", ["bytes", None])
def test_indexes(tmp_path: Path, tokenizer: str | None) -> None:
    named = () if tokenizer is None else (f"--tokenizer={tokenizer}",)
    found = data_files("index", "--nbytes=1e5", f"--folder={tmp_path}", *named)
    assert found["share_of_the_tokenizers_speed"] > 0
    assert found["tokens"] == IndexedRows(tmp_path / "tokens").count > 10**4
