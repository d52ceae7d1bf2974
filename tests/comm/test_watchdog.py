"""A rank that waits too long reports the missing rank, the operation and the duration."""

from __future__ import annotations

import logging
import os
import re
import time
import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import Any
from unittest.mock import patch

import pytest
import torch
from pace import paces
from ranks import RankPool, RankPools
from torch import nn

import hadal
from hadal import comm
from hadal.comm import watchdog
from hadal.comm.collectives import broadcast_, sum_
from hadal.comm.local.pairs import exchange
from hadal.comm.pending import Pending
from hadal.comm.start import DEFAULT_WATCHDOG_S, watchdog_limit
from hadal.comm.watchdog import Wait, Watchdog
from hadal.comm.works import PairMessage
from hadal.errors import CommunicationError


class Arrives:
    def wait(self) -> None:
        pass


def test_a_wait_is_reported_ever_more_rarely() -> None:
    wait = Wait("the gather of blocks.1", [], 100.0)
    told = []
    for now in range(100, 200):
        if wait.is_due(now, 5.0):
            wait.describe(now)
            told.append(now - 100)
    assert told == [5, 10, 20, 40, 80]


def test_the_missing_rank_is_the_first_that_is_not_over() -> None:
    letters = [PairMessage(Arrives(), other) for other in (1, 1, 2, 2, 3)]
    for letter in letters[:3]:
        letter.wait()
    line = Wait("the gather of blocks.1", letters, 0.0).describe(7.0)
    assert "rank 0 has waited 7 s for the gather of blocks.1: rank 2 has not joined" in line
    assert "another rank has not joined" in Wait("a barrier", [], 0.0).describe(7.0)


def test_a_watchdog_that_is_off_does_nothing() -> None:
    watchdog = Watchdog(0.0)
    with watchdog.over("a barrier"):
        assert watchdog._stop is None
        assert not watchdog._waits


def test_a_wait_that_is_over_is_let_go_of() -> None:
    """Though it was looked at: its works hold the tensors that a collective fills."""
    watchdog, works = Watchdog(0.02), [Arrives()]
    seen = weakref.ref(works[0])
    with watchdog.over("a barrier", works):
        time.sleep(0.2)  # it is looked at, every 5 ms
        works = []
    patience = time.monotonic() + 10
    while seen() is not None and time.monotonic() < patience:
        time.sleep(0.01)
    assert seen() is None


def test_the_limit_is_a_number_of_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HADAL_WATCHDOG_S", raising=False)
    assert watchdog_limit() == DEFAULT_WATCHDOG_S
    for told, limit in (("0", 0.0), ("2.5", 2.5), ("", DEFAULT_WATCHDOG_S)):
        monkeypatch.setenv("HADAL_WATCHDOG_S", told)
        assert watchdog_limit() == limit
    for told in ("soon", "-1", "inf", "nan"):
        monkeypatch.setenv("HADAL_WATCHDOG_S", told)
        with pytest.raises(CommunicationError, match="HADAL_WATCHDOG_S"):
            watchdog_limit()


def missed_in_a_broadcast() -> list[str]:
    """The last rank arrives once another rank's log reports it as missing."""
    ranks, lines = comm.Ranks.world(), []
    store = torch.distributed.distributed_c10d._get_default_store()

    def tell(record: logging.LogRecord) -> None:
        lines.append(record.getMessage())
        if "has begun" in lines[-1]:
            store.set("told", "")

    handler = logging.Handler()
    handler.emit = tell  # type: ignore[method-assign]
    log = logging.getLogger("hadal.comm.watchdog")
    log.addHandler(handler)
    before, watchdog._watchdog = watchdog._watchdog, Watchdog(0.05)
    try:
        comm.barrier()
        values = torch.ones(3)
        if ranks.rank == 2:
            store.wait(["told"], timedelta(seconds=60))
        broadcast_(values, 0, ranks, "the broadcast of weights")
        sum_(torch.ones(5000), ranks, "a sum")
    finally:
        watchdog._watchdog.stop()
        watchdog._watchdog = before
        log.removeHandler(handler)
    return lines


def test_ranks_are_asked_who_is_missing_in_a_collective_of_all(ranks: RankPools) -> None:
    told = [line for lines in ranks(3).run(missed_in_a_broadcast) for line in lines]
    name = r"rank [01]: (the broadcast of weights|a sum) is collective \d+ of its group"
    asked = [line for line in told if re.match(name, line)]
    assert any("rank 2 has begun" in line for line in asked), told
    assert not any("rank 1 has begun" in line for line in asked), told


def waits_for_a_rank_in_a_collective() -> str:
    """Rank 0 waits for a message of rank 1, whose program calls a collective of its own."""
    ranks = comm.Ranks.world()
    before, watchdog._watchdog = watchdog._watchdog, Watchdog(0.05)
    told = ""
    try:
        comm.barrier()
        sum_(torch.ones(3), ranks, "a sum")  # both have a watchdog now
        if ranks.rank == 0:
            with patch("hadal.comm.local.pairs.collective_timeout_s", lambda: 3.0):
                coming = [(torch.ones(3), 1)]
                works = exchange("recv", torch.ones(3), [], coming, ranks, 98, "a test")
            with pytest.raises(CommunicationError) as caught:
                Pending("the gather of block 3", works).wait()
            told = str(caught.value)
        torch.distributed.all_reduce(torch.ones(1))
    finally:
        watchdog._watchdog.stop()
        watchdog._watchdog = before
    return told


def test_a_collective_of_the_program_is_named(ranks: RankPools) -> None:
    told, _ = ranks(2).run(waits_for_a_rank_in_a_collective)
    assert told.startswith("rank 0 waited in vain for rank 1 in the gather of block 3: timed out")
    place = r"s ago rank 1 was inside a collective of the program \(all_reduce, called at"
    assert re.search(rf"{place} test_watchdog\.py:\d+\)", told), told


def wait_for_a_sleeper(sleep_s: float) -> list[str]:
    """Rank 1 sleeps once before a gather that is announced, and once before one that is planned."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3)))
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "zero_optimization": {
            "stage": 3,
            "stage3_param_persistence_threshold": 0,
            "stage3_prefetch_bucket_size": 0,
        },
    }
    engine, _, _, _ = hadal.initialize(model=model, config=config)
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("hadal.comm.watchdog").addHandler(handler)
    for step in range(3):
        if os.environ["RANK"] == "1" and step != 1:
            model[0].register_forward_hook(lambda *_: time.sleep(sleep_s))
        engine.backward(engine(torch.ones(1, 8)).sum())
        engine.step()
        model[0]._forward_hooks = type(model[0]._forward_hooks)(
            list(model[0]._forward_hooks.items())[:1]
        )
    engine.destroy()
    return lines


@pytest.mark.slow
def test_a_waiting_rank_names_the_missing_rank_and_the_place(
    fresh_ranks: Callable[[int], RankPool], monkeypatch: pytest.MonkeyPatch
) -> None:
    for pace in paces(0.5):
        monkeypatch.setenv("HADAL_WATCHDOG_S", str(pace))
        waiting, sleeping = fresh_ranks(2).run(wait_for_a_sleeper, 3 * pace)
        if not sleeping:  # it has never waited so long
            break
    assert sleeping == []
    announced = "for the agreement to gather 1.0: rank 1 has not joined"
    planned = "for the gather of 1.0 (1.0.weight and 1 more): rank 1 has not joined"
    for told in (announced, planned):
        assert any(told in line for line in waiting), waiting
