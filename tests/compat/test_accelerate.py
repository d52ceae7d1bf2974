"""A training loop written for Accelerate's DeepSpeedPlugin runs here as it is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from clients import load
from ranks import RankPool

pytestmark = pytest.mark.runs("accelerate")


def _run(folder: Path, stage: int, precision: str) -> tuple[dict[str, Any], dict[str, Any]]:
    a = load("accelerate_runs")
    return a.run(folder, stage, precision), a.plain()


def _run_bf16(folder: Path, stage: int) -> tuple[dict[str, Any], dict[str, Any]]:
    a = load("accelerate_runs")
    return a.run(folder, stage, "bf16"), a.plain_as_deepspeed(stage)


def _run_configured() -> dict[str, Any]:
    return load("accelerate_runs").run_configured()


def _run_alone(is_driven: bool) -> str:
    told: str = load("accelerate_runs").run_alone(is_driven)
    return told


def test_a_program_in_which_accelerate_counts_one_process_is_refused(clients: RankPool) -> None:
    for told in clients.run(_run_alone, True):
        assert told.startswith("refused: accelerate counts 1 process, expected 2 ranks"), told
        assert "use_cpu=True" in told
        assert "PartialState(cpu=True)" in told
    first, second = clients.run(_run_alone, False)
    assert first.startswith("accelerate counts 1 process, expected 2 ranks"), first
    assert not second, "one warning is enough"


@pytest.mark.slow
@pytest.mark.parametrize("stage", range(4))
def test_it_trains_saves_and_resumes(clients: RankPool, tmp_path: Path, stage: int) -> None:
    for rank, (found, plain) in enumerate(clients.run(_run, tmp_path, stage, "no", timeout=180)):
        assert found["engine"] == "DeepSpeedEngine"
        assert found["is_unwrapped"]
        assert found["config"]
        assert found["was_skipped"] is False
        assert found["steps"] == len(plain["norms"]) == 6
        assert found["losses"] == pytest.approx(plain["losses"], abs=2e-6)
        assert found["norms"] == pytest.approx(plain["norms"], abs=1e-5)
        assert max(plain["norms"]) > 1.0  # so that clipping acts
        if rank == 0 or stage < 3:
            assert found["weights"].keys() == plain["weights"].keys()
            for name, value in plain["weights"].items():
                torch.testing.assert_close(found["weights"][name], value, atol=2e-6, rtol=0)
        else:
            assert found["weights"] is None
        assert {"latest", "pytorch_model"} <= set(found["files"])
        assert found["again"] == found["after"]
        assert found["gathered"] == [0.0, 1.0]


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_bf16_is_rounded_where_deepspeed_rounds(
    clients: RankPool, tmp_path: Path, stage: int
) -> None:
    for found, plain in clients.run(_run_bf16, tmp_path, stage, timeout=180):
        assert found["losses"] == pytest.approx(plain["losses"], abs=1e-6)
        assert found["norms"] == pytest.approx(plain["norms"], abs=1e-5)
        assert found["again"] == found["after"]


def test_fp16_skips_updates_that_overflow(clients: RankPool, tmp_path: Path) -> None:
    for found, plain in clients.run(_run, tmp_path, 2, "fp16", timeout=180):
        norms = found["norms"]
        assert norms[0] == pytest.approx(plain["norms"][0], rel=1e-3)
        assert float("inf") in norms  # the scale begins at 2^16
        assert norms[2] < 2.0  # and goes on after a skipped update
        assert found["steps"] == 6
        assert found["losses"][0] == pytest.approx(plain["losses"][0], abs=1e-2)


def test_the_configuration_brings_optimizer_and_schedule(clients: RankPool) -> None:
    for found in clients.run(_run_configured, timeout=120):
        assert found["schedule"] == "WarmupDecayLR"
        assert max(found["rates"]) == pytest.approx(1e-2)
        # Ten updates of decay, of which the last comes after these.
        assert found["rates"][-1] == pytest.approx(1e-3)
