"""Kills of ranks at any moment of a save: complete checkpoints survive, and jobs go on."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from cases import rarely

from . import s3

_PROGRAM = Path(__file__).with_name("kills.py")
_STORED_ON_S3 = [pytest.mark.slow, s3.needed]


@pytest.mark.parametrize(
    ("storage", "kills", "stages"),
    [
        ("local", 3, "3"),
        rarely("local", 24, "0123"),
        pytest.param("s3", 12, "03", marks=_STORED_ON_S3),
    ],
)
def test_a_kill_at_any_moment_leaves_the_newest_checkpoint(
    storage: str, kills: int, stages: str
) -> None:
    command = [sys.executable, str(_PROGRAM), f"--kills={kills}", f"--stages={stages}"]
    command += ["--ranks=2", f"--storages={storage}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-8000:]
    assert done.stdout.endswith(f"{kills} kills: nothing lost\n")
