"""CONTRIBUTING.md: the first test that it shows passes as it is."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.slow
def test_the_first_test_passes(tmp_path: Path) -> None:
    (text,) = re.findall(r"```python\n(.*?)```", (ROOT / "CONTRIBUTING.md").read_text(), re.DOTALL)
    (tmp_path / "test_first.py").write_text(text)
    path = os.pathsep.join(map(str, (ROOT / "tests", ROOT)))
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "conftest", "-p", "no:cacheprovider"],
        env={**os.environ, "PYTHONPATH": path},
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert "1 passed" in done.stdout, done.stdout + done.stderr


def test_commands_are_targets_of_make() -> None:
    named = re.findall(r"`make ([a-z-]+)", (ROOT / "CONTRIBUTING.md").read_text())
    named += re.findall(r"`make ([a-z-]+)", (ROOT / "SECURITY.md").read_text())
    targets = re.findall(r"^([a-z-]+):.*##", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert named and set(named) <= set(targets)
