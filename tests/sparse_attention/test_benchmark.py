"""The benchmark of sparse attention runs, and its table is complete."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parents[2] / "benchmarks/sparse_attention.py"


def test_it_measures_and_draws(tmp_path, capsys, monkeypatch):
    figures, picture = tmp_path / "figures.json", tmp_path / "picture.svg"
    words = f"--lengths 64,128 --patterns fixed;bigbird --rounds 1 --no-memory --json {figures}"
    monkeypatch.setattr(
        sys, "argv", [str(PROGRAM), *words.split(), "--output", str(picture), "--threads", "1"]
    )
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(PROGRAM), run_name="__main__")
    assert ended.value.code == 0
    rows = json.loads(figures.read_text())
    assert {(row["pattern"], row["length"]) for row in rows} == {
        (name, length) for name in ("dense", "fixed", "bigbird") for length in (64, 128)
    }
    assert all(row["ms"] > 0 and ("ratio" in row) == (row["pattern"] != "dense") for row in rows)
    assert "| 128 | bigbird |" in capsys.readouterr().out
    assert picture.read_text().count("<svg") == 1
