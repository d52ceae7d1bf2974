"""`hadal run` on one machine: the environment of ranks, and correct exit codes and cleanup."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hadal.launcher.job import Hello, Job, Program, ProgramKind, decoded, packed, share_of
from launcher.jobs import (
    LIMIT_S,
    alive,
    descendants,
    environment,
    interrupt,
    quiet_port,
    run,
    run_interrupted_late,
    start,
    wait_for,
)

TELL = """
import json, os, sys
told = {k: os.environ.get(k) for k in sys.argv[-1].split(",")}
cores = sorted(os.sched_getaffinity(0))
print(json.dumps([sys.argv[1:-1], told, cores, os.getcwd(), sys.path[0]]))
"""
KEYS = (
    "RANK,WORLD_SIZE,LOCAL_RANK,LOCAL_WORLD_SIZE,LOCAL_SIZE,CROSS_RANK,CROSS_SIZE,MASTER_ADDR,"
    "MASTER_PORT,CUDA_VISIBLE_DEVICES,OMP_NUM_THREADS,FROM_FILE"
)
AWKWARD = ["--lr=1e-3", "a b", "$HOME", "'", "--", "--num_gpus", "7", "", "\\"]


def test_ranks_get_their_place_and_arguments(tmp_path: Path) -> None:
    (tmp_path / "tell.py").write_text(TELL)
    (tmp_path / ".hadal_env").write_text("FROM_FILE=a b\n")
    port = str(quiet_port())
    flags = ["--include", "localhost:0,2", "--master_port", port, "--bind_cores_to_rank"]
    flags += ["--enable_each_rank_log", "logs", "--local_rank"]
    done = run(*flags, "tell.py", *AWKWARD, KEYS, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    shown = sorted(done.stdout.splitlines())
    cores = sorted(os.sched_getaffinity(0))
    share = len(cores) // 2
    bound = sorted(line for line in done.stderr.splitlines() if "is bound to" in line)
    assert [line.partition(" (equal parts: ")[0] for line in bound] == [
        f"hadal run: rank {rank} is bound to {share} cores from {own[0]} to {own[-1]}"
        for rank, own in enumerate((cores[:share], cores[share : 2 * share]))
    ]
    for rank, line in enumerate(shown):
        prefix, _, told = line.partition("] ")
        assert prefix == f"[rank {rank}"
        assert (tmp_path / "logs" / f"rank{rank}.log").read_text() == told + "\n"
        words, variables, own, folder, first = json.loads(told)
        assert words == [f"--local_rank={rank}", *AWKWARD]
        assert folder == first == str(tmp_path)
        assert own == cores[rank * share : (rank + 1) * share]
        assert variables == {
            "RANK": str(rank),
            "WORLD_SIZE": "2",
            "LOCAL_RANK": str(rank),
            "LOCAL_WORLD_SIZE": "2",
            "LOCAL_SIZE": "2",
            "CROSS_RANK": "0",
            "CROSS_SIZE": "1",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
            "CUDA_VISIBLE_DEVICES": "0,2",
            "OMP_NUM_THREADS": str(share),
            "FROM_FILE": "a b",
        }
    assert len(shown) == 2


# Rank 1 fails after a while; rank 0 fails because of it, and faster; rank 2 waits for ever, and
# has started a process that does so too.
FAIL = """
import os, subprocess, sys, time
rank, folder = int(os.environ["RANK"]), sys.argv[1]
if rank == 2:
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)", folder])
    time.sleep(600)
def is_there(name):
    return os.path.exists(os.path.join(folder, name))
def wait_for(name):
    while not is_there(name):
        time.sleep(0.01)
sys.excepthook = lambda *told: (sys.__excepthook__(*told), open(f"{folder}/{rank} failed", "w"))
if rank == 0:
    open(folder + "/ready", "w")
    wait_for("1 failed")
    time.sleep(0.5)
    raise RuntimeError("the peer is gone")
