"""A tiny run of `benchmarks/offload.py --step`: a row for each available library and tier."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
NUMEL, ROUNDS = 1 << 16, 2
COPY, REQUESTS = "copy", "the same requests, and nothing else"


@pytest.mark.slow
def test_it_measures_tiny_updates(tmp_path: Path) -> None:
    kept, nowhere = tmp_path / "found.json", str(tmp_path / "nowhere")
    size = [f"--numel={NUMEL}", f"--rounds={ROUNDS}", "--seconds=0.01"]
    places = [f"--disk={tmp_path}", f"--deepspeed={nowhere}", f"--json={kept}"]
    done = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks/offload.py"), "--step", *size, *places],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "DeepSpeed is not installed" in done.stdout
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
