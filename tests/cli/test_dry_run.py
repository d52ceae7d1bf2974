"""`hadal run --dry-run`: prints processes and hosts, and starts nothing."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

from hadal.cli.main import main
from hadal.cli.run import pid_file
from hadal.launcher import front

HOSTS = "worker-1 slots=2\nworker-2 slots=2\n"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(front, "Channel", None)  # no process can be started
    (tmp_path / "train.py").touch()
    (tmp_path / "hosts").write_text(HOSTS)
    return tmp_path


def shown(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, dict[str, str]]:
    """The rows of each host."""
    assert main(["run", "--dry-run", *words]) == 0
    told: dict[str, dict[str, str]] = {}
    host = ""
    for line in capsys.readouterr().out.splitlines()[1:]:
        if line.startswith("  "):
            name, _, text = line.strip().partition("  ")
            told[host][name] = text.strip()
        elif line:
            host = line
            told[host] = {}
    return told


def test_one_machine(capsys: pytest.CaptureFixture[str], folder: Path) -> None:
    words = ["--num_gpus", "2", "--master_port", "29501", "--local_rank", "train.py", "--x", "a b"]
    (here,) = shown(capsys, *words).values()
    assert here["ranks"] == "0-1, on slots 0, 1"
    assert here["command"].endswith("-u train.py --local_rank=N --x 'a b'")
    assert here["directory"] == str(folder)
    assert "hadal.launcher.node" in here["started by"]
    for variable in ("RANK=0..1", "WORLD_SIZE=2", "MASTER_ADDR=127.0.0.1", "MASTER_PORT=29501"):
        assert variable in here["variables"].split()
    (alone,) = shown(capsys, "--num_gpus", "1", "--enable_each_rank_log", "l", "train.py").values()
    assert "--local_rank" not in alone["command"]
    assert "MASTER_PORT=(a free one)" in alone["variables"]
    assert alone["logs"] == f"{folder}/l/rankN.log"


def test_the_file_with_the_process_number_is_the_users_own(
    capsys: pytest.CaptureFixture[str], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    (folder / "precious").write_text("precious")
    path = folder / f"{os.getpid()}.ds"
    path.symlink_to(folder / "precious")
    assert main(["run", "--dry-run", "--save_pid", "train.py"]) == 0
    assert f"the number of this process is in {path}" in capsys.readouterr().err
    assert (folder / "precious").read_text() == "precious"
    assert not path.is_symlink()
    with pid_file(7) as written:
        assert written == folder / "7.ds"
        assert written.read_text() == str(os.getpid())
        assert written.stat().st_mode & 0o777 == 0o600
    path.symlink_to(folder / "precious")
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    assert main(["run", "--dry-run", "--save_pid", "train.py"]) == 2
    assert "let TMPDIR name a directory of your own" in capsys.readouterr().err.replace("\n", " ")
    assert (folder / "precious").read_text() == "precious"


def test_variables_of_env_files_are_those_of_the_host(
    capsys: pytest.CaptureFixture[str], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LD_LIBRARY_PATH", "/lib")
    (folder / ".deepspeed_env").write_text("export NCCL_X=1\nLD_LIBRARY_PATH=/efa:$LD_LIBRARY_PATH")
    (here,) = shown(capsys, "train.py").values()
    assert {"NCCL_X=1", "LD_LIBRARY_PATH=/efa:/lib"} <= set(here["variables"].split())
    hosts = shown(capsys, "-H", "hosts", "train.py")
    assert "LD_LIBRARY_PATH='/efa:${LD_LIBRARY_PATH}'" in hosts["worker-1"]["variables"]
    hosts = shown(capsys, "-H", "hosts", "--launcher", "openmpi", "train.py")
    assert "LD_LIBRARY_PATH=/efa:/lib" in hosts["worker-1"]["variables"]


def test_several_machines(capsys: pytest.CaptureFixture[str]) -> None:
    by_ssh = shown(capsys, "-H", "hosts", "--as-deepspeed", "train.py")
    assert list(by_ssh) == ["worker-1", "worker-2"]
    second = by_ssh["worker-2"]
    assert second["ranks"] == "2-3, on slots 0, 1"
    assert "-m hadal.compat train.py --local_rank=N" in second["command"]
    assert "MASTER_ADDR=(rank 0's host)" in second["variables"]
    assert "CUDA_VISIBLE_DEVICES=0,1" in second["variables"]
    assert "OMP_NUM_THREADS" not in second["variables"]
    assert second["started by"].startswith("ssh ") and " worker-2 " in second["started by"]
    own = shown(
        capsys, "-H", "hosts", "--no_ssh", "--node_rank", "1", "--master_addr", "w", "train.py"
    )
    assert list(own) == ["worker-2"] and "MASTER_ADDR=w" in own["worker-2"]["variables"]


@pytest.mark.parametrize("launcher", ["slurm", "openmpi", "pdsh"])
def test_one_program_starts_all(launcher: str, capsys: pytest.CaptureFixture[str]) -> None:
    told = shown(capsys, "-H", "hosts", "--launcher", launcher, "train.py")
    assert list(told)[:2] == ["worker-1", "worker-2"]
    starter = {"slurm": "srun", "openmpi": "mpirun", "pdsh": "pdsh"}[launcher]
    assert told[starter]["started by"].startswith(f"{starter} ")
    assert len(told[starter]["started by"]) < 1000  # the packed job is cut short
    assert "started by" not in told["worker-1"]


def test_an_elastic_job_names_its_bounds(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["-H", "hosts", "--elastic_training", "--num_nodes", "1:2", "train.py"]
    assert main(["run", "--dry-run", *words]) == 0
    assert "elastic: continues with 1 to 2 hosts" in capsys.readouterr().out


def test_a_search_is_not_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "--dry-run", "--autotuning", "tune", "train.py"]) == 2
    assert "--dry-run shows one job" in capsys.readouterr().err
