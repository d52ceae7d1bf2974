"""One rank's notice, which all ranks act on at the same boundary."""

from __future__ import annotations

import threading
import time

import pytest
import torch
from ranks import RankPools

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


def wait_for_nobody() -> None:
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


def test_a_rank_that_does_not_answer_is_an_error(ranks: RankPools) -> None:
    ranks(2).run(wait_for_nobody)
