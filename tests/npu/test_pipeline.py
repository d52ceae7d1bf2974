"""Stages on a device whose communicators run all calls in their order, as NCCL's do."""

from __future__ import annotations

import pytest
from engine.test_pipeline import SCHEDULES, batches, engine_of, module_of
from ranks import RankPools

import npu


def losses(stages: int, schedule: str, chunks: int) -> list[float]:
    keys = {
        "pipeline": {"schedule": schedule},
        "zero_optimization": {"stage": 1},
        "gradient_accumulation_steps": 2 * stages,
    }
    engine = engine_of(stages, keys, module_of(stages, chunks=chunks))
    data = batches(0, 1)
    found = [float(engine.train_batch(data)) for _ in range(2)]
    engine.destroy()
    return found


def losses_late(stages: int, schedule: str, chunks: int) -> list[float]:
    with npu.asynchronous():
        return losses(stages, schedule, chunks)


CASES = [(2, *one) for one in SCHEDULES] + [(3, "1f1b", 1), (3, "interleaved", 2)]


@pytest.mark.parametrize(("stages", "schedule", "chunks"), CASES)
def test_schedules_as_on_cpus(
    stages: int, schedule: str, chunks: int, npus: RankPools, ranks: RankPools
) -> None:
    wanted = ranks(stages).run(losses, stages, schedule, chunks)
    assert npus(stages).run(losses_late, stages, schedule, chunks) == wanted
