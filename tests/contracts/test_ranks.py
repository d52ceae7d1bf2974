"""The rank pool itself: an error on a rank becomes one failure that names the rank."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from ranks import RankPool, RankPools, RanksFailed


def sum_over_ranks(value: int) -> int:
    total = torch.tensor([value])
    dist.all_reduce(total)
    return int(total)


def own_process() -> int:
    return os.getpid()


def raise_on_rank_1() -> None:
    if os.environ["RANK"] == "1":
        raise ValueError("rank 1 says no")


def raise_on_rank_1_while_rank_0_waits() -> None:
    raise_on_rank_1()
    dist.all_reduce(torch.ones(1))


def die_on_rank_1() -> None:
    if os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(torch.ones(1))


def wait_for_ever_on_rank_0() -> None:
    if os.environ["RANK"] == "0":
        dist.recv(torch.ones(1), src=1)


def leave_a_collective_behind() -> None:
    if os.environ["RANK"] == "1":
        dist.all_reduce(torch.ones(2, dtype=torch.int64))


def test_each_rank_answers_for_itself(ranks: RankPools) -> None:
    assert ranks(2).run(sum_over_ranks, 4) == [8, 8]
    assert ranks(2).map(sum_over_ranks, [(1,), (2,)]) == [3, 3]
    first, second = ranks(2).raises(raise_on_rank_1)
    assert first is None
    assert isinstance(second, ValueError)


def test_processes_are_reused(ranks: RankPools) -> None:
    assert ranks(2).run(own_process) == ranks(2).run(own_process)


def test_a_function_that_no_rank_can_import_is_refused(ranks: RankPools) -> None:
    with pytest.raises(TypeError, match="top-level"):
        ranks(2).run(lambda: None)


def test_an_exception_arrives_with_its_rank_and_its_traceback(
    fresh_ranks: Callable[[int], RankPool],
) -> None:
    pool = fresh_ranks(2)
    pool.run(own_process)  # this file is imported
    pool.grace = 1.0  # nobody else is about to fail
    with pytest.raises(RanksFailed, match="in raise_on_rank_1") as failed:
        pool.run(raise_on_rank_1_while_rank_0_waits)
    assert list(failed.value.errors) == [1]
    assert "rank 0 hangs" in str(failed.value)
    assert "in raise_on_rank_1_while_rank_0_waits" in str(failed.value)
    assert pool.run(sum_over_ranks, 1) == [2, 2]


@pytest.mark.slow
def test_a_hang_ends_with_the_stack_of_who_hangs(fresh_ranks: Callable[[int], RankPool]) -> None:
    pool = fresh_ranks(2)
    pool.run(own_process)
    with pytest.raises(RanksFailed, match=r"rank 0 hangs.*\n(.*\n)*.*wait_for_ever_on_rank_0"):
        pool.run(wait_for_ever_on_rank_0, timeout=2)


@pytest.mark.slow
def test_a_death_is_reported_with_its_signal(fresh_ranks: Callable[[int], RankPool]) -> None:
    with pytest.raises(RanksFailed, match="rank 1 died with status -9"):
        fresh_ranks(2).run(die_on_rank_1, timeout=10)


@pytest.mark.slow
def test_a_collective_left_behind_is_found(fresh_ranks: Callable[[int], RankPool]) -> None:
    with pytest.raises(RanksFailed, match="out of step"):
        fresh_ranks(2).run(leave_a_collective_behind, timeout=10)
