"""Monitors on a device whose work is late: nothing waits for it, and nothing is lost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from ranks import RankPools

from hadal.plugins.monitor.files import read_lines

from . import runs


def written(folder: Path) -> list[dict[str, Any]]:
    lines = read_lines(folder / "job/events.jsonl")
    return [one for one in lines if one["kind"] == "update"]


def keys(folder: Path) -> dict[str, Any]:
    return {"jsonl_monitor": {"enabled": True, "output_path": str(folder), "job_name": "job"}}


@pytest.mark.fast_cells("3")
@pytest.mark.parametrize("stage", range(4))
def test_an_update_waits_for_nothing(stage: int, npus: RankPools, tmp_path: Path) -> None:
    config = runs.config(stage, "bf16", wall_clock_breakdown=True, **keys(tmp_path))
    for found in npus(2).run(runs.waited, config):
        assert [one for waits in found.values() for one in waits] == []
    updates = written(tmp_path)
    assert [one["step"] for one in updates] == [1, 2, 3, 4]
    for one in updates:
        assert 0 < one["Train/Samples/train_loss"] < 10
        assert one["Train/Samples/grad_norm"] > 0
        assert one["Train/Samples/elapsed_time_ms_step"] >= 0


def test_the_same_is_written_as_on_cpus(npus: RankPools, ranks: RankPools, tmp_path: Path) -> None:
    found = []
    for name, pools in (("npu", npus), ("cpu", ranks)):
        config = runs.config(2, **keys(tmp_path / name))
        pools(2).run(runs.wherever, config)
        found.append(written(tmp_path / name))
    names = {f"Train/Samples/{name}" for name in ("train_loss", "lr", "grad_norm")}
    assert [one["samples"] for one in found[0]] == [one["samples"] for one in found[1]]
    for late, there in zip(*found, strict=True):
        assert late.keys() == there.keys()
        for name in names:
            assert late[name] == pytest.approx(there[name], rel=1e-5)
