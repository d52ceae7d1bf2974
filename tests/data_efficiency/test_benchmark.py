"""Tiny runs of `benchmarks/data_files.py`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hadal.plugins.data_efficiency.indexed import IndexedRows

ROOT = Path(__file__).resolve().parents[2]


def _run(*arguments: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks/data_files.py"), *arguments],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout)


@pytest.mark.slow
def test_starts(tmp_path: Path) -> None:
    start = ("start", "--samples=1e4", f"--folder={tmp_path}")
    assert "written" in _run(*start)
    found = _run(*start, "--first=10")
    assert found["samples"] == 10**4 and found["first_percent"] == 10
    assert found["start_s"] > 0 and found["peak_gb"] >= found["base_gb"]


@pytest.mark.slow
def test_measures() -> None:
    found = _run("analyze", "--samples=1e4", "--workers=2")
    assert found["length_samples_per_s"] > 0 and found["rarity_samples_per_s"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("tokenizer", ["bytes", None])
def test_indexes(tmp_path: Path, tokenizer: str | None) -> None:
    named = () if tokenizer is None else (f"--tokenizer={tokenizer}",)
    found = _run("index", "--nbytes=1e5", f"--folder={tmp_path}", *named)
    assert found["share_of_the_tokenizers_speed"] > 0
    assert found["tokens"] == IndexedRows(tmp_path / "tokens").count > 10**4
