"""The benchmark of techniques for long sequences runs, tiny: one loss, and less memory."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_techniques_train_identically(tmp_path: Path) -> None:
    techniques = ["nothing", "checkpointing and tiles", "ring attention, 2 ranks"]
    figures, picture = tmp_path / "figures.json", tmp_path / "picture.svg"
    words = ["--lengths", "256", "--techniques", ";".join(techniques)]
    words += ["--json", str(figures), "--output", str(picture)]
    done = subprocess.run(
        [sys.executable, "benchmarks/long_sequences.py", *words],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", done.stdout)]
    assert losses == pytest.approx([losses[0]] * 3, rel=1e-5)
    peaks = json.loads(figures.read_text())
    assert all(peaks[one] < peaks["nothing"] for one in techniques[1:])
    assert picture.read_text().startswith("<?xml")
