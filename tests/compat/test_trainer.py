"""The Hugging Face Trainer trains here as it is: the losses, norms and weights of plain torch."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from clients import load
from ranks import RankPool

from hadal.errors import EXIT_PREEMPTED

pytestmark = pytest.mark.runs("transformers", "accelerate")

Run = Callable[..., list[dict[str, Any]]]


def _run(folder: Path, kind: str, config: str | None, more: dict[str, Any]) -> dict[str, Any]:
    t = load("trainer_runs")
    chosen = None if config is None else getattr(t, config)
    return t.run(folder, kind, chosen, **more)


def _first_losses(folder: Path, kind: str) -> list[tuple[float, float]]:
    losses: list[tuple[float, float]] = load("trainer_runs").first_losses(folder, kind)
    return losses


@pytest.fixture(scope="module")
def run(clients: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """`run(kind, config, **arguments)`: one run, which tests may look at together."""

    @cache
    def once(kind: str, config: str | None, *more: tuple[str, Any]) -> list[dict[str, Any]]:
        folder = tmp_path_factory.mktemp("trainer")
        return clients.run(_run, folder, kind, config, dict(more), timeout=180)

    return lambda kind, config, **more: once(kind, config, *sorted(more.items()))


def close(found: list[float], expected: list[float], tolerance: float) -> bool:
    return len(found) == len(expected) and all(
        abs(one - other) <= tolerance for one, other in zip(found, expected, strict=True)
    )


@pytest.mark.fast_cells("STAGE_3-gpt2")
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
@pytest.mark.parametrize("config", ["STAGE_2", "STAGE_3"])
def test_it_trains_as_without_deepspeed(run: Run, kind: str, config: str) -> None:
    plain = run(kind, None)
    for found, expected in zip(run(kind, config), plain, strict=True):
        assert found["engine"] == "DeepSpeedEngine"
        assert len(expected["losses"]) == 4
        assert max(expected["norms"]) > 0.5  # so that clipping acts
        assert close(found["losses"], expected["losses"], 1e-5)
        assert close(found["norms"], expected["norms"], 1e-4)
        # Under DeepSpeed the Trainer looks after the step: at the rate of the next one.
        assert found["rates"][:-1] == expected["rates"][1:]
        assert abs(found["evaluation"] - expected["evaluation"]) < 1e-5
        assert torch.equal(found["words"], expected["words"])
        for one, other in zip(found["weights"], expected["weights"], strict=True):
            torch.testing.assert_close(one, other, atol=1e-5, rtol=0)


@pytest.mark.fast_cells("STAGE_3")
@pytest.mark.parametrize("config", ["STAGE_2", "STAGE_3"])
def test_a_resumed_run_repeats_the_losses_bit_for_bit(run: Run, config: str) -> None:
    for found in run("llama", config):
        assert found["resumed"] == found["losses"][2:]


@pytest.mark.fast_cells("STAGE_3")
@pytest.mark.parametrize("config", ["STAGE_2", "STAGE_3"])
def test_saved_weights_are_the_trained_ones(run: Run, config: str) -> None:
    for found in run("llama", config):
        assert {"latest", "global_step2", "model.safetensors"} <= set(found["files"])
        for one, other in zip(found["saved"], found["weights"], strict=True):
            assert torch.equal(one, other)


def test_from_pretrained_loads_the_same_bits_sharded(run: Run) -> None:
    for found, expected in zip(run("llama", "STAGE_3"), run("llama", None), strict=True):
        assert found["ds"] == [True]
        assert expected["ds"] == [False]
        assert all(map(torch.equal, found["start"], expected["start"]))


@pytest.mark.fast_cells("llama")
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_the_first_loss_is_bit_equal_where_the_model_is_born_sharded(
    clients: RankPool, tmp_path: Path, kind: str
) -> None:
    for losses in clients.run(_first_losses, tmp_path, kind):
        for sharded, whole in losses:
            assert sharded == whole


@pytest.mark.slow
def test_bf16_trains_with_fp32_masters(run: Run) -> None:
    plain = run("llama", None)
    for found, expected in zip(run("llama", "STAGE_3", bf16=True), plain, strict=True):
        assert close(found["losses"], expected["losses"], 2e-2)
        assert found["losses"] != expected["losses"]
        assert found["resumed"] == found["losses"][2:]


def _best(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    t = load("trainer_runs")
    return t.best(folder / "plain", None), t.best(folder / "found", t.STAGE_3)


@pytest.mark.slow
def test_the_best_model_comes_back_and_is_evaluated_alone(
    clients: RankPool, tmp_path: Path
) -> None:
    for plain, found in clients.run(_best, tmp_path, timeout=180):
        looks = found["evaluations"]
        assert max(looks) > looks[-1]  # else there is nothing to go back to
        assert found["after"] == max(looks)
        assert found["alone"] == pytest.approx(found["after"], abs=1e-5)
        assert found["after"] == pytest.approx(plain["after"], abs=1e-4)
        assert found["predicted"] == plain["predicted"]


def _schedule_free(folder: Path, stages: list[int | None]) -> list[dict[str, list[float]]]:
    t = load("trainer_runs")
    return [t.schedule_free(folder / str(stage), stage) for stage in stages]


@pytest.mark.runs("schedulefree")
def test_schedule_free_training_evaluates_and_saves_the_averages(
    clients: RankPool, tmp_path: Path
) -> None:
    for plain, *found in clients.run(_schedule_free, tmp_path, [None, 0, 2], timeout=180):
        assert len(plain["evaluations"]) == 3
        for one in found:
            for key, expected in plain.items():
                assert close(one[key], expected, 1e-5), key


def _cut(folder: Path, stage: int | None) -> dict[str, Any]:
    t = load("trainer_runs")
    if stage is None:
        return t.cut(folder, None, batch=1)
    zero = {"stage": stage, "stage3_gather_16bit_weights_on_model_save": True}
    slices = {"tensor_parallel": {"autotp_size": 2}, "zero_optimization": zero}
    return t.cut(folder, {**t.STAGE_2, **slices}, batch=2)


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 2])
def test_a_model_that_is_cut_over_ranks_trains_identically(
    clients: RankPool, tmp_path: Path, stage: int
) -> None:
    # Two ranks with slices read one batch of two; two ranks with whole models one of one each.
    plain = clients.run(_cut, tmp_path / "plain", None, timeout=180)
    for found, expected in zip(
        clients.run(_cut, tmp_path / "cut", stage, timeout=180), plain, strict=True
    ):
        assert (found["width"], expected["width"]) == (8, 16)
        assert close(found["losses"], expected["losses"], 1e-5)
        assert close(found["norms"], expected["norms"], 1e-4)
        assert abs(found["evaluation"] - expected["evaluation"]) < 1e-5
        assert found["resumed"] == found["losses"][2:]
        for one, other in zip(found["saved"], expected["saved"], strict=True):
            torch.testing.assert_close(one, other, atol=1e-5, rtol=0)


# ---- a signal ------------------------------------------------------------------------------------


def _preempted(folder: Path) -> dict[str, Any]:
    t = load("trainer_runs")
    found: dict[str, Any] = t.run_preempted(folder, t.STAGE_2)
    return found


@pytest.mark.slow
def test_it_saves_its_own_checkpoint_and_resumes(clients: RankPool, tmp_path: Path) -> None:
    for found in clients.run(_preempted, tmp_path, timeout=180):
        assert found["code"] == EXIT_PREEMPTED
        assert 2 <= found["step"] < 40
        assert (tmp_path / "run" / f"checkpoint-{found['step']}" / "trainer_state.json").exists()
        assert len(found["resumed"]) == 3
        assert found["resumed"] == found["whole"]