import atexit
atexit.register(wait_for, "0 failed")
wait_for("ready")
def sample(number):
    raise ValueError(f"bad sample {number}")
sample(17)
"""


def test_the_first_failure_is_reported_first_and_nothing_is_left(tmp_path: Path) -> None:
    (tmp_path / "fail.py").write_text(FAIL)
    done = run("--num_gpus", 3, "fail.py", tmp_path, folder=tmp_path)
    assert done.returncode == 1
    lines = [line.removeprefix("hadal run: ") for line in done.stderr.splitlines()]
    assert lines[0] == "rank 1 failed first: exit code 1"
    assert lines[1] == "  Traceback (most recent call last):"
    assert "  ValueError: bad sample 17" in lines
    assert "rank 0 failed after it, exit code 1: RuntimeError: the peer is gone" in lines
    assert done.stderr.count("Traceback") == 1
    assert "rank 2" not in done.stderr
    assert alive(tmp_path) == []


@pytest.mark.slow
def test_an_interrupt_as_the_job_ends_is_reported(tmp_path: Path) -> None:
    done = run_interrupted_late("before", "--no_python", "true", folder=tmp_path)
    assert done.returncode == 128 + signal.SIGINT
    assert "SIGINT: ending all 1 ranks" in done.stderr


@pytest.mark.slow
def test_the_exit_code_is_the_ranks_own(tmp_path: Path) -> None:
    script = tmp_path / "die.sh"
    script.write_text("#!/bin/sh\necho dying >&2; kill -9 $$\n")
    script.chmod(0o755)
    done = run("--no_python", script, folder=tmp_path)
    assert done.returncode == 128 + signal.SIGKILL
    assert "rank 0 failed first: ended by SIGKILL" in done.stderr
    assert "hadal run:   dying" in done.stderr
    assert "memory" in done.stderr


# Rank 0 ends in its own way when it is interrupted, rank 1 does not end at all, and neither do the
# processes that they have started; that of rank 1 has gone into a session of its own.
STUBBORN = """
import os, signal, subprocess, sys, time
folder, rank = sys.argv[1], os.environ["RANK"]
for each in (signal.SIGINT, signal.SIGTERM):
    signal.signal(each, signal.SIG_IGN)
far = {"start_new_session": rank == "1"}
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)", folder], **far)
if rank == "0":
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
open(os.path.join(folder, "up" + rank), "w")
try:
    time.sleep(600)
except KeyboardInterrupt:
    open(os.path.join(folder, "saved"), "w")
