"""Jobs across several hosts, each of which is a network namespace with a real sshd."""

from __future__ import annotations

import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from launcher.jobs import LIMIT_S, alive, interrupt, run, start, wait_for
from launcher.namespaces import Hosts, why_not


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    reason = why_not()
    if reason:
        pytest.skip(reason)
    made = Hosts(["alpha", "beta", "gamma"], tmp_path_factory.mktemp("hosts"))
    try:
        made.up()
        yield made
    finally:
        made.down()


@pytest.fixture
def folder(hosts: Hosts, tmp_path: Path) -> Path:
    (tmp_path / "hosts").write_text("# all\n" + "".join(f"{h} slots=2\n" for h in hosts.names))
    return tmp_path


def flags(hosts: Hosts, *options: str) -> list[str]:
    words = " ".join(["-F", str(hosts.config), *options])
    return ["-H", "hosts", "--launcher_args", words]


TRAIN = """
import os, sys
import hadal, torch
from torch import nn

hadal.init_distributed()
torch.manual_seed(0)
model = nn.Linear(4, 1)
config = {"train_micro_batch_size_per_gpu": 8, "zero_optimization": {"stage": 3},
          "optimizer": {"type": "Adam", "params": {"lr": 0.1}}}
engine, *_ = hadal.initialize(model=model, model_parameters=model.parameters(), config=config)
for _ in range(20):
    x = torch.randn(8, 4)
    loss = nn.functional.mse_loss(engine(x), x.sum(dim=1, keepdim=True))
    engine.backward(loss)
    engine.step()
print("host", os.environ["CROSS_RANK"], "slots", os.environ["CUDA_VISIBLE_DEVICES"],
      "of", os.environ["WORLD_SIZE"], "good" if loss < 0.2 else f"bad {loss}", flush=True)
torch.distributed.barrier()
if os.environ["CROSS_RANK"] == "1":
    raise ValueError(sys.argv[1])
torch.distributed.barrier()
"""


@pytest.mark.slow
def test_training_across_hosts_and_a_failure_on_one(hosts: Hosts, folder: Path) -> None:
    (folder / "train.py").write_text(TRAIN)
    (folder / ".hadal_env").write_text("GLOO_SOCKET_IFNAME=eth0\n")
    words = [*flags(hosts), "--include", "gamma:1@alpha:0,1", "train.py", 'it\'s $5 \\ "off"']
    done = run(*words, folder=folder)
    assert sorted(done.stdout.splitlines()) == [
        "[alpha rank 0] host 0 slots 0,1 of 3 good",
        "[alpha rank 1] host 0 slots 0,1 of 3 good",
        "[gamma rank 2] host 1 slots 1 of 3 good",
    ], done.stderr
    assert done.returncode == 1
    assert "hadal run: rank 2 on gamma failed first: exit code 1\n" in done.stderr
    assert 'hadal run:   ValueError: it\'s $5 \\ "off"\n' in done.stderr
    assert alive(folder) == []


@pytest.mark.slow
def test_a_host_that_refuses_is_named_before_anything_runs(hosts: Hosts, folder: Path) -> None:
    (folder / "note.py").write_text("open('ran', 'w')\n")
    hosts.stop_sshd("beta")
    try:
        began = time.monotonic()
        done = run(*flags(hosts), "note.py", folder=folder)
        assert time.monotonic() - began < 20
    finally:
        hosts.start_sshd("beta")
    assert done.returncode == 255
    assert "hadal run: host beta cannot be reached (ssh ended with 255): ssh: " in done.stderr
    assert "Connection refused" in done.stderr
    assert "alpha" not in done.stderr
    assert not (folder / "ran").exists()


STAY = """
import os, sys, time
open(os.path.join(sys.argv[1], "up" + os.environ["RANK"]), "w")
time.sleep(600)
"""


def staying(hosts: Hosts, folder: Path, *options: str, **variables: str) -> subprocess.Popen[str]:
    (folder / "stay.py").write_text(STAY)
    words = [*flags(hosts, *options), "--num_gpus", 1, "--num_nodes", 2, "stay.py", folder]
    job = start(*words, folder=folder, HADAL_GRACE_S="1", **variables)
    up = (folder / "up0", folder / "up1")
    wait_for(lambda: job.poll() is not None or all(each.exists() for each in up))
    assert job.returncode is None, job.communicate()[1]
    return job


@pytest.mark.slow
def test_an_interrupt_ends_every_process_on_every_host(hosts: Hosts, folder: Path) -> None:
    # Of a connection that is shared something stays behind, which holds ssh's output open.
    shared = ("ControlMaster=auto", "ControlPersist=15", f"ControlPath={hosts.folder}/%C")
    job = staying(hosts, folder, *(f"-o{option}" for option in shared))
    told, took = interrupt(job, signal.SIGINT)
    assert (job.returncode, took < 9) == (130, True), told
    assert [each for each in alive(folder) if "[mux]" not in each] == []


