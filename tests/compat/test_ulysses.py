"""Accelerate's and the Trainer's sequence parallelism: the numbers of one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from clients import load
from ranks import RankPool

pytestmark = pytest.mark.runs("transformers", "accelerate")


def _run(stage: int) -> tuple[dict[str, Any], dict[str, Any]]:
    u = load("ulysses_runs")
    return u.run(stage), u.plain()


def _train(folder: Path, stage: int) -> tuple[dict[str, Any], dict[str, Any]]:
    u = load("ulysses_runs")
    return u.train(folder, stage), u.plain()


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_accelerate_splits_sequences(clients: RankPool, stage: int) -> None:
    for found, plain in clients.run(_run, stage, timeout=180):
        assert found["losses"] == pytest.approx(plain["losses"], rel=1e-5)
        assert found["norms"] == pytest.approx(plain["norms"], rel=2e-5)


@pytest.mark.parametrize("stage", [2, 3])
def test_the_trainer_splits_sequences(clients: RankPool, stage: int, tmp_path: Path) -> None:
    for found, plain in clients.run(_train, tmp_path, stage, timeout=180):
        pairs = zip(plain["losses"][::2], plain["losses"][1::2], strict=True)
        means = [sum(pair) / 2 for pair in pairs]
        assert found["losses"] == pytest.approx(means, rel=1e-5)
        assert found["norms"] == pytest.approx(plain["norms"], rel=2e-5)
