"""The rank of a process, from the variables of each launcher."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import ClassVar
from unittest.mock import patch

import forks
import pytest
import torch
import torch.distributed as dist
from launcher.jobs import LIMIT_S, environment, quiet_port
from ranks import RankPools

from hadal.comm.start import (
    ALONE,
    DEFAULT_PORT,
    WorldPlace,
    _url,
    agreed_attempt,
    find_place,
    first_slurm_host,
    get_local_world_size,
    refuse_shared_devices,
)
from hadal.errors import CommunicationError

TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "MASTER_ADDR": "host0",
    "MASTER_PORT": "1234",
}
SLURM = {
    "SLURM_PROCID": "3",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_NODELIST": "node[03-05,9],gpu1",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}
MPI = {"PMI_RANK": "2", "PMI_SIZE": "3", "MPI_LOCALRANKID": "0", "MASTER_ADDR": "head"}


MVAPICH = {
    "MV2_COMM_WORLD_RANK": "3",
    "MV2_COMM_WORLD_SIZE": "4",
    "MV2_COMM_WORLD_LOCAL_RANK": "1",
    "MV2_COMM_WORLD_LOCAL_SIZE": "4",
}
# Of two hosts, with two ranks each.
SPREAD = {**OPEN_MPI, "OMPI_COMM_WORLD_SIZE": "4"}
AZURE = {**SPREAD, "AZ_BATCH_MASTER_NODE": "10.0.0.4:6000"}
SAGEMAKER = {**SPREAD, "SM_HOSTS": '["algo-1", "algo-2"]', "SM_CURRENT_HOST": "algo-2"}


@pytest.mark.parametrize(
    ("variables", "place"),
    [
        ({}, ALONE),
        (MVAPICH, WorldPlace(3, 4, 1, "127.0.0.1", DEFAULT_PORT, "MVAPICH")),
        (AZURE, WorldPlace(1, 4, 1, "10.0.0.4", DEFAULT_PORT, "Open MPI")),
        ({**AZURE, "MASTER_ADDR": "h"}, WorldPlace(1, 4, 1, "h", DEFAULT_PORT, "Open MPI")),
        # On one node that is its own address, which is not needed.
        ({**OPEN_MPI, "AZ_BATCHAI_MPI_MASTER_NODE": "10.0.0.5"}, find_place(OPEN_MPI)),
        (
            {**SPREAD, "AZ_BATCHAI_MPI_MASTER_NODE": "10.0.0.5"},
            WorldPlace(1, 4, 1, "10.0.0.5", DEFAULT_PORT, "Open MPI"),
        ),
        (SAGEMAKER, WorldPlace(1, 4, 1, "algo-1", DEFAULT_PORT, "Open MPI")),
        ({"HOME": "/root", "MASTER_ADDR": "far"}, ALONE),
        (TORCHRUN, WorldPlace(5, 8, 1, "host0", 1234, "torchrun")),
        (SLURM, WorldPlace(3, 4, 1, "node03", DEFAULT_PORT, "Slurm")),
        (OPEN_MPI, WorldPlace(1, 2, 1, "127.0.0.1", DEFAULT_PORT, "Open MPI")),
        (MPI, WorldPlace(2, 3, 0, "head", DEFAULT_PORT, "MPI")),
        ({**SLURM, **TORCHRUN}, WorldPlace(5, 8, 1, "host0", 1234, "torchrun")),
        ({**OPEN_MPI, "MASTER_ADDR": "h"}, WorldPlace(1, 2, 1, "h", DEFAULT_PORT, "Open MPI")),
        # Half of a launcher's variables is none of them.
        ({"RANK": "0"}, ALONE),
        ({"WORLD_SIZE": "8", **OPEN_MPI}, find_place(OPEN_MPI)),
        # An interactive allocation sets SLURM_PROCID without a step of srun's.
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "8"}, ALONE),
        (
            {"RANK": "0", "WORLD_SIZE": "1"},
            WorldPlace(0, 1, 0, "127.0.0.1", DEFAULT_PORT, "torchrun"),
        ),
        # Without a local rank the rank itself is the best guess.
        (
            {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "h"},
            WorldPlace(1, 2, 1, "h", DEFAULT_PORT, "torchrun"),
        ),
    ],
)
def test_places(variables, place):
    assert find_place(variables) == place


def test_mpi_names_the_first_host_if_nothing_else_does(monkeypatch):
    class Communicator:
        asked: ClassVar[list[int]] = []

        def bcast(self, value, root):
            self.asked.append(root)
            assert value
            return "10.1.2.3"

    module = ModuleType("mpi4py")
    module.MPI = SimpleNamespace(COMM_WORLD=Communicator())
    monkeypatch.setitem(sys.modules, "mpi4py", module)
    assert find_place(SPREAD).address == "10.1.2.3"
    assert find_place(MVAPICH).address == find_place(OPEN_MPI).address == "127.0.0.1"
    assert find_place(AZURE).address == "10.0.0.4"
    assert Communicator.asked == [0]
    with pytest.raises(CommunicationError, match="MASTER_ADDR"):
        find_place({"RANK": "1", "WORLD_SIZE": "2"})  # not MPI's
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    with pytest.raises(CommunicationError, match=r"4 ranks.*MASTER_ADDR.*mpi4py"):
        find_place(SPREAD)


def test_the_callers_port_is_for_those_who_know_none():
    assert find_place(OPEN_MPI, 77).port == 77
    assert find_place(TORCHRUN, 77).port == 1234


@pytest.mark.parametrize(
    ("variables", "told"),
    [
        ({**TORCHRUN, "RANK": "8"}, r"RANK=8.*WORLD_SIZE=8"),
        ({**TORCHRUN, "RANK": "-1"}, r"RANK=-1"),
        ({"RANK": "0", "WORLD_SIZE": "0"}, r"WORLD_SIZE=0"),
        ({**TORCHRUN, "RANK": "one"}, r"RANK must be a whole number, found 'one'"),
        ({**TORCHRUN, "WORLD_SIZE": "2.0"}, r"WORLD_SIZE.*'2.0'"),
        ({**TORCHRUN, "LOCAL_RANK": ""}, r"LOCAL_RANK.*''"),
        ({**TORCHRUN, "MASTER_PORT": "http"}, r"MASTER_PORT.*'http'"),
        ({"RANK": "1", "WORLD_SIZE": "2"}, r"2 ranks.*MASTER_ADDR"),
        ({**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "1"}, r"MASTER_ADDR"),
        ({**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "two"}, r"OMPI_COMM_WORLD_LOCAL_SIZE.*'two'"),
        ({**SLURM, "SLURM_STEP_NODELIST": "[1-2]"}, r"'\[1-2\]'.*MASTER_ADDR"),
        ({**SPREAD, "SM_HOSTS": "algo-1"}, r"SM_HOSTS must be a JSON list.*'algo-1'"),
        ({**SPREAD, "SM_HOSTS": "[]"}, r"SM_HOSTS must be a JSON list.*'\[\]'"),
    ],
)
def test_variables_that_cannot_be(variables, told):
    with pytest.raises(CommunicationError, match=told):
        find_place(variables)


@pytest.mark.parametrize(
    ("variables", "size"),
    [
        ({}, None),
        ({"LOCAL_WORLD_SIZE": "8"}, 8),
        ({"OMPI_COMM_WORLD_LOCAL_SIZE": "2"}, 2),
        ({"MPI_LOCALNRANKS": "3"}, 3),
        ({"MV2_COMM_WORLD_LOCAL_SIZE": "6"}, 6),
        ({"LOCAL_SIZE": "4"}, 4),
        ({"SLURM_STEP_TASKS_PER_NODE": "4"}, 4),
        ({"SLURM_STEP_TASKS_PER_NODE": "4(x12)"}, 4),
        ({"SLURM_STEP_TASKS_PER_NODE": "4(x2),3"}, None),
        ({"LOCAL_WORLD_SIZE": "8", "SLURM_STEP_TASKS_PER_NODE": "1(x2)"}, 8),
    ],
)
def test_how_many_processes_a_host_has(variables, size, monkeypatch):
    for name in ("LOCAL_WORLD_SIZE", *variables):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert get_local_world_size() == size


@pytest.mark.parametrize(
    ("nodes", "host"),
    [
        ("node[03-05,9],gpu1", "node03"),
        ("gpu1,gpu2", "gpu1"),
        ("gpu1", "gpu1"),
        ("n[7,9]", "n7"),
        ("n[12]", "n12"),
        ("rack-1-node[007-010]", "rack-1-node007"),
        ("n[1-2]-ib,m3", "n1-ib"),
        ("a.b.c,d", "a.b.c"),
    ],
)
def test_the_first_host_of_a_slurm_list(nodes, host):
    assert first_slurm_host(nodes) == host


@pytest.mark.parametrize(
    ("address", "url"), [("10.0.0.1", "tcp://10.0.0.1:7"), ("fd00::1", "tcp://[fd00::1]:7")]
)
def test_an_ipv6_address_is_in_brackets(address: str, url: str) -> None:
    assert _url(ALONE._replace(address=address, port=7)) == url


MEETING = """
import sys
import hadal
from hadal import comm
assert (comm.is_initialized(), comm.get_rank(), comm.get_world_size()) == (False, 0, 1)
if sys.argv[1:]:
    url, rank, size = sys.argv[1:]
    hadal.init_distributed(init_method=url, rank=int(rank), world_size=int(size))
