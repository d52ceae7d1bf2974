"""Launching with Slurm, MPI and pdsh: their arguments, and ranks that they start."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hadal.launcher.job import Job, Program, job_in, program_in
from hadal.launcher.start_commands import there
from launcher import fakes
from launcher.jobs import ROOT, run

PROGRAM = """
import os, sys
told = [os.environ.get(key) for key in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR",
        "MASTER_PORT", "MINE")]
print(*told, *sys.argv[1:])
if sys.argv[1:] == ["fail"] and told[0] == "2":
    raise ValueError("bad sample")
"""
RANK = [sys.executable, "-u", "-m", "hadal.launcher.rank"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("srun", "mpirun", "pdsh"):
        path = tmp_path / "bin" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"#!{sys.executable}\n" + Path(fakes.__file__).read_text())
        path.chmod(0o755)
    (tmp_path / "hosts").write_text("a slots=4\nb slots=4\n")
    (tmp_path / ".hadal_env").write_text("MINE=a b\n")
    (tmp_path / "train.py").write_text(PROGRAM)
    return tmp_path


def called(folder: Path, launcher: str, *words: object, **variables: str) -> tuple[Any, Any]:
    """Run a job with a launcher; return the launcher's arguments, and the outcome."""
    done = run(
        *("--launcher", launcher, *words),
        folder=folder,
        PATH=f"{folder}/bin:/usr/bin:/bin",
        FAKE_CALLS=str(folder / "calls"),
        FAKE_MPI=launcher,
        **variables,
    )
    calls = folder / "calls"
    return json.loads(calls.read_text()) if calls.exists() else None, done


def shown(address: str, port: int = 29500) -> list[str]:
    return [f"[rank {r}] {r} 4 {r % 2} {address} {port} a b x" for r in range(4)]


def test_slurm(folder: Path) -> None:
    words = ["--num_nodes", 2, "--num_gpus", 2, "--launcher_args", "-p 'big one' -t 5", "train.py"]
    call, done = called(folder, "slurm", *words, "x")
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == shown("node03")
    assert call[:-1] == [
        *("srun", "--nodes=2", "--ntasks=4", "--ntasks-per-node=2", "--kill-on-bad-exit=1"),
        *("--export=ALL", "-p", "big one", "-t", "5", *RANK),
    ]
    assert program_in(call[-1]).words == ("train.py", "x")


@pytest.mark.slow
def test_slurm_reports_the_size_of_an_allocation(folder: Path) -> None:
    there = {"SLURM_JOB_NUM_NODES": "2", "SLURM_GPUS_ON_NODE": "2"}
    call, _ = called(folder, "slurm", "--exclude", "n1@n2", "train.py", "x", **there)
    assert call[1:5] == ["--nodes=2", "--ntasks=4", "--ntasks-per-node=2", "--exclude=n1,n2"]
    call, _ = called(folder, "slurm", "-H", "hosts", "--num_gpus", 2, "train.py", "x")
    assert call[1:5] == ["--nodes=2", "--ntasks=4", "--ntasks-per-node=2", "--nodelist=a,b"]


def test_a_failure_under_slurm_is_reported_with_its_rank(folder: Path) -> None:
    _, done = called(folder, "slurm", "--num_nodes", 2, "--num_gpus", 2, "train.py", "fail")
    assert done.returncode == 1
    first = f"hadal run: rank 2 on {os.uname().nodename} failed first: exit code 1\n"
    assert first + "hadal run:   Traceback" in done.stderr
    assert "ValueError: bad sample" in done.stderr


def test_openmpi(folder: Path) -> None:
    words = ["-H", "hosts", "--num_gpus", 2, "--launcher_args", "--bind-to none", "train.py", "x"]
    call, done = called(folder, "openmpi", *words)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == shown("a")
    assert call[:5] == ["mpirun", "-n", "4", "--host", "a:2,b:2"]
    passed = call[5 : call.index("--bind-to")]
    assert set(passed[::2]) == {"-x"}
    assert {"MASTER_ADDR", "MASTER_PORT", "MINE", "PYTHONPATH"} <= set(passed[1::2])
    assert call[call.index("--bind-to") : -1] == ["--bind-to", "none", *RANK]


