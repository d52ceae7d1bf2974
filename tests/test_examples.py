"""Every example runs, on CPU, as its own first lines say."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"
LONGEST = 80


def run(script: Path, *arguments: str, processes: int = 1) -> str:
    """Run one example as a user would; return what it wrote."""
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
    if "hadal run" in script.read_text():
        launcher = ["-m", "hadal.cli", "run", "--num_accelerators", str(processes)]
    # On CPU, so that two processes never meet on one GPU; the checkout serves if none is installed.
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    environment["PYTHONPATH"] = os.pathsep.join(
        filter(None, [environment.get("PYTHONPATH"), str(EXAMPLES.parent)])
    )
    command = [sys.executable, *(launcher if processes > 1 else []), str(script), *arguments]
    done = subprocess.run(
        command,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, f"{script.name}:\n{done.stdout[-4000:]}\n{done.stderr[-8000:]}"
    return done.stdout


def processes_wanted(script: Path) -> int:
    """How many processes an example's own first lines start."""
    told = re.search(r"--(?:nproc_per_node=|num_accelerators )(\d+)", script.read_text())
    return int(told[1]) if told else 1


SMALL = sorted(EXAMPLES.glob("[0-9]*.py"))


@pytest.mark.parametrize("script", SMALL, ids=lambda script: script.stem)
def test_example_runs(script: Path) -> None:
    assert run(script, processes=processes_wanted(script)).strip()


@pytest.mark.parametrize("script", SMALL, ids=lambda script: script.stem)
def test_example_is_short(script: Path) -> None:
    assert len(script.read_text().splitlines()) < LONGEST


def test_gpt_trains_and_goes_on(tmp_path: Path) -> None:
    short = ["--steps=3", "--width=48", "--depth=2", "--sample=8", f"--folder={tmp_path / 'demo'}"]
    train = EXAMPLES / "gpt" / "train.py"

    first = run(train, *short, processes=2)
    assert "ZeRO stage 2" in first
    assert "unigram entropy" in first
    assert "(step 3)" in first
    assert (tmp_path / "demo" / "loss.png").stat().st_size > 10_000

    second = run(train, *short, processes=2)
    assert "Going on from step 3" in second
    assert "(step 6)" in second
