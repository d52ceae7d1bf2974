"""Ranks answer each other while their programs do something else."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence

import pytest
import torch
from cases import diagonal
from ranks import RankPools
from torch import Tensor

from hadal import comm
from hadal.comm.bell import Bell

NUMEL = 70_000  # more than a message of a socket holds


class Desk:
    """Answers with its rank and what it was asked for, once there is something."""

    def __init__(self, ranks: comm.Ranks) -> None:
        bell = Bell.here()
        assert bell is not None
        self._bell, self._ranks = bell, ranks
        self._is_open = threading.Event()
        self._number = bell.open(self, ranks)
        self.is_asked = True

    def open(self) -> None:
        self._is_open.set()

    def answer(self, what: Sequence[int]) -> Tensor | None:
        (number,) = what
        value = float(10 * self._ranks.rank + number)
        return torch.full((NUMEL,), value) if self._is_open.is_set() else None

    def ask(self, number: int) -> list[float]:
        full = torch.zeros(self._ranks.size * NUMEL)
        self._bell.ask(self._number, [number], full, self._ranks, "the answers").wait()
        rows = full.view(self._ranks.size, -1)
        assert all(bool((row == row[0]).all()) for row in rows)
        return [float(row[0]) for row in rows]


def ask_in_vain_for_nobody(askers: Sequence[int]) -> list[list[float]]:
    """These ranks ask; the others wait for them in a collective of the program's own."""
    ranks = comm.Ranks.world()
    first, second = Desk(ranks), Desk(ranks)
    second.is_asked = False  # while somebody may ask the first, it is heard all the same
    found = []
    if ranks.rank not in askers:
        # It is busy for a while, with what the answer is made of.
        threading.Timer(0.05 * ranks.rank, first.open).start()
        second.open()
    else:
        first.open()
        second.open()
        found = [first.ask(1), first.ask(2), second.ask(3)]
    together = torch.ones(3)
    torch.distributed.all_reduce(together)
    assert together.tolist() == [ranks.size] * 3
    return found


@pytest.mark.parametrize("askers", [(1,), (0, 1), (0, 1, 2)])
def test_whoever_is_in_a_collective_answers(askers: Sequence[int], ranks: RankPools) -> None:
    found = ranks(3).run(ask_in_vain_for_nobody, askers)
    for rank, answers in enumerate(found):
        wanted = [[0.0 if r == rank else 10.0 * r + n for r in range(3)] for n in (1, 2, 3)]
        assert answers == (wanted if rank in askers else [])


def ask_in_blocks() -> list[float]:
    block, _ = comm.Ranks.world().in_blocks(2)
    desk = Desk(block)
    desk.open()
    found = desk.ask(4) if block.rank == 0 else []
    torch.distributed.barrier()
    return found


def test_groups_have_desks_of_their_own(ranks: RankPools) -> None:
    assert ranks(4).run(ask_in_blocks) == [[0.0, 14.0], [], [0.0, 14.0], []]


def let_go_and_open_again() -> list[float]:
    ranks = comm.Ranks.world()
    for _ in range(3):
        Desk(ranks)
    desk = Desk(ranks)
    desk.open()
    torch.distributed.barrier()
    found = desk.ask(5)
    torch.distributed.barrier()
    return found


def test_desks_close_with_their_owners(ranks: RankPools) -> None:
    assert ranks(2).run(let_go_and_open_again) == [[0.0, 15.0], [5.0, 0.0]]


def come(who: Sequence[int], patience: float) -> bool | None:
    ranks, bell = comm.Ranks.world(), Bell.here()
    assert bell is not None
    place = [len(who), *who]
    found = None
    if ranks.rank in who:
        time.sleep(0.05 * ranks.rank)
        found = bell.all_come(place, ranks, patience)
    torch.distributed.barrier()
    # Later callers get the same.
    return bell.all_come(place, ranks, 100.0) if found is None else found


def test_ranks_learn_whether_all_have_come(ranks: RankPools) -> None:
    assert ranks(3).run(come, (0, 1, 2), 20.0) == [True] * 3
    assert ranks(3).run(come, (0, 2), 0.1) == [False] * 3
    assert ranks(3).run(come, (1,), 0.0) == [False] * 3


PROGRAM = """
import sys, time, torch
from datetime import timedelta
rank, port, late, destroys = map(int, sys.argv[1:])
torch.distributed.init_process_group(
    "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2,
    timeout=timedelta(seconds=20),
)
sys.path[:0] = PATHS
from comm.test_bell import Desk
from hadal import comm
desk = Desk(comm.Ranks.world())
desk.open()
assert desk.ask(3) == [[0.0, 13.0], [3.0, 0.0]][rank]
torch.distributed.barrier()
desk.is_asked = False
if rank == late:
    time.sleep(0.6)
if destroys:
    torch.distributed.destroy_process_group()
print("end", flush=True)
"""


@pytest.mark.slow
@diagonal(late=[0, 1], destroys=[False, True])
def test_a_process_ends_in_order(late: int, destroys: bool) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    program = PROGRAM.replace("PATHS", repr([path for path in sys.path if path]))
    began = time.monotonic()
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
    assert time.monotonic() - began < 50
