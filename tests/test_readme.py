"""The quickstart of the README runs as pasted."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
LIMIT_S = 300.0


def pasted(folder: Path) -> list[str]:
    """Save the README's files in a folder; return the commands that it gives for them."""
    names = iter(["ds_config.json", "train.py"])
    for name, (language, text) in zip(
        names, re.findall(r"```(json|python)\n(.*?)```", README, re.DOTALL), strict=True
    ):
        assert name.endswith(language.replace("python", "py"))
        (folder / name).write_text(text)
    return re.findall(r"^(?:python|hadal run) .*train\.py$", README, re.MULTILINE)


@pytest.mark.fast_cells("1")
@pytest.mark.parametrize("processes", [1, 2])
def test_the_quickstart_runs_as_pasted(tmp_path: Path, processes: int) -> None:
    command = pasted(tmp_path)[processes - 1].split()
    assert ("2" in command) == (processes == 2)
    module = {"python": [], "hadal": ["-m", "hadal"]}[command[0]]
    path = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), str(ROOT)]))
    environment = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": path}
    done = subprocess.run(
        [sys.executable, *module, *command[1:]],
        env=os.environ | environment,
        cwd=tmp_path,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-8000:]
    lines = re.findall(r"epoch (\d): loss (\S+) after (\d+) updates", done.stdout)
    updates = 4096 // (8 * 2 * processes)
    assert [(int(epoch), int(count)) for epoch, _, count in lines] == [
        (epoch, updates * (epoch + 1)) for epoch in range(4)
    ], "one line for each epoch, from rank 0 alone"
    losses = [float(loss) for _, loss, _ in lines]
    assert losses[0] < 16, "the sum of 16 numbers varies by 16"
    assert 0.003 < losses[-1] < 0.05, "the same size of loss on any number of processes"
    assert (tmp_path / "checkpoints" / "latest").exists()


@pytest.mark.slow
def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    """Its links lead somewhere, and the docstrings of all public names can be read."""
    pytest.importorskip("furo")
    shutil.copytree(ROOT / "docs", tmp_path / "docs")
    for name in ("README.md", "benchmarks", "examples"):
        (tmp_path / name).symlink_to(ROOT / name)
    command = ["-m", "sphinx", "--quiet", "--fail-on-warning", "--keep-going", "docs", "site"]
    done = subprocess.run(
        [sys.executable, *command],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    wanted = {
        "api/hadal": "hadal.initialize",
        "commands/run": "--num_accelerators",
        "configuration/zero_optimization": "stage3_max_live_parameters",
        "errors": "ShardedAccessError",
        "index": "getting_started.html",
        "troubleshooting": "By message",
    }
    for page, words in wanted.items():
        assert words in (tmp_path / "site" / f"{page}.html").read_text()