"""


def stubborn(tmp_path: Path, ranks: int = 2) -> subprocess.Popen[str]:
    (tmp_path / "stay.py").write_text(STUBBORN)
    words = ["--num_gpus", ranks, "--save_pid", "stay.py", tmp_path]
    job = start(*words, folder=tmp_path, TMPDIR=str(tmp_path), HADAL_GRACE_S="1")
    wait_for(lambda: all((tmp_path / f"up{rank}").exists() for rank in range(ranks)))
    assert (tmp_path / f"{job.pid}.ds").read_text() == str(job.pid)
    assert len(alive(tmp_path)) >= 2 * ranks
    return job


@pytest.mark.slow
def test_an_interrupt_ends_every_process_within_seconds(tmp_path: Path) -> None:
    job = stubborn(tmp_path)
    told, took = interrupt(job, signal.SIGINT)
    assert job.returncode == 130, told
    assert took < 9
    assert (tmp_path / "saved").exists()
    assert "SIGINT: ending all 2 ranks" in told
    assert alive(tmp_path) == []
    assert not list(tmp_path.glob("*.ds"))


@pytest.mark.slow
def test_nothing_outlives_the_command_itself(tmp_path: Path) -> None:
    job = stubborn(tmp_path)
    interrupt(job, signal.SIGKILL)
    wait_for(lambda: alive(tmp_path) == [])


@pytest.mark.slow
@pytest.mark.parametrize("module", ["hadal.launcher.node", "torch.distributed.run"])
def test_nothing_outlives_the_processes_in_between(tmp_path: Path, module: str) -> None:
    job = stubborn(tmp_path, ranks=1)
    (between,) = [pid for pid, words in descendants(job.pid) if module in words]
    os.kill(between, signal.SIGKILL)
    _, told = job.communicate(timeout=LIMIT_S)
    assert job.returncode not in (0, None), told
    wait_for(lambda: alive(tmp_path) == [])


@pytest.mark.slow
def test_arguments_may_be_long(tmp_path: Path) -> None:
    (tmp_path / "long.py").write_text("import sys; print(*map(len, sys.argv[1:]))\n")
    long = ["x" * 120_000, "y" * 120_000]
    done = run("--num_gpus", 1, "long.py", *long, folder=tmp_path)
    assert (done.returncode, done.stdout) == (0, "120000 120000\n"), done.stderr[-2000:]


@pytest.mark.slow
def test_a_log_that_cannot_be_written_is_reported(tmp_path: Path) -> None:
    (tmp_path / "talk.py").write_text("print('one', flush=True)\n")
    flags = ["--num_gpus", 1, "--enable_each_rank_log"]
    (tmp_path / "file").touch()
    done = run(*flags, "file", "talk.py", folder=tmp_path)
    assert done.returncode == 127
    assert f"hadal run:   File exists: {tmp_path}/file\n" in done.stderr
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "rank0.log").symlink_to("/dev/full")
    done = run(*flags, "logs", "talk.py", folder=tmp_path)
    assert (done.returncode, done.stdout) == (0, "one\n")
    assert done.stderr == "the file of this rank's output ends here: No space left on device\n"


@pytest.mark.slow
def test_an_ignored_hangup_ends_nothing(tmp_path: Path) -> None:
    (tmp_path / "wait.py").write_text(
        "import os, time\nopen('up', 'w')\n"
        "while not os.path.exists('enough'):\n    time.sleep(0.05)\n"
    )
    words = ["--num_gpus", 1, "wait.py"]
    job = start(*words, folder=tmp_path, before=["nohup"])
    wait_for(lambda: (tmp_path / "up").exists())
    job.send_signal(signal.SIGHUP)
    time.sleep(0.5)
    (tmp_path / "enough").touch()
    _, told = job.communicate(timeout=LIMIT_S)
    assert job.returncode == 0, told


@pytest.mark.slow
def test_too_few_cores_are_reported(tmp_path: Path) -> None:
    (tmp_path / "nothing.py").touch()
    flags = ["--bind_core_list", "0", "--num_gpus", 2]
    done = run(*flags, "nothing.py", folder=tmp_path)
    assert done.returncode == 127
    assert "hadal run:   2 ranks cannot be bound to 1 cores ([0])" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_a_port_in_use_is_reported(tmp_path: Path) -> None:
    (tmp_path / "nothing.py").touch()
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        done = run("--master_port", port, "--num_gpus", 2, "nothing.py", folder=tmp_path)
    assert done.returncode == 1
    assert done.stderr.splitlines() == [
        "hadal run: torch's agent on localhost failed: exit code 1",
        f"hadal run:   port {port} is in use on that host; choose another one with --master_port",
    ]


@pytest.mark.slow
def test_a_program_written_for_deepspeed_runs_unchanged(tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text(
        "import os, sys, deepspeed, beside\n"
        "deepspeed.init_distributed()\n"
        "assert os.environ['MASTER_ADDR'] == '127.0.0.1' and int(os.environ['MASTER_PORT'])\n"
        "print(deepspeed.comm.get_rank(), deepspeed.comm.get_world_size(), sys.argv[1:])\n"
    )
    (tmp_path / "beside.py").touch()
    flags = ["--as-deepspeed", "--num_accelerators", 2]
    done = run(*flags, "job.py", "--deepspeed", "ds.json", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    rest = "'--deepspeed', 'ds.json']"
    assert sorted(done.stdout.splitlines()) == [
        f"[rank {rank}] {rank} 2 ['--local_rank={rank}', {rest}" for rank in (0, 1)
    ]


def test_it_starts_fast(tmp_path: Path) -> None:
    began = time.monotonic()
    done = run("--module", "--no_python", "train.py", folder=tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith("error: --module and --no_python contradict each other")
    assert time.monotonic() - began < 5


def test_a_host_that_must_end_at_once_starts_nothing(tmp_path: Path) -> None:
    program = Program(("touch", str(tmp_path / "ran")), "/", kind=ProgramKind.BARE)
    job = Job(program, {"a": (0,)})
    done = subprocess.run(
        [sys.executable, "-m", "hadal.launcher.node"],
        input=f"{packed(share_of(job, 'a', '127.0.0.1'))}\nSIGTERM\n".encode(),
        capture_output=True,
        env=environment(),
        timeout=LIMIT_S,
    )
    assert done.returncode == 128 + signal.SIGTERM
    assert [type(decoded(line)) for line in done.stdout.splitlines()] == [Hello]
    assert not (tmp_path / "ran").exists()


@pytest.mark.slow
def test_it_ends_if_its_output_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "talk.py").write_text(
        "import sys, time\nprint(sys.argv[1], flush=True)\n"
        "while True:\n    print('more', flush=True)\n    time.sleep(0.05)\n"
    )
    words = ["--log_level", "debug", "--num_gpus", 1, "talk.py", tmp_path]
    job = start(*words, folder=tmp_path, HADAL_GRACE_S="1")
    assert job.stdout is not None and job.stderr is not None
    assert job.stdout.readline() == f"{tmp_path}\n"
    job.stdout.close()
    assert job.wait(LIMIT_S) == 141
    shown = job.stderr.read()
    assert "hadal run: localhost [0]: " in shown
    assert "Traceback" not in shown
    job.stderr.close()
    wait_for(lambda: alive(tmp_path) == [])


def test_a_missing_program_is_one_error(tmp_path: Path) -> None:
    (tmp_path / "train.py").touch()
    missing = f"there is no such file ({tmp_path}/trian.py); did you mean train.py?"
    for words, told in (
        (["trian.py"], f"trian.py: {missing}"),
        (["--no_python", "nosuchprogram"], "nosuchprogram: no such program is found"),
    ):
        done = run("--num_gpus", 2, *words, folder=tmp_path)
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr == f"error: {told}\n"


# The configuration has a fault that every rank finds, in a function of the user's.
MISTAKE = """
import hadal
from torch import nn
def made():
    config = {"train_batch_size": 2, "optimizer": {"type": "AdmaW"}}
    return hadal.initialize(model=nn.Linear(2, 2), config=config)
