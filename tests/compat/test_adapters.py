"""peft's adapters and trl's trainers train here with the losses of plain torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from clients import load
from ranks import RankPool


def _both(folder: Path, kind: str, config: str) -> tuple[dict[str, Any], dict[str, Any]]:
    run = getattr(load("adapter_runs"), kind)
    return run(folder / "plain", None), run(folder / "found", getattr(load("trainer_runs"), config))


@pytest.mark.slow
@pytest.mark.runs("transformers", "accelerate", "peft")
@pytest.mark.parametrize("config", ["STAGE_2", "STAGE_3"])
def test_adapters_train_alone(clients: RankPool, tmp_path: Path, config: str) -> None:
    for plain, found in clients.run(_both, tmp_path, "lora", config, timeout=180):
        assert found["losses"] == pytest.approx(plain["losses"], abs=1e-5)
        assert found["evaluation"] == pytest.approx(plain["evaluation"], abs=1e-5)
        assert found["reloaded"] == pytest.approx(found["evaluation"], abs=1e-5)


@pytest.mark.slow
@pytest.mark.runs("transformers", "accelerate", "trl", "datasets")
@pytest.mark.parametrize("kind", ["sft", "grpo"])
@pytest.mark.parametrize("config", ["STAGE_2", "STAGE_3"])
def test_trl_trains(clients: RankPool, tmp_path: Path, kind: str, config: str) -> None:
    for plain, found in clients.run(_both, tmp_path, kind, config, timeout=300):
        assert plain["loss"]
        assert found["loss"] == pytest.approx(plain["loss"], abs=1e-5)
        assert found["grad_norm"] == pytest.approx(plain["grad_norm"], abs=1e-4)