@pytest.mark.slow
def test_a_host_that_is_cut_off_is_named_and_ends_its_ranks(hosts: Hosts, folder: Path) -> None:
    job = staying(hosts, folder, HADAL_LOST_S="3")
    hosts.cut_off("beta")
    try:
        began = time.monotonic()
        _, told = job.communicate(timeout=LIMIT_S)
        assert time.monotonic() - began < 15
        assert job.returncode == 255
        assert "hadal run: host beta is lost (ssh ended with 255)" in told
        wait_for(lambda: alive(folder) == [])  # beta, alone as it is, gives up too
    finally:
        hosts.join_again("beta")


# Ranks wait for each other, and those of a host that is cut off are waited for in vain.
TOGETHER = """
import os, time, torch, torch.distributed as dist
import hadal

hadal.init_distributed()  # torch's own group may abort a program that ends
with open("worlds", "a") as worlds:
    print(dist.get_world_size(), os.environ["CROSS_RANK"], file=worlds)
while True:
    is_enough = torch.tensor([float(os.path.exists("enough"))])
    dist.all_reduce(is_enough)
    if is_enough:
        break
    time.sleep(0.05)
"""


@pytest.mark.slow
def test_an_elastic_job_continues_without_a_host_and_with_it_again(
    hosts: Hosts, folder: Path
) -> None:
    (folder / "together.py").write_text(TOGETHER)
    (folder / ".hadal_env").write_text("GLOO_SOCKET_IFNAME=eth0\n")
    worlds = folder / "worlds"

    def started() -> list[str]:
        return worlds.read_text().splitlines() if worlds.exists() else []

    words = ["--elastic_training", "--num_gpus", 1, "--num_nodes", 2, "together.py"]
    surroundings = {"HADAL_LOST_S": "3", "HADAL_GRACE_S": "1"}
    job = start(*flags(hosts), *words, folder=folder, **surroundings)
    try:
        wait_for(lambda: job.poll() is not None or len(started()) == 2)
        hosts.cut_off("alpha")  # rank 0's host
        wait_for(lambda: job.poll() is not None or len(started()) == 3)
    finally:
        hosts.join_again("alpha")
    wait_for(lambda: job.poll() is not None or len(started()) == 5)
    (folder / "enough").touch()
    _, told = job.communicate(timeout=LIMIT_S)
    assert job.returncode == 0, told
    assert "host alpha is lost (ssh ended with 255)" in told
    assert [sorted(started()[a:b]) for a, b in ((0, 2), (2, 3), (3, 5))] == [
        ["2 0", "2 1"],
        ["1 0"],
        ["2 0", "2 1"],
    ]
    wait_for(lambda: alive(folder) == [])


@pytest.mark.slow
def test_a_job_continues_if_its_output_is_not_read(hosts: Hosts, folder: Path) -> None:
    (folder / "talk.py").write_text(
        "import sys, time\nend = time.monotonic() + 8\n"
        "while time.monotonic() < end:\n    print('x' * 9999, flush=True)\n    time.sleep(0.01)\n"
        "open(sys.argv[1], 'w')\n"
    )
    words = [*flags(hosts), "--include", "beta:0", "talk.py", folder / "done"]
    job = start(*words, folder=folder, HADAL_LOST_S="2")
    time.sleep(12)  # the pipe is full, and the program waits with it
    assert job.poll() is None
    _, told = job.communicate(timeout=LIMIT_S)
    assert job.returncode == 0, told
    assert (folder / "done").exists()


@pytest.mark.slow
def test_each_host_may_be_started_by_itself(hosts: Hosts, folder: Path) -> None:
    (folder / "who.py").write_text("import os; print(os.environ['RANK'], os.uname().nodename)\n")
    address = hosts.address("alpha")
    common = ["-H", "hosts", "--num_nodes", 2, "--num_gpus", 1, "--no_ssh"]
    jobs = [
        start(
            *(*common, "--node_rank", rank, "--master_addr", address, "who.py"),
            folder=folder,
            before=hosts.inside(name),
        )
        for rank, name in enumerate(("alpha", "beta"))
    ]
    for rank, job in enumerate(jobs):
        out, told = job.communicate(timeout=LIMIT_S)
        assert (job.returncode, out.split()[-2]) == (0, str(rank)), told


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("pdsh") is None, reason="pdsh is not installed")
def test_hosts_may_be_started_by_pdsh(hosts: Hosts, folder: Path) -> None:
    (folder / "stay.py").write_text(STAY)
    words = ["-H", "hosts", "--launcher", "pdsh", "--num_nodes", 2, "--num_gpus", 1]
    ssh = {"PDSH_SSH_ARGS_APPEND": f"-F {hosts.config}"}
    job = start(*words, "stay.py", folder, folder=folder, **ssh)
    wait_for(lambda: (folder / "up0").exists() and (folder / "up1").exists())
    told, _ = interrupt(job, signal.SIGINT)
    assert job.returncode == 130, told
    wait_for(lambda: alive(folder) == [])
