"""Lightning's DeepSpeedStrategy trains here with the losses of its own data parallel strategy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from clients import load
from ranks import RankPool

pytestmark = pytest.mark.runs("lightning")


def _run(folder: Path, stage: int | None) -> dict[str, Any]:
    told: dict[str, Any] = load("lightning_runs").run(folder, stage)
    return told


@pytest.mark.fast_cells("3")
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_it_fits_saves_resumes_and_validates(clients: RankPool, tmp_path: Path, stage: int) -> None:
    plain = clients.run(_run, tmp_path, None, timeout=180)
    for found, expected in zip(clients.run(_run, tmp_path, stage), plain, strict=True):
        assert len(expected["losses"]) == 4
        assert found["losses"] == pytest.approx(expected["losses"], abs=1e-5)
        assert found["value"] == pytest.approx(expected["value"], abs=1e-5)
        assert found["resumed"] == found["second"]
        assert found["validated"] == found["second value"]
        if found["rank"] == 0:
            assert found["of one file"] == pytest.approx(found["value"], abs=1e-5)


def _run_fabric(folder: Path, stage: int | None, precision: str = "32-true") -> dict[str, Any]:
    told: dict[str, Any] = load("lightning_runs").run_fabric(folder, stage, precision)
    return told


@pytest.mark.fast_cells("3")
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_fabric_trains_saves_and_resumes(clients: RankPool, tmp_path: Path, stage: int) -> None:
    plain = clients.run(_run_fabric, tmp_path, None, timeout=180)
    for found, expected in zip(
        clients.run(_run_fabric, tmp_path, stage, timeout=180), plain, strict=True
    ):
        assert found["losses"] == pytest.approx(expected["losses"], abs=1e-5)
        assert found["step"] == 3
        assert found["again"] == found["losses"][3:]
    for found, expected in zip(
        clients.run(_run_fabric, tmp_path / "16", stage, "bf16-true", timeout=180),
        plain,
        strict=True,
    ):
        assert found["losses"] == pytest.approx(expected["losses"], rel=0.1)
        assert found["again"] == found["losses"][3:]


def _run_manual(stage: int) -> tuple[list[float], list[float]]:
    found: tuple[list[float], list[float]] = load("lightning_runs").run_manual(stage)
    return found


@pytest.mark.parametrize("stage", [2, 3])
def test_a_task_may_step_by_itself(clients: RankPool, stage: int) -> None:
    for losses, expected in clients.run(_run_manual, stage, timeout=120):
        assert len(losses) == 4
        assert losses == pytest.approx(expected, abs=1e-6)
