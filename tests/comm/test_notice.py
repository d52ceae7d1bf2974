"""One rank's notice, which all ranks act on at the same boundary."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
import time

import pytest
import torch
from cases import every
from ranks import RankPools, on_ranks

from hadal import comm
from hadal.comm import Ranks, notice
from hadal.comm.notice import Notice
from hadal.errors import CommunicationError


def passed(name: str, givers: list[int], together: bool) -> tuple[int, str]:
    """Pass boundaries until one is due; the ranks meet at each, or drift a step apart."""
    world, generator = Ranks.world(), torch.Generator().manual_seed(comm.get_rank())
    one = Notice(name, world)
    number = 0
    for number in range(1, 4000):
        if number == 30 and comm.get_rank() in givers:
            one.give("SIGTERM")
        time.sleep(0.002 * float(torch.rand((), generator=generator)))
        if together or number % 2:
            comm.barrier()
        if one.is_due():
            break
    word = one.word
    one.close()
    assert number > 30
    return number, word


@pytest.mark.slow_cells("givers0-True")
@pytest.mark.parametrize(("givers", "together"), [([1], True), ([0, 2], False), ([0, 1, 2], True)])
def test_all_ranks_act_at_the_same_boundary(
    givers: list[int], together: bool, ranks: RankPools
) -> None:
    found = ranks(3).run(passed, f"test/{givers}", givers, together)
    assert len({number for number, _ in found}) == 1
    assert all(word.startswith("SIGTERM on rank ") for _, word in found)


def alone() -> None:
    one = Notice("alone", Ranks.world())
    assert not one.is_due()
    one.give("SIGUSR1")
    for _ in range(500):
        time.sleep(0.01)
        if one.is_due():
            break
    else:
        raise AssertionError("not due")
    assert one.word == "SIGUSR1"
    assert not one.is_due()
    one.close()
    assert not [each for each in threading.enumerate() if each.name == "hadal-notice"]


def test_a_rank_alone(ranks: RankPools) -> None:
    ranks(1).run(alone)


@on_ranks(2)
def test_a_rank_that_does_not_answer_is_an_error() -> None:
    notice._PATIENCE_S, world = 0.5, Ranks.world()
    if comm.get_rank() == 0:
        one = Notice("nobody", world)
        one.give("SIGTERM")
        with pytest.raises(CommunicationError, match="SIGTERM on rank 0 was noticed, but"):
            while True:
                time.sleep(0.01)
                one.is_due()
        one.close()
    notice._PATIENCE_S = 120.0
    comm.barrier()


PROGRAM = """
import sys, time, torch
from datetime import timedelta
rank, port, late, destroys = map(int, sys.argv[1:])
torch.distributed.init_process_group(
    "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2,
    timeout=timedelta(seconds=20),
)
sys.path[:0] = PATHS
from hadal.comm import Ranks, notice
notice._PAUSE_S = 0.001
one = notice.Notice("ends", Ranks.world())
assert not one.is_due()
torch.distributed.barrier()
if rank == late:
    time.sleep(0.6)
if destroys:
    torch.distributed.destroy_process_group()
print("end", flush=True)
"""


@pytest.mark.slow
@every(late=[0, 1], destroys=[False, True])
def test_a_process_ends_in_order(late: int, destroys: bool) -> None:
    """A thread that looks into a store which is gone, or while Python ends, aborts nothing."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    program = PROGRAM.replace("PATHS", repr([path for path in sys.path if path]))
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", program, *map(str, (rank, port, late, int(destroys)))],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    told = [process.communicate(timeout=60)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], told
    assert told == ["end\n"] * 2