made()
"""


@pytest.mark.slow
def test_an_error_of_ours_is_its_message_and_the_users_lines(tmp_path: Path) -> None:
    (tmp_path / "mistake.py").write_text(MISTAKE)
    done = run("--num_gpus", 2, "mistake.py", folder=tmp_path)
    assert done.returncode == 1
    lines = [line.removeprefix("hadal run: ") for line in done.stderr.splitlines()]
    first = lines[0][5]
    assert lines[0] == f"rank {first} failed first: ConfigError: 1 fault in the configuration"
    assert lines[1].startswith("    optimizer.type  ") and 'did you mean "AdamW"?' in lines[1]
    assert lines[2:] == [
        "  raised by this program at",
        '    File "mistake.py", line 7, in <module>',
        "      made()",
        '    File "mistake.py", line 6, in made',
        "      return hadal.initialize(model=nn.Linear(2, 2), config=config)",
        f"rank {1 - int(first)} failed with the same error",
        "hint: HADAL_TRACEBACK=full shows the frames inside Hadal, too",
        "hint: --enable_each_rank_log DIR saves the full output of each rank",
    ]
    done = run("--num_gpus", 1, "mistake.py", folder=tmp_path, HADAL_TRACEBACK="full")
    assert "Traceback" in done.stderr and "hadal/config/prepare.py" in done.stderr
