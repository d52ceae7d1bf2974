"""Processor time is counted with all processes of a test, and a test that takes too much fails."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import costs
import forks

TESTS = Path(__file__).parent
BUSY = "import time\nend = time.process_time() + 0.4\nwhile time.process_time() < end: pass\n"

SUITE = f"""
import costs, pytest
costs.LIMIT_S = 0.2

def work():
    exec({BUSY!r})

@pytest.fixture(scope="module")
def prepared():
    work()

def test_short(): pass

def test_long(): work()

def test_prepared(prepared): pass

@pytest.mark.slow
def test_slow(): work()

def test_aside():
    with costs.aside():
        work()
"""


def test_children_and_forks_count() -> None:
    before = costs.seconds()
    subprocess.run([sys.executable, "-c", BUSY], check=True)
    assert costs.seconds() - before > 0.35
    with costs.aside():
        forks.server()
    before = costs.seconds()
    with open(os.devnull, "wb") as nothing:
        out = nothing.fileno()
        forked = forks.server().start(
            ["-c", BUSY + "time.sleep(60)"], env={}, stdout=out, stderr=out
        )
        patience = time.monotonic() + 60
        while costs.seconds() - before < 0.35 and time.monotonic() < patience:
            time.sleep(0.02)
        assert forked.poll() is None, "it is counted while it runs"
        spent = costs.seconds() - before
        forked.kill()
        forked.wait()
    assert costs.seconds() - before >= spent - 0.02, "and when it has ended"


def test_a_test_that_takes_too_much_fails(tmp_path: Path) -> None:
    (tmp_path / "test_suite.py").write_text(SUITE)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = slow\n")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "conftest", "-p", "no:cacheprovider"]
    environment = {**os.environ, "PYTHONPATH": str(TESTS)}
    run = subprocess.run(
        [*command, str(tmp_path)], env=environment, cwd=tmp_path, capture_output=True, text=True
    )
    assert "2 failed, 3 passed" in run.stdout, run.stdout + run.stderr
    assert "FAILED test_suite.py::test_long - it took 0.4" in run.stdout
    assert "FAILED test_suite.py::test_prepared - it took 0.4" in run.stdout
