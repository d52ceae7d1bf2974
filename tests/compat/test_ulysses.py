"""Accelerate's and the Trainer's sequence parallelism: the numbers of one process."""

from __future__ import annotations

import contextlib
import itertools
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


@pytest.mark.fast_cells("1")
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_accelerate_splits_sequences(clients: RankPool, stage: int) -> None:
    for found, plain in clients.run(_run, stage, timeout=180):
        assert found["losses"] == pytest.approx(plain["losses"], rel=1e-5)
        assert found["norms"] == pytest.approx(plain["norms"], rel=2e-5)


@pytest.mark.fast_cells("2")
@pytest.mark.parametrize("stage", [2, 3])
def test_the_trainer_splits_sequences(clients: RankPool, stage: int, tmp_path: Path) -> None:
    for found, plain in clients.run(_train, tmp_path, stage, timeout=180):
        pairs = zip(plain["losses"][::2], plain["losses"][1::2], strict=True)
        means = [sum(pair) / 2 for pair in pairs]
        assert found["losses"] == pytest.approx(means, rel=1e-5)
        assert found["norms"] == pytest.approx(plain["norms"], rel=2e-5)


def _weighed(
    kind: str, folder: Path, shared: int, accumulation: int, power: int | None
) -> tuple[dict[str, Any], dict[str, Any]]:
    u = load("ulysses_runs")
    return getattr(u, kind)(folder, shared, accumulation, power), u.weighed(accumulation)


def _agree(found: dict[str, Any], plain: dict[str, Any], power: int | None) -> None:
    assert found["losses"] == pytest.approx(plain["losses"], rel=5e-3 if power else 1e-5)
    assert found["norms"] == pytest.approx(plain["norms"], rel=2e-2 if power else 2e-5)
    assert max(plain["norms"]) > 0.5  # so that clipping acts


def test_the_trainer_may_weigh_by_targets(clients: RankPool, tmp_path: Path) -> None:
    for found, plain in clients.run(_weighed, "train_weighed", tmp_path, 2, 2, None, timeout=180):
        _agree(found, plain, None)


# Not two sequences at a time: over gloo, torch's differentiable all_gather needs groups that begin
# with rank 0.
@pytest.mark.slow
@pytest.mark.parametrize("shared", [1, 2, 4])
@pytest.mark.parametrize(
    "kind",
    [
        "train_weighed",
        pytest.param("train_with_trl", marks=pytest.mark.runs("trl", "datasets")),
    ],
)
def test_the_table_of_factors(kind: str, shared: int, tmp_path: Path) -> None:
    with contextlib.closing(RankPool(shared)) as pool:
        for accumulation, power in itertools.product((1, 2, 4), (None, 10)):
            factors = (shared, accumulation, power)
            for found, plain in pool.run(_weighed, kind, tmp_path, *factors, timeout=180):
                _agree(found, plain, power)


@pytest.mark.slow
@pytest.mark.runs("trl", "datasets")
def test_trl_averages_micro_batches_unless_it_weighs_them(
    clients: RankPool, tmp_path: Path
) -> None:
    for found, plain in clients.run(_averaged, tmp_path, timeout=180):
        pairs = zip(plain["losses"][::2], plain["losses"][1::2], strict=True)
        assert found["losses"] == pytest.approx([sum(pair) / 2 for pair in pairs], rel=1e-5)


def _averaged(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    u = load("ulysses_runs")
    return u.train_with_trl(folder, 2, 2, None, weighs=False), u.plain()