else:
    hadal.init_distributed()
hadal.init_distributed()
assert comm.is_initialized()
comm.barrier()
print(comm.get_rank(), comm.get_world_size(), comm.Ranks.world().others)
"""


@pytest.mark.slow
def test_processes_meet_by_url_and_a_single_one_needs_no_other(tmp_path: Path):
    url = f"file://{tmp_path}/store"
    known = ("RANK", "WORLD_SIZE", "SLURM", "OMPI", "PMI", "MASTER")
    env = {k: v for k, v in os.environ.items() if not k.startswith(known)}
    words = [["-c", MEETING, *rest] for rest in ([], [url, "0", "2"], [url, "1", "2"])]
    answers = []
    for done in forks.run_ranks(words, envs=[env] * 3, timeout=300):
        assert done.returncode == 0, done.stderr
        answers.append(done.stdout.strip())
    assert answers == ["0 1 ()", "0 2 (1,)", "1 2 (0,)"]


def in_one_room(identities: list[str], name: str) -> None:
    """The error on this rank if the ranks of this host compute on these devices."""
    rank = dist.get_rank()
    store = dist.PrefixStore(name, dist.distributed_c10d._get_default_store())
    with patch("hadal.comm.start.device_identity", lambda _: identities[rank]):
        refuse_shared_devices(store, rank, dist.get_world_size(), torch.device("cuda", rank))


def test_two_ranks_on_one_gpu_are_refused_on_all_ranks(ranks: RankPools) -> None:
    ranks(3).run(in_one_room, ["GPU-1", "GPU-2", "GPU-3"], "apart")
    ranks(3).run(in_one_room, ["", "", ""], "nameless")
    told = [str(e) for e in ranks(3).raises(in_one_room, ["GPU-1", "GPU-2", "GPU-1"], "shared")]
    assert told == told[:1] * 3
    assert re.match(r"ranks 0, 2 would share cuda:[02] \(GPU-1\) of the host", told[0])
    assert "--nproc_per_node" in told[0]


def test_ranks_of_one_attempt_agree_although_others_have_died_in_the_store() -> None:
    store, wait = dist.HashStore(), timedelta(seconds=60)
    with pytest.raises(TimeoutError, match="1 of 3 ranks have come"):
        agreed_attempt(store, 0, 3, timedelta(seconds=0))
    dist.PrefixStore("hadal/attempts", store).add("tickets", 1)  # by a rank that then died
    with ThreadPoolExecutor(3) as pool:
        for attempt in (2, 3):
            coming = [pool.submit(agreed_attempt, store, rank, 3, wait) for rank in (2, 1, 0)]
            assert [each.result() for each in coming] == [attempt] * 3


RESTARTED = """
import os, signal
import torch
import hadal

