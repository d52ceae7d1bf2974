"""Waits of the host for its device: each is watched, with its label."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from datetime import timedelta

import pytest
import torch
from ranks import RankPools
from torch import Tensor

import npu
from hadal import comm
from hadal.comm import watchdog
from hadal.comm.collectives import Factors, start_all_reduce
from hadal.device import Event, read_on_host, start_reading, synchronize

SUM = Factors(1.0, 1.0)


def _read_later(values: Tensor) -> Tensor:
    reading = start_reading(values, "the norm of the last update")
    values.zero_()  # is not seen
    found = reading.values()
    assert reading.is_over
    return found


def _copied(values: Tensor) -> Tensor:
    found = torch.empty(4, pin_memory=True)
    found.copy_(values, non_blocking=True)
    event = torch.accelerator.current_stream().record_event()
    Event(event, values.device).wait_on_host("a copy")
    return found


def _all_awaited(values: Tensor) -> Tensor:
    synchronize(values.device)
    return values.cpu()


WAYS: dict[str, Callable[[Tensor], Tensor]] = {
    "the norm": lambda values: read_on_host(values, "the norm"),
    "the norm of the last update": _read_later,
    "a copy": _copied,
    "all work queued on the device": _all_awaited,
}


def _told_of_waits() -> list[str]:
    """Rank 1 joins each sum only after rank 0's log reports that it waits for the values."""
    ranks = comm.Ranks.world()
    store = torch.distributed.distributed_c10d._get_default_store()
    lines: list[str] = []

    def tell(record: logging.LogRecord) -> None:
        lines.append(record.getMessage())
        if "rank 1 has begun" in lines[-1]:
            store.set(f"told {name}", "")

    handler = logging.Handler()
    handler.emit = tell  # type: ignore[method-assign]
    log = logging.getLogger("hadal.comm.watchdog")
    before = watchdog._watchdog
    watchdog._watchdog = watchdog.Watchdog(0.4)  # a rank has half of it to answer
    if comm.get_rank() == 0:
        log.addHandler(handler)
    comm.barrier()  # the first wait of each starts its watchdog
    try:
        with npu.asynchronous():
            for name, read in WAYS.items():
                values = torch.ones(4, device="npu")
                if comm.get_rank() == 1:
                    store.wait([f"told {name}"], timedelta(seconds=60))
                start_all_reduce(values, ranks, torch.float32, f"the sum for {name}", SUM).wait()
                assert (read(values) == 2).all()
    finally:
        log.removeHandler(handler)
        watchdog._watchdog.stop()
        watchdog._watchdog = before
    return lines


@pytest.mark.slow
def test_the_host_reports_its_waits(npus: RankPools) -> None:
    npus(2).close()  # ranks that have a watchdog of their own would answer beside this one
    waiting, _ = npus(2).run(_told_of_waits)
    npus(2).close()
    for name in WAYS:
        behind = f"s for {name} behind the sum for {name}: another rank has not joined"
        assert any(behind in line for line in waiting), (name, waiting)
        missing = (
            rf"rank 0: the sum for {name} is collective \d+ of its group: rank 1 has begun \d+ "
        )
        assert any(re.match(missing, line) for line in waiting), (name, waiting)
