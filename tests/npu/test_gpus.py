"""Two processes on one device train as two on CPUs: on a GPU, and as slow tests on this device."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import rarely
from ranks import RankPools

from hadal.device import current_device

from . import runs
from .test_features import losses, losses_late

HOST = {"device": "cpu"}
UNITS = {"modules": "units"}
# How far losses may be apart: matrix products add in another order on a GPU.
LIMITS = {"fp32": 1e-4, "bf16": 5e-3, "fp16": 2e-3}


@pytest.fixture(params=[rarely("npu"), pytest.param("cuda", marks=pytest.mark.gpu)])
def devices(request: pytest.FixtureRequest) -> RankPools:
    """`devices(world_size).run(function, *args)` on the device at hand."""
    pools: RankPools = request.getfixturevalue({"npu": "npus", "cuda": "gpus"}[request.param])
    return pools


def assert_close(found: list[Any], wanted: list[Any], precision: str) -> None:
    for one, other in zip(found, wanted, strict=True):
        assert one["device"] != "cpu" and other["device"] == "cpu"
        assert one["losses"] == pytest.approx(other["losses"], rel=LIMITS[precision])
        assert max(one["losses"]) - min(one["losses"]) > 2 * LIMITS[precision] * min(one["losses"])


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("stage", range(4))
def test_stages_and_precisions(
    stage: int, precision: str, devices: RankPools, ranks: RankPools
) -> None:
    config = runs.config(stage, precision)
    found, wanted = (pools(2).run(runs.wherever, config) for pools in (devices, ranks))
    assert_close(found, wanted, precision)


@pytest.mark.parametrize(
    ("stage", "zero", "more"),
    [
        (1, {"offload_optimizer": HOST}, {}),
        (3, {"offload_optimizer": HOST, "offload_param": HOST}, {}),
        (3, {"offload_optimizer": {**HOST, "ratio": 0.5}}, {}),
        (2, {"offload_optimizer": {"device": "nvme"}}, {}),
        (3, {"offload_optimizer": {"device": "nvme"}, "offload_param": {"device": "nvme"}}, {}),
        (2, {}, {"activation_checkpointing": UNITS}),
        (3, {}, {"activation_checkpointing": {**UNITS, "cpu_checkpointing": True}}),
    ],
)
def test_tiers_and_recomputation(
    stage: int,
    zero: dict[str, Any],
    more: dict[str, Any],
    devices: RankPools,
    ranks: RankPools,
    tmp_path: Path,
) -> None:
    placed = {
        name: {**one, "nvme_path": str(tmp_path)} if one["device"] == "nvme" else one
        for name, one in zero.items()
    }
    config = runs.config(stage, "bf16", placed, **more)
    found, wanted = (pools(2).run(runs.wherever, config) for pools in (devices, ranks))
    assert_close(found, wanted, "bf16")


def compiled(stage: int) -> dict[str, Any]:
    engine = runs.built(runs.config(stage))
    engine.compile(backend="inductor" if engine.device.type == "cuda" else "eager")
    with warnings.catch_warnings():
        # The compiler looks at the gradient of every tensor that it meets.
        warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor that is not")
        told = runs.advanced(engine, 3)
    told["device"] = engine.device.type
    engine.destroy()
    torch._dynamo.reset()
    return told


@pytest.mark.parametrize("stage", [0, 3])
def test_a_compiled_engine(stage: int, devices: RankPools, ranks: RankPools) -> None:
    wanted = ranks(2).run(runs.wherever, runs.config(stage))
    assert_close(devices(2).run(compiled, stage), wanted, "fp32")


def resumed(stage: int, is_async: bool, folder: str) -> None:
    config = runs.config(stage, "bf16", checkpoint={"async_save": is_async})
    engine = runs.built(config)
    runs.advanced(engine, 2)
    engine.save_checkpoint(folder)
    wanted = runs.advanced(engine, 2, first=7)["losses"]
    engine.destroy()
    again = runs.built(config)
    again.load_checkpoint(folder)
    assert runs.advanced(again, 2, first=7)["losses"] == pytest.approx(wanted, rel=1e-5)
    fresh = runs.built(config)
    assert runs.advanced(fresh, 2, first=7)["losses"] != pytest.approx(wanted, rel=1e-5)
    for one in (again, fresh):
        one.destroy()


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("stage", [1, 3])
def test_a_checkpoint(stage: int, is_async: bool, devices: RankPools, tmp_path: Path) -> None:
    devices(2).run(resumed, stage, is_async, str(tmp_path))


def pipeline_losses(*case: Any) -> list[float]:
    return (losses_late if current_device().type == "npu" else losses)(*case)


@pytest.mark.parametrize(("schedule", "chunks"), [("1f1b", 1), ("interleaved", 2)])
def test_a_pipeline(schedule: str, chunks: int, devices: RankPools, ranks: RankPools) -> None:
    wanted = ranks(2).run(losses, 2, schedule, chunks)
    found = devices(2).run(pipeline_losses, 2, schedule, chunks)
    assert found == [pytest.approx(one, rel=1e-4) for one in wanted]
