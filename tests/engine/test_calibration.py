"""`hadal.engine.calibration`: the measurement of a machine, and the fit of its speeds."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
from ranks import RankPools

from hadal.engine.calibration import (
    CalibrationSizes,
    Shape,
    _fitted,
    _Measurement,
    measure_cluster,
)
from hadal.engine.clusters import read_cluster

TINY = CalibrationSizes(
    [Shape(16, 32, 1, 8), Shape(32, 32, 1, 16, is_composed=True)],
    [(4, 2, 32)],
    [(2, 16)],
    (64, 4096),
    0.01,
)


WORK = [(10**6, 10**3, 10**4), (10**8, 10**6, 10**4), (10**7, 10**3, 10**6), (10**9, 10**6, 9)]


def test_speeds_are_recovered_from_times() -> None:
    speeds = (1e11, 1e10, 2e10)
    rest = [sum(one / speed for one, speed in zip(work, speeds, strict=True)) for work in WORK]
    for starts in (0.0, 1e-4):
        found = _fitted(WORK, rest, [seconds + starts for seconds in rest])
        assert [1 / seconds for seconds in found] == pytest.approx(speeds)


def test_what_takes_no_time_has_no_negative_speed() -> None:
    rest = [work[0] / 1e11 + work[2] / 2e10 for work in WORK]
    found = _fitted(WORK, rest, rest)
    assert [1 / seconds for seconds in found[::2]] == pytest.approx((1e11, 2e10), rel=1e-3)
    assert 0 < found[1] < 1e-13


def measured(sizes: CalibrationSizes) -> Any:
    return json.loads(measure_cluster("here", None, sizes))


def test_ranks_measure_the_machine_together(ranks: RankPools, tmp_path: Path) -> None:
    first, second = ranks(2).run(measured, TINY)
    assert first["speeds"]["fp32"] == second["speeds"]["fp32"]
    file = tmp_path / "cluster.json"
    file.write_text(json.dumps(first))
    found = read_cluster(file)
    assert (found.name, found.devices_per_node, found.computes_on_host) == ("here", 2, True)
    assert set(found.speeds) == {"fp32", "bf16"}
    assert found.links_of("bf16").all_gather.latency > 0
    assert found.sources["speeds"].startswith("measured: 20")
    assert found.sources["disk_read"].startswith("assumed")


def calls() -> int:
    called: list[int] = []
    measurement = _Measurement(TINY._replace(seconds=0.1))

    def act() -> None:
        called.append(0)
        time.sleep(0.01 * measurement._ranks.rank)

    measurement._times(act)
    return len(called)


def test_a_slow_rank_makes_as_many_calls_as_the_others(ranks: RankPools) -> None:
    first, second = ranks(2).run(calls)
    assert first == second > 4