torch.manual_seed(0)
config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 2},
          "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
          "checkpoint": {"resume": "saved"}}
engine, *_ = hadal.initialize(model=torch.nn.Linear(2, 1), config=config)
while engine.global_steps < 4:
    engine.backward(engine(torch.ones(1, 2)).mean())
    engine.step()
    engine.save_checkpoint("saved")
    if engine.global_steps == 2 and os.environ["RANK"] == "1" and not os.path.exists("killed"):
        open("killed", "w")
        os.kill(os.getpid(), signal.SIGKILL)
print("rank", os.environ["RANK"], "ends at update", engine.global_steps)
"""


@pytest.mark.slow
def test_torchrun_restarts_ranks_after_one_was_killed_and_they_resume(tmp_path: Path) -> None:
    """With an agent for each rank: only that of the killed one counts the restart."""
    (tmp_path / "train.py").write_text(RESTARTED)
    words = ["-m", "torch.distributed.run", "--nnodes=2", "--nproc_per_node=1", "--max-restarts=1"]
    words += ["--rdzv-backend=c10d", f"--rdzv-endpoint=localhost:{quiet_port()}", "train.py"]
    agents = [
        subprocess.Popen(
            [sys.executable, *words],
            cwd=tmp_path,
            env=environment(OMP_NUM_THREADS="1", DEEPSPEED_TIMEOUT="0.5"),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    ended = [agent.communicate(timeout=LIMIT_S) for agent in agents]
    out, error = ("".join(texts) for texts in zip(*ended, strict=True))
    assert [agent.returncode for agent in agents] == [0, 0], error
    assert sorted(out.splitlines()) == [f"rank {r} ends at update 4" for r in range(2)]
    assert "resumed from saved/global_step2 at update 2" in error


# Handlers at the exit run in the reverse of their order: what the first one tells is found behind
# ours, and the last one refuses threads before it, as Python 3.12 does.
_ENDS = """
import atexit, threading, time
import torch.distributed as dist
import hadal.comm

began = []
atexit.register(lambda: print(dist.is_initialized(), time.monotonic() - began[0] > 0.05))
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
hadal.comm.init_distributed()
atexit.register(setattr, threading.Thread, "start", None)
began.append(time.monotonic())
"""


def test_a_group_of_another_owner_also_ends_with_the_program() -> None:
    done = forks.run(["-c", _ENDS], env=os.environ, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["False", "True"]
