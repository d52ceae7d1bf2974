"""The Hugging Face Trainer saves at a signal, on all ranks, and resumes from there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from clients import load
from ranks import RankPool

from hadal.errors import EXIT_PREEMPTED

pytestmark = pytest.mark.runs("transformers", "accelerate")


def _run(folder: Path) -> dict[str, Any]:
    t = load("trainer_runs")
    found: dict[str, Any] = t.run_preempted(folder, t.STAGE_2)
    return found


@pytest.mark.slow
def test_it_saves_its_own_checkpoint_and_resumes(clients: RankPool, tmp_path: Path) -> None:
    for found in clients.run(_run, tmp_path, timeout=180):
        assert found["code"] == EXIT_PREEMPTED
        assert 2 <= found["step"] < 40
        assert (tmp_path / "run" / f"checkpoint-{found['step']}" / "trainer_state.json").exists()
        assert len(found["resumed"]) == 3
        assert found["resumed"] == found["whole"]