@pytest.mark.fast_cells("openmpi")
@pytest.mark.parametrize("launcher", ["openmpi", "mpich"])
def test_ranks_of_mpi_see_the_chosen_slots(folder: Path, launcher: str) -> None:
    (folder / "train.py").write_text(
        "import os; print(os.environ['LOCAL_RANK'], os.environ.get('CUDA_VISIBLE_DEVICES'))\n"
    )
    words = ["-H", "hosts", "--include", "a:1,2@b:0,3", "train.py"]
    _, done = called(folder, launcher, *words)
    assert done.returncode == 0, done.stderr
    shown = ["0 1,2", "1 1,2", "0 0,3", "1 0,3"]
    assert sorted(done.stdout.splitlines()) == [f"[rank {r}] {s}" for r, s in enumerate(shown)]
    _, done = called(folder, launcher, *words, FAKE_PLACES="by node")
    assert done.returncode == 127
    # Either of the two that lie elsewhere may be the first to say so, which ends the other.
    misplaced = r"rank (1 is number 0|2 is number 1) of 2 on its host, but the slots"
    assert re.search(misplaced + r" \[\[1, 2\], \[0, 3\]\]", done.stderr), done.stderr


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("mpirun") is None, reason="no mpirun is installed")
def test_openmpi_itself(folder: Path) -> None:
    (folder / "hosts").write_text("localhost slots=4\n")
    words = ["--allow-run-as-root", "--oversubscribe"]
    flags = ["-H", "hosts", "--force_multi", "--launcher", "openmpi"]
    args = ["--launcher_args", " ".join(words), "--master_port", 7, "train.py"]
    done = run(*flags, *args, "x", folder=folder)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [
        f"[rank {r}] {r} 4 {r} localhost 7 a b x" for r in range(4)
    ]
    failed = run(*flags, *args, "fail", folder=folder)
    assert failed.returncode == 1
    assert "hadal run: rank 2 failed first: exit code 1" in failed.stderr
    assert "ValueError: bad sample" in failed.stderr


@pytest.mark.fast_cells("mvapich")
@pytest.mark.parametrize("launcher", ["mpich", "mvapich", "impi"])
def test_hydra(folder: Path, launcher: str) -> None:
    words = ["-H", "hosts", "--num_gpus", 2, "--master_addr", "10.1.1.1", "--master_port", 7]
    call, done = called(folder, launcher, *words, "train.py", "x")
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == shown("10.1.1.1", 7)
    assert call[:8] == ["mpirun", "-n", "4", "-ppn", "2", "-hosts", "a,b", "-genvlist"]
    assert {"MASTER_ADDR", "MASTER_PORT", "MINE", "PYTHONPATH"} <= set(call[8].split(","))
    assert call[9:-1] == RANK


def test_pdsh_is_given_the_line_for_every_host(folder: Path) -> None:
    # The agents of both hosts fail: the stand-in gives them none of the address's host.
    words = ["-H", "hosts", "--include", "a:1@b", "--launcher_args", "-l me", "--venv_script", "/v"]
    (folder / "bin" / "pdsh").write_text(
        f"#!{sys.executable}\nimport json, os, sys\n"
        "words = [os.environ['PDSH_RCMD_TYPE'], *sys.argv[1:]]\n"
        "json.dump(words, open(os.environ['FAKE_CALLS'], 'w'))\n"
        "sys.exit(3)\n"
    )
    call, done = called(folder, "pdsh", *words, "train.py", "x")
    assert done.returncode == 3
    assert "hadal run: pdsh ended with 3" in done.stderr
    assert call[:-1] == ["ssh", "-S", "-N", "-f", "1024", "-w", "a,b", "-l", "me"]
    line = shlex.split(call[-1])
    job = job_in(line[line.index("--job") + 1])
    assert job.pool == {"a": (1,), "b": (0, 1, 2, 3)}
    own = f" --job {line[line.index('--job') + 1]} --address a --node-rank %n --may-fall-silent"
    assert call[-1] == there("/v", own)


@pytest.mark.slow_cells("mpich-words2-as many slots on each host")
@pytest.mark.parametrize(
    ("launcher", "words", "told"),
    [
        ("slurm", ["--include", "n1:0", "--num_gpus", 2], "Slurm assigns devices itself"),
        ("slurm", [], "with --num_gpus N"),
        ("mpich", ["-H", "hosts", "-i", "a:0,1@b"], "as many slots on each host"),
    ],
)
def test_unsupported_options_of_launchers_are_refused(
    folder: Path, launcher: str, words: list[str], told: str
) -> None:
    call, done = called(folder, launcher, *words, "train.py")
    assert (call, done.returncode) == (None, 2)
    assert told in done.stderr


def test_a_missing_launcher_is_reported(folder: Path) -> None:
    (folder / "bin" / "srun").unlink()
    _, done = called(folder, "slurm", "--num_gpus", 1, "train.py")
    assert done.returncode == 2
    assert "hadal run: srun: no such program is found" in done.stderr


def test_the_line_for_another_host_is_quoted_for_a_shell() -> None:
    program = Program(("t.py",), "/")
    assert job_in("".join(shlex.split(packed_job()))) == Job(program, {"a": (0,)})
    read = subprocess.run(
        ["sh", "-n", "-c", there("/a b'c", " --x")], capture_output=True, text=True, cwd=ROOT
    )
    assert read.returncode == 0, read.stderr


def packed_job() -> str:
    from hadal.launcher.job import packed

    return packed(Job(Program(("t.py",), "/"), {"a": (0,)}))
