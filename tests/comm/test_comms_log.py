"""The log of collectives: every byte of them, how long they took, and who came last."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, strategies as st
from pace import holds_at_some_pace
from ranks import RankPools, on_ranks
from torch import nn

import hadal
from hadal.comm import Ranks, collectives, comms_log, functions
from hadal.comm.collectives import Factors
from hadal.comm.comms_log import CommsLog, Key, LogChoice, Row, bus_bandwidth, bus_factor
from hadal.comm.rows import RowWire, start_rows_reduce_scatter
from hadal.comm.summary import key_of, log_summary, lost, shown_ranks, table_of
from hadal.config import load_config
from hadal.config.monitors import OPERATIONS
from hadal.errors import ConfigError, UsageError

from .traffic import by_collectives, counted


@contextmanager
def logged(**choice: Any) -> Iterator[CommsLog]:
    """A log of its own."""
    comms_log.reset_log()
    comms_log.start_log(**choice)
    try:
        yield comms_log.comms_log
    finally:
        comms_log.stop_log()
        comms_log.comms_log.choice = LogChoice()


def told(log: CommsLog) -> list[tuple[str, int, int]]:
    """(operation, bytes of a message, calls) of each row."""
    return [(row.operation, row.nbytes, row.count) for row in log.rows()]


# ---- arithmetic ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("operation", "ranks", "factor"),
    [
        ("all_reduce", 4, 1.5),
        ("all_gather", 4, 0.75),
        ("reduce_scatter", 2, 0.5),
        ("all_to_all", 8, 0.875),
        ("gather", 4, 0.75),
        ("scatter", 4, 0.75),
        ("broadcast", 4, 1.0),
        ("reduce", 2, 1.0),
        ("send", 2, 1.0),
        ("barrier", 4, 0.0),
        ("all_reduce", 1, 0.0),
    ],
)
def test_the_factors_are_those_of_nccl_tests(operation: str, ranks: int, factor: float) -> None:
    assert bus_factor(operation, ranks) == factor
    assert bus_bandwidth(operation, 1000, 0.5, ranks) == 2000 * factor
    assert bus_bandwidth(operation, 1000, 0.0, ranks) == 0.0


KEY = Key("all_reduce", 8, "float32", (0, 2), "")


@given(
    st.lists(st.tuples(st.floats(0, 9), st.floats(0, 9)), min_size=1, max_size=20),
)
def test_who_comes_last_loses_nothing(calls: list[tuple[float, float]]) -> None:
    first, second = (tuple(column) for column in zip(*calls, strict=True))
    everybody = [{KEY: (len(calls), first)}, {}, {KEY: (len(calls), second)}]
    found = lost(KEY, everybody)
    assert found is not None and set(found) == {0, 2}
    assert found[0] == pytest.approx(sum(max(a - b, 0) for a, b in calls), abs=1e-9)
    assert found[2] == pytest.approx(sum(max(b - a, 0) for a, b in calls), abs=1e-9)


def test_calls_that_cannot_be_matched_tell_no_straggler() -> None:
    assert lost(KEY, [{KEY: (2, (1.0, 1.0))}, {}, {KEY: (3, (1.0, 1.0, 1.0))}]) is None
    assert lost(KEY, [{KEY: (2, (1.0, 1.0))}, {}, {}]) is None


def test_the_table_shows_the_available_features() -> None:
    from rich.console import Console

    def row(operation: str, ranks: tuple[int, ...], **more: Any) -> Row:
        figures = {"count": 2, "total_nbytes": 8192, "sent_nbytes": 4096, "seconds": 0.004}
        rest = {"least_s": 0.001, "most_s": 0.003, "latencies_s": (0.001, 0.003), **more}
        return Row(operation, 4096, "bfloat16", ranks, "", **figures, **rest)

    def shown(rows: list[Row], show_straggler: bool) -> str:
        console = Console(width=150)
        with console.capture() as capture:
            console.print(table_of(rows, show_straggler))
        return capture.get()

    one = row("all_reduce", (0, 1), lost_s={0: 0.0, 1: 0.002})
    text = shown([one], True)
    line = next(line for line in text.splitlines() if "all_reduce" in line)
    assert line.split() == [
        *("all_reduce", "4", "KiB", "bfloat16", "2", "4", "KiB", "4.00", "2.000"),
        *("0.002", "0.002", "rank", "0:", "1.000", "ms"),
    ]
    assert "ranks" not in text and "called" not in text
    both = shown([one, row("all_gather", tuple(range(0, 64, 8)))], False)
    assert "0 to 56 by 8" in both and "straggler" not in both
    assert one.algorithm_bandwidth == 8192 / 0.004
    assert one.bus_bandwidth == 8192 / 0.004
    assert shown_ranks((0, 1, 2, 3, 9)) == "5 ranks"


# ---- what is recorded ----------------------------------------------------------------------------


def test_kinds_that_do_not_exist_are_refused() -> None:
    with pytest.raises(UsageError, match=r"all_gathr.*expected some of \['all_reduce'"):
        comms_log.start_log(prof_all=False, prof_ops=["all_gathr"])
    assert not comms_log.is_logging()


def test_a_log_that_is_off_records_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    hadal.init_distributed()
    comms_log.reset_log()
    functions.all_reduce(torch.ones(2))
    assert comms_log.comms_log.rows() == []
    assert log_summary() == []
    assert "it is off" in capsys.readouterr().out


def every_function() -> list[tuple[str, int, int]]:
    rank, size = dist.get_rank(), dist.get_world_size()
    other = 1 - rank
    one, many = torch.ones(4), [torch.ones(4) for _ in range(size)]
    whole = torch.ones(4 * size)
    with logged() as log:
        functions.all_reduce(one)
        functions.all_reduce(one, async_op=True).wait()
        functions.inference_all_reduce(one)
        functions.all_gather(many, one)
        functions.all_gather_into_tensor(whole, one)
        functions.reduce_scatter(one, many)
        functions.reduce_scatter_tensor(one, whole)
        functions.reduce_scatter_tensor(one, whole, async_op=True).wait()
        functions.all_to_all_single(whole, whole.clone())
        functions.broadcast(one, 0)
        functions.broadcast(one, group_src=1)
        functions.reduce(one, 1)
        functions.gather(one, many if rank == 0 else None, 0)
        functions.scatter(one, many if rank == 0 else None, 0)
        if rank == 0:
            functions.send(one, 1)
        else:
            assert functions.recv(one, 0) == 0
        sent, received = functions.isend(one, other), functions.irecv(torch.empty(4), other)
        sent.wait()
        received.wait()
        batch = [
            functions.P2POp(functions.isend, one, other),
            functions.P2POp(functions.irecv, torch.empty(4), other),
        ]
        for work in functions.batch_isend_irecv(batch):
            work.wait()
        functions.barrier()
        functions.monitored_barrier()
        functions.all_reduce_coalesced([torch.ones(3), torch.ones(1)])
        functions.all_gather_coalesced(
            [torch.empty(2 * size), torch.empty(2 * size)], [one[:2]] * 2
        )
        return sorted(told(log))


def test_every_function_is_counted(ranks: RankPools) -> None:
    expected = {
        ("all_reduce", 16): 4,
        ("all_gather", 32): 3,
        ("reduce_scatter", 32): 3,
        ("all_to_all", 32): 1,
        ("broadcast", 16): 2,
        ("reduce", 16): 1,
        ("gather", 32): 1,
        ("scatter", 32): 1,
        ("send", 16): 3,
        ("recv", 16): 2,
        ("barrier", 0): 2,
    }
    first, second = ranks(2).run(every_function)
    assert {row[:2]: row[2] for row in first} == expected
    assert {row[:2]: row[2] for row in second} == {**expected, ("send", 16): 2, ("recv", 16): 3}


def objects() -> list[tuple[str, int, int]]:
    rank = dist.get_rank()
    with logged() as log:
        found: list[Any] = [None, None]
        functions.all_gather_object(found, "a" * (10 + 100 * rank))
        functions.gather_object("b" * 30, [None, None] if rank == 0 else None, 0)
        values: list[Any] = ["c" * 50] if rank == 0 else [None]
        functions.broadcast_object_list(values, 0)
        mine: list[Any] = [None]
        functions.scatter_object_list(mine, ["d" * 70, "d" * 70] if rank == 0 else None, 0)
        assert (len(found[1]), values, mine) == (110, ["c" * 50], ["d" * 70])
        return told(log)


def test_objects_are_counted_as_pickled(ranks: RankPools) -> None:
    import pickle

    def nbytes(letters: int) -> int:
        return len(pickle.dumps("x" * letters))

    expected = [
        ("all_gather", 2 * nbytes(110), 1),
        ("broadcast", nbytes(50), 1),
        ("gather", 2 * nbytes(30), 1),
        ("scatter", 2 * nbytes(70), 1),
    ]
    assert ranks(2).run(objects) == [expected, expected]


@pytest.mark.parametrize("way", ["gather", "pieces", "reduce", "everywhere", "exchange", "rows"])
@pytest.mark.parametrize("size", [2, 3])
@on_ranks("size")
def test_every_byte_between_neighbours_is_counted(way: str) -> None:
    """The bytes that the log records as sent equal those of the raw calls."""
    ranks = Ranks.world()
    full, out = torch.randn(8 * ranks.size), torch.empty(8)
    half, mean = torch.bfloat16, Factors.of_mean(ranks.size)
    parts = [torch.randn(3 + number) for number in range(ranks.size)]
    found = [torch.empty(3 + ranks.rank) for _ in range(ranks.size)]
    rows = torch.zeros(4 * ranks.size, 6)
    rows[1::4] = 1.0  # one for each rank
    wire = RowWire(torch.float32, mean, 6)
    starts = {
        "gather": lambda: collectives.start_all_gather(full, ranks, "x"),
        "pieces": lambda: collectives.start_gather_in_pieces(full, ranks, "x", 2 * ranks.size),
        "reduce": lambda: collectives.start_reduce_scatter(full, out, ranks, half, False, "x"),
        "everywhere": lambda: collectives.start_all_reduce(full, ranks, half, "x"),
        "exchange": lambda: collectives.start_exchange(parts, found, ranks, "x"),
        "rows": lambda: start_rows_reduce_scatter(
            rows.view(-1), torch.empty(24), ranks, wire, False, "x"
        ),
    }
    with counted() as traffic, logged() as log:
        starts[way]().wait()
        sent = sum(row.sent_nbytes for row in log.rows())
        # Counts of rows are no values, which the other way of counting leaves out.
        counts = 8 * (ranks.size - 1) if way == "rows" else 0
        assert sent - counts == traffic.nbytes > 0, (way, log.rows())


def messages() -> dict[str, list[tuple[str, int, int]]]:
    ranks = Ranks.world()
    full, out = torch.randn(16), torch.empty(8)
    found = {}

    def note(name: str) -> None:
        with logged() as log:
            collectives.start_all_gather(full, ranks, "x").wait()
            collectives.start_reduce_scatter(full, out, ranks, torch.bfloat16, False, "x").wait()
            collectives.sum_(torch.ones(3), ranks, "x")
            collectives.broadcast_(torch.ones(5), 1, ranks, "x")
            collectives.start_exchange([full[:8]] * 2, [out, out.clone()], ranks, "x").wait()
        found[name] = told(log)

    note("pairs")
    with by_collectives():
        note("collectives")
    return found


def test_pairs_and_collectives_count_the_same_messages(ranks: RankPools) -> None:
    for found in ranks(2).run(messages):
        assert found["pairs"] == found["collectives"]
        assert found["pairs"] == [
            ("all_reduce", 12, 1),
            ("all_gather", 64, 1),
            ("reduce_scatter", 32, 1),
            ("all_to_all", 64, 1),
            ("broadcast", 20, 1),
        ]


# ---- how long ------------------------------------------------------------------------------------


def gather_under_work(hold_s: float) -> tuple[float, float]:
    """Start a long gather, work, and wait; return how long the start and the gather took."""
    ranks = Ranks.world()
    full = torch.ones(ranks.size << 16)
    with logged() as log:
        dist.barrier()
        before = time.perf_counter()
        pending = collectives.start_all_gather(full, ranks, "x")
        started = time.perf_counter() - before
        time.sleep(hold_s)
        pending.wait()
        (row,) = log.rows()
        return started, row.seconds


def ends_before_the_wait(
    ranks: RankPools, work: Callable[[float], tuple[float, float]], hold_s: float
) -> bool:
    """To the wait it were `hold_s`, or more."""
    found = ranks(2).run(work, hold_s)
    assert all(seconds > 0 for _, seconds in found)
    return all(max(started, seconds) < 0.8 * hold_s for started, seconds in found)


def test_a_collective_is_timed_to_its_end_and_not_to_the_wait(ranks: RankPools) -> None:
    assert holds_at_some_pace(partial(ends_before_the_wait, ranks, gather_under_work), 0.3)


def all_reduce_under_work(hold_s: float) -> tuple[float, float]:
    tensor = torch.ones(1 << 16)
    with logged() as log:
        dist.barrier()
        before = time.perf_counter()
        work = functions.all_reduce(tensor, async_op=True)
        started = time.perf_counter() - before
        time.sleep(hold_s)
        work.wait()
        (row,) = log.rows()
        return started, row.seconds


def test_torchs_future_tells_the_end_of_gloos_collectives(ranks: RankPools) -> None:
    assert holds_at_some_pace(partial(ends_before_the_wait, ranks, all_reduce_under_work), 0.3)


def unequal(late_s: float) -> dict[str, Any]:
    """Rank 1 comes late to every call."""
    ranks = Ranks.world()
    with logged() as log:
        for _ in range(4):
            if ranks.rank == 1:
                time.sleep(late_s)
            functions.all_reduce(torch.ones(1000))
        (row,) = log_summary(show_straggler=True)
        assert [one.operation for one in log.rows()] == ["all_reduce"]  # the summary is not in it
    return {"straggler": row.straggler, "lost": row.lost_s, "key": key_of(row)}


def test_the_straggler_is_the_same_on_all_ranks(ranks: RankPools) -> None:
    def is_rank_1(late_s: float) -> bool:
        found = ranks(3).run(unequal, late_s)
        assert found[0]["lost"] == found[1]["lost"] == found[2]["lost"]
        assert found[0]["key"] == ("all_reduce", 4000, "float32", (0, 1, 2), "")
        assert len({one["straggler"] for one in found}) == 1
        others, its = (found[0]["lost"][0], found[0]["lost"][2]), found[0]["lost"][1]
        return found[0]["straggler"] == 1 and its < 1.5 * late_s < 2.5 * late_s < min(others)

    assert holds_at_some_pace(is_rank_1, 0.1)


class Later:
    """A work whose end a test decides."""

    def __init__(self) -> None:
        self.event = threading.Event()


def test_a_record_ends_with_its_last_work_and_once() -> None:
    log = CommsLog()
    record = log.open("all_gather", torch.ones(4), None, "")
    assert record is not None
    first, second = record.parts(2)
    first()
    first()
    assert not record.is_over and log.rows() == []
    second()
    end = record.ended
    second()
    assert record.ended is end
    assert told(log) == [("all_gather", 16, 1)]


def test_an_endless_wait_blocks_nothing() -> None:
    log = CommsLog()
    stuck = log.open("send", torch.ones(1), None, "")
    assert stuck is not None
    stuck.parts(1)
    for _ in range(200):
        record = log.open("recv", torch.ones(1), None, "")
        assert record is not None
        record.end()
    assert len(log._open) < 200
    assert told(log) == [("recv", 4, 200)]
    failed = log.open("recv", torch.ones(1), None, "")
    assert failed is not None
    failed.give_up()
    assert told(log) == [("recv", 4, 200)]
    log.reset()
    assert log.rows() == []


def test_calls_of_one_key_are_taken_in_their_order() -> None:
    """Ranks match them by it."""
    log = CommsLog()
    records = [log.open("send", torch.ones(1), None, "") for _ in range(3)]
    records[1].end()
    assert log.rows() == []
    time.sleep(0.05)
    records[0].end()
    records[2].end()
    (row,) = log.rows()
    assert row.latencies_s[0] > row.latencies_s[1] and row.count == 3


# ---- choices -------------------------------------------------------------------------------------


def test_a_separate_choice_is_recorded() -> None:
    log = CommsLog()
    log.choice = LogChoice(prof_all=False, prof_ops=("all_gather",))
    assert [name for name in OPERATIONS if log.open(name, torch.ones(1), None, "")] == [
        "all_gather"
    ]
    assert LogChoice(prof_all=True, prof_ops=("all_gather",)).wants("send")
    assert not LogChoice(prof_all=False).wants("send")


def test_calls_from_different_places_are_distinguished() -> None:
    hadal.init_distributed()
    with logged(debug=True) as log:
        for _ in range(2):
            functions.all_reduce(torch.ones(2))
        functions.all_reduce(torch.ones(2))
        functions.labelled("the norm", functions.all_reduce, torch.ones(2))
        sites = sorted((row.site, row.count) for row in log.rows())
    assert [count for _, count in sites] == [2, 1, 1]
    name = "test_calls_from_different_places_are_distinguished"
    assert all(
        site.startswith("test_comms_log.py:") and site.endswith(name) for site, _ in sites[:2]
    )
    assert sites[2][0] == "the norm"


def test_start_stop_and_reset() -> None:
    hadal.init_distributed()
    with logged() as log:
        functions.all_reduce(torch.ones(2))
        hadal.comm.stop_log()
        functions.all_reduce(torch.ones(2))
        assert told(log) == [("all_reduce", 8, 1)]
        hadal.comm.start_log()
        functions.all_reduce(torch.ones(2))
        assert told(log) == [("all_reduce", 8, 2)]
        hadal.comm.reset_log()
        assert hadal.comm.log_summary() == []


def test_each_collective_may_be_a_line_of_the_log(caplog: pytest.LogCaptureFixture) -> None:
    hadal.init_distributed()
    with caplog.at_level(logging.INFO, "hadal.comm.comms_log"), logged(verbose=True) as log:
        functions.all_reduce(torch.ones(2))
        log.rows()
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith("all_reduce of 8 bytes (float32) among 1 ranks: ")


# ---- from the configuration ----------------------------------------------------------------------


def train(section: dict[str, Any], stage: int) -> dict[str, Any]:
    comms_log.reset_log()
    model = nn.Sequential(*(nn.Linear(32, 32) for _ in range(3)))
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.1}},
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        **({"comms_logger": section} if section else {}),
    }
    engine, *_ = hadal.initialize(model=model, model_parameters=model.parameters(), config=config)
    comms_log.reset_log()
    try:
        with counted() as traffic:
            loss = engine(torch.ones(2, 32, dtype=torch.bfloat16)).float().square().mean()
            engine.backward(loss)
            engine.step()
        rows = log_summary()
        values = [row for row in rows if row.nbytes > 4 * 64]
        return {
            "is_on": comms_log.is_logging(),
            "rows": told(comms_log.comms_log),
            "sites": {row.site for row in values},
            "sent": sum(row.sent_nbytes for row in values),
            "traffic": traffic.nbytes,
            "loss": loss.item(),
        }
    finally:
        comms_log.stop_log()
        comms_log.comms_log.choice = LogChoice()
        engine.destroy()


@pytest.mark.slow_cells("2")
@pytest.mark.claims("comms_logger", "comms_logger.enabled", "comms_logger.debug")
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_an_engine_logs_all_that_it_sends(ranks: RankPools, stage: int) -> None:
    found = ranks(2).run(train, {"enabled": True, "debug": True}, stage)
    off = ranks(2).run(train, {"enabled": False}, stage)
    for one, other in zip(found, off, strict=True):
        assert one["is_on"] and one["sent"] == one["traffic"] >= 3 * 32 * 33 * 2
        assert one["loss"] == other["loss"]
        assert not other["is_on"] and other["rows"] == []
        assert other["traffic"] == one["traffic"]
    name = "the gather of" if stage == 3 else "the reduction of"
    assert any(site.startswith(name) for site in found[0]["sites"]), found[0]["sites"]


@pytest.mark.claims("comms_logger.prof_all", "comms_logger.prof_ops")
def test_an_engine_logs_the_kinds_that_are_named(ranks: RankPools) -> None:
    section = {"enabled": True, "prof_all": False, "prof_ops": ["all_gather"]}
    for one in ranks(2).run(train, section, 3):
        assert {operation for operation, *_ in one["rows"]} == {"all_gather"}


def lines(section: dict[str, Any]) -> list[str]:
    heard: list[str] = []

    class Ear(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            heard.append(record.getMessage())

    log, ear = logging.getLogger("hadal.comm.comms_log"), Ear(logging.INFO)
    log.addHandler(ear)
    level = log.level
    log.setLevel(logging.INFO)
    try:
        train(section, 3)
    finally:
        log.removeHandler(ear)
        log.setLevel(level)
    return heard


@pytest.mark.claims("comms_logger.verbose")
def test_an_engine_tells_each_collective(ranks: RankPools) -> None:
    heard = ranks(2).run(lines, {"enabled": True, "verbose": True})[0]
    assert any(line.startswith("all_gather of ") for line in heard)
    assert ranks(2).run(lines, {"enabled": True})[0] == []


def test_a_function_maps_to_its_kind() -> None:
    named = LogChoice(prof_all=False, prof_ops=("all_gather_into_tensor", "isend"))
    assert named.prof_ops == ("all_gather", "send")
    section = {"enabled": True, "prof_all": False, "prof_ops": ["reduce_scatter_tensor"]}
    config = load_config({"train_batch_size": 1, "comms_logger": section})
    assert config.comms_logger.prof_ops == ["reduce_scatter"]
    with pytest.raises(ConfigError, match=r"comms_logger.prof_ops .*\"all_gathr\""):
        load_config({"train_batch_size": 1, "comms_logger": {**section, "prof_ops": ["all_gathr"]}})
