"""Loaders, timers and streams of a program's own, on the device."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from engine.test_calibration import TINY, measured
from ranks import RankPools
from torch.nn import functional as F

import hadal
import npu
from hadal.compat.timers import SynchronizedWallClockTimer

from . import runs
from .test_training import same


class _Tokens(torch.utils.data.Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(index)
        return torch.randint(runs.TOKENS, (runs.LENGTH + 1,), generator=generator)


def _loaded(late: bool) -> dict[str, Any]:
    torch.manual_seed(5)
    model = runs.Model()
    engine, _, loader, _ = hadal.initialize(
        model=model,
        model_parameters=model.parameters(),
        training_data=_Tokens(),
        config=runs.config(2, "bf16"),
    )
    told: dict[str, Any] = {"losses": [], "norms": [], "device": engine.device.type}
    if late:
        assert loader.pin_memory
        with npu.asynchronous():
            _train(engine, loader, told)
    else:
        _train(engine, loader, told)
    told["weights"] = runs.weights(engine)
    engine.destroy()
    return told


def _train(engine: Any, loader: Any, told: dict[str, Any]) -> None:
    for batch in loader:
        assert batch.is_pinned() == (engine.device.type == "npu")
        tokens = batch.to(engine.device, non_blocking=True)
        outputs = engine(tokens[:, :-1])
        loss = F.cross_entropy(outputs.float().flatten(0, 1), tokens[:, 1:].flatten())
        engine.backward(loss)
        engine.step()
        told["losses"].append(loss.item())


def test_batches_come_by_pinned_memory(npus: RankPools, ranks: RankPools) -> None:
    same(npus(2).run(_loaded, True), ranks(2).run(_loaded, False))


def _in_a_stream_of_its_own() -> dict[str, Any]:
    """A program may train in another stream than the default one."""
    side = torch.Stream("npu")
    with npu.asynchronous(), side:
        return runs.trained(runs.config(3, "bf16", {"offload_optimizer": {"device": "cpu"}}))


def test_a_program_trains_in_a_stream_of_its_own(npus: RankPools, ranks: RankPools) -> None:
    config = runs.config(3, "bf16", {"offload_optimizer": {"device": "cpu"}})
    same(npus(2).run(_in_a_stream_of_its_own), ranks(2).run(runs.trained, config))


def _timed() -> float:
    timers = SynchronizedWallClockTimer()
    timer = timers("a name")
    timer.start()
    torch.ones(3, device="npu").add_(1)
    time.sleep(0.02)
    timer.stop()
    return float(timer.elapsed())


def test_timers(npus: RankPools) -> None:
    assert npus(1).run(_timed)[0] >= 20.0  # milliseconds


@pytest.mark.slow
def test_ranks_measure_their_devices(npus: RankPools) -> None:
    first, second = npus(2).run(measured, TINY._replace(convolutions=()))  # it has no kernel
    assert first == second
    assert (first["devices_per_node"], first["computes_on_host"]) == (2, False)
    assert set(first["speeds"]) == set(first["inside"]) == {"fp32", "bf16", "fp16"}
    assert first["sources"]["host_link"].startswith("measured") and first["host_link"] > 0
