"""Every example runs, on CPU, as its own first lines say.

The launchers that these lines name start only the first example of theirs; they do the same for
every program, and take longer than most examples do. The others' ranks are given what
`torch.distributed.run` gives, by forks of a process that has imported torch.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import forks
import pytest
import torch
from torch.distributed import TCPStore

EXAMPLES = Path(__file__).parent.parent / "examples"
LONGEST = 80
LIMIT_S = 600.0  # against hanging
LAUNCHED = ("02_zero_stages", "22_hadal_run")


def environment() -> dict[str, str]:
    # On CPU, so that two processes never meet on one GPU; the checkout serves if none is installed.
    path = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), str(EXAMPLES.parent)]))
    return {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": path}


def launched(script: Path, *arguments: str, processes: int, folder: Path) -> str:
    """Run one example in a folder as a user would; return what it wrote."""
    launcher = ["-m", "hadal", "run", "--num_accelerators", str(processes)]
    if "torchrun" in script.read_text():
        launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
    done = subprocess.run(
        [sys.executable, *launcher, str(script), *arguments],
        env=environment(),
        cwd=folder,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert done.returncode == 0, f"{script.name}:\n{done.stdout[-4000:]}\n{done.stderr[-8000:]}"
    return done.stdout


def run(script: Path, *arguments: str, processes: int, folder: Path) -> str:
    """The same without a launcher: the ranks alone, which find its store as they would."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    each = {"WORLD_SIZE": processes, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": store.port}
    each |= {"LOCAL_WORLD_SIZE": processes, "TORCHELASTIC_USE_AGENT_STORE": True}
    envs = [
        environment()
        | {name: str(value) for name, value in each.items() if processes > 1}
        | {name: str(rank) for name in ("RANK", "LOCAL_RANK") if processes > 1}
        for rank in range(processes)
    ]
    words = [str(script), *arguments]
    ranks = forks.run_ranks([words] * processes, envs=envs, timeout=LIMIT_S, cwd=str(folder))
    told = "\n".join(
        f"--- rank {rank} ended with {done.returncode}:\n{done.stdout[-4000:]}{done.stderr[-8000:]}"
        for rank, done in enumerate(ranks)
    )
    assert not any(done.returncode for done in ranks), f"{script.name}:\n{told}"
    return "".join(done.stdout for done in ranks)


def processes_wanted(script: Path) -> int:
    """The number of processes that an example's first lines start."""
    told = re.search(r"--(?:nproc_per_node=|num_accelerators )(\d+)", script.read_text())
    return int(told[1]) if told else 1


SMALL = sorted(EXAMPLES.glob("[0-9]*.py"))
# Those that run in a second or two; the others are slow tests.
QUICK = (1, 3, 6, 7, 8, 9, 11, 12, 14, 15, 16, 19, 21, 27, 29, 40, 41, 42, 44)


@pytest.mark.fast_cells("29_a_common_loss")
@pytest.mark.parametrize(
    "script",
    SMALL,
    ids=lambda script: script.stem,
)
def test_example_runs(script: Path, tmp_path: Path) -> None:
    start = launched if script.stem in LAUNCHED else run
    assert start(script, processes=processes_wanted(script), folder=tmp_path).strip()
    assert not list(tmp_path.iterdir()), "an example takes away what it has written"


@pytest.mark.parametrize("script", SMALL, ids=lambda script: script.stem)
def test_example_is_short(script: Path) -> None:
    assert len(script.read_text().splitlines()) < LONGEST


@pytest.mark.slow
def test_the_index_names_every_example() -> None:
    index = (EXAMPLES / "README.md").read_text()
    linked = set(re.findall(r"\]\(([^)]+)\)", index))
    assert all((EXAMPLES / target).exists() for target in linked)
    assert {script.name for script in SMALL} <= linked
    for script in SMALL:
        (row,) = [line for line in index.splitlines() if f"({script.name})" in line]
        wanted = processes_wanted(script)
        assert row.endswith(
            f"| `hadal run --num_accelerators {wanted}` |" if wanted > 1 else "`python` |"
        )


@pytest.fixture(scope="module")
def gpt(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The folder of a GPT trained for three steps, and what that printed."""
    folder = tmp_path_factory.mktemp("gpt")
    return folder, launched(GPT, *short_gpt(folder), processes=2, folder=folder)


GPT = EXAMPLES / "gpt" / "train.py"


def short_gpt(folder: Path) -> list[str]:
    return ["--steps=3", "--width=48", "--depth=2", "--sample=8", f"--folder={folder / 'demo'}"]


@pytest.mark.slow
def test_gpt_trains(gpt: tuple[Path, str]) -> None:
    folder, printed = gpt
    capability = torch.backends.cpu.get_cpu_capability()
    precision = "fp32" if capability in ("DEFAULT", "AVX2") else "bf16"
    assert f"cpu in {precision}, ZeRO stage 2" in printed
    assert "unigram entropy" in printed
    assert "(step 3)" in printed
    assert (folder / "demo" / "loss.png").stat().st_size > 10_000


@pytest.mark.slow
def test_gpt_resumes(gpt: tuple[Path, str]) -> None:
    printed = run(GPT, *short_gpt(gpt[0]), processes=2, folder=gpt[0])
    assert "Continuing from step 3" in printed
    assert "(step 6)" in printed
