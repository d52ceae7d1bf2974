"""The launcher's functions under DeepSpeed's names."""

from __future__ import annotations

import base64
import json
import os
from pathlib import Path

import pytest

from hadal.compat.install import alias
from hadal.errors import UsageError
from hadal.launcher.job import program_in

HOSTS = "worker-0 slots=2\n# a comment\n\nworker-1 slots=4 extra=1\n"


def test_a_program_reads_a_hostfile_and_filters_it(tmp_path: Path) -> None:
    runner = alias("deepspeed.launcher.runner")
    assert runner.fetch_hostfile(str(tmp_path / "none")) is None
    (tmp_path / "hosts").write_text(HOSTS)
    pool = runner.fetch_hostfile(str(tmp_path / "hosts"))
    assert list(pool.items()) == [("worker-0", 2), ("worker-1", 4)]
    assert runner._parse_hostfile(HOSTS.splitlines(keepends=True)) == pool
    for chosen, left in {
        ("", ""): {"worker-0": [0, 1], "worker-1": [0, 1, 2, 3]},
        ("worker-1:0,2", ""): {"worker-1": [0, 2]},
        ("", "worker-0@worker-1:3"): {"worker-1": [0, 1, 2]},
        ("", "worker-0:0,1@worker-1"): {},
    }.items():
        assert runner.parse_inclusion_exclusion(pool, *chosen) == left
    active = runner.parse_inclusion_exclusion(pool, "", "")
    assert runner.apply_num_nodes_and_gpus(active, 1, 1) == {"worker-0": [0]}
    assert runner.apply_num_nodes_and_gpus(active, -1, -1) == active
    encoded = runner.encode_world_info(active)
    assert json.loads(base64.urlsafe_b64decode(encoded)) == active


@pytest.mark.parametrize(
    ("include", "exclude"), [("worker-9", ""), ("worker-0:7", ""), ("worker-0", "worker-1")]
)
def test_a_wrong_filter_is_a_value_error(include: str, exclude: str) -> None:
    runner = alias("deepspeed.launcher.runner")
    with pytest.raises(ValueError, match="worker"):
        runner.parse_inclusion_exclusion({"worker-0": 2, "worker-1": 2}, include, exclude)
    with pytest.raises(ValueError, match="listed twice"):
        runner._parse_hostfile(["a slots=1", "a slots=2"])
    with pytest.raises(ValueError, match="leave out --num_nodes"):
        runner.main(["--num_nodes", "1", "-i", "worker-0", "train.py"])


def test_flags_of_the_command_are_taken_by_their_beginning() -> None:
    runner = alias("deepspeed.launcher.runner")
    words = ["--num_g", "2", "--launcher_arg", "--mca x 1", "--inc=a:0", "train.py", "--num_g", "3"]
    parsed = runner.parse_args(words)
    assert (parsed.num_slots, parsed.launcher_args, parsed.include) == (2, "--mca x 1", "a:0")
    with pytest.raises(SystemExit):
        runner.parse_args(["--num_", "2", "train.py"])  # the beginning of several


def test_mpi_discovery_sets_the_variables_of_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT"):
        monkeypatch.setenv(name, "")  # so that the fixture removes it again
        monkeypatch.delenv(name)
    monkeypatch.setenv("MASTER_ADDR", "10.0.0.9")
    for name, value in {"RANK": 3, "SIZE": 4, "LOCAL_RANK": 1}.items():
        monkeypatch.setenv(f"OMPI_COMM_WORLD_{name}", str(value))
    alias("deepspeed.comm").mpi_discovery(distributed_port=29512, verbose=False)
    set_now = {name: os.environ[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    assert set_now == {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1"}
    assert (os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]) == ("10.0.0.9", "29512")


@pytest.mark.parametrize(
    ("name", "first", "words"),
    [
        ("PDSH", "pdsh", ["-w", "worker-0,worker-1"]),
        ("OpenMPI", "mpirun", ["--host", "worker-0:2,worker-1:2", "-mca", "x"]),
        ("MPICH", "mpirun", ["-hosts", "worker-0,worker-1", "-ppn", "2"]),
        ("MVAPICH", "mpirun", ["-n", "4"]),
        ("IMPI", "mpirun", ["-genvlist"]),
        ("Slurm", "srun", ["--ntasks=4", "--ntasks-per-node=2"]),
    ],
)
def test_a_runner_has_the_command_of_its_launcher(name: str, first: str, words: list[str]) -> None:
    runner, runners = (alias(f"deepspeed.launcher.{one}") for one in ("runner", "multinode_runner"))
    args = runner.parse_args(["--launcher_args", "-mca x", "train.py", "--lr", "1"])
    assert (args.user_script, args.user_args) == ("train.py", ["--lr", "1"])
    pool = {"worker-0": 2, "worker-1": 2}
    made = getattr(runners, f"{name}Runner")(args, runner.encode_world_info(pool), pool)
    made.add_export(" SEED ", "7 ")
    environment = {"HOME": "/"}
    found = made.get_cmd(environment, pool)
    command = found[0] if name == "PDSH" else found
    assert made.name == name.lower() and isinstance(made, runners.MultiNodeRunner)
    assert command[0] == first and set(words) <= set(command)
    assert isinstance(made.backend_exists(), bool)
    if name == "PDSH":
        job = command[-1].partition("--job ")[2].split()[0]
        assert found[1][:-1] == command[:-1] and found[1][-1].endswith(job)
        assert found[2]["PDSH_RCMD_TYPE"] == "ssh"
    else:
        assert environment["SEED"] == "7"
        assert program_in(command[-1]).words == ("train.py", "--lr", "1")
    with pytest.raises(UsageError, match="PDSHRunner"):
        runners.MultiNodeRunner(args, "").get_cmd({}, pool)
