"""Processes that share one device train like those with a device each (see `tests/staged.py`)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from cases import rarely
from ranks import RankPools

import npu

from . import features, runs


class Case(NamedTuple):
    world: int
    build: Callable[[], tuple[Any, features.Update]]


CASES = {
    **{f"stage {stage}": Case(2, partial(features.keys, stage)) for stage in range(4)},
    **{f"stage {stage} of three": Case(3, partial(features.keys, stage)) for stage in range(4)},
    "fp16": Case(2, partial(features.keys, 3, "fp16")),
    "optimizer on the host": Case(
        2, partial(features.keys, 2, zero={"offload_optimizer": features.HOST})
    ),
    "all on the host": Case(2, partial(features.keys, 3, zero=features.ALL_ON_HOST)),
    "all on the host of three": Case(3, partial(features.keys, 3, zero=features.ALL_ON_HOST)),
    "experts": Case(2, partial(features.experts, ep_size=2, k=2)),
    "pipeline": Case(2, partial(features.in_stages, "1f1b", 1)),
    "interleaved pipeline": Case(2, partial(features.in_stages, "interleaved", 2)),
}
OFTEN = ("stage 1", "stage 3 of three", "all on the host", "experts", "interleaved pipeline")


def _trained(name: str, sleep: float) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses and weights; `sleep`: seconds that each copy of `staged` is late."""
    with npu.with_float64(), npu.asynchronous(), npu.slow(sleep):
        engine, update = CASES[name].build()
        losses = [float(one) for one in [update() for _ in range(2)]]
        weights = runs.weights(engine)
        engine.destroy()
    return losses, weights


@pytest.mark.parametrize("name", [name if name in OFTEN else rarely(name) for name in CASES])
def test_trains_as_with_a_device_each(name: str, npus: RankPools, sharing_npus: RankPools) -> None:
    world = CASES[name].world
    at_once = npus(world).run(_trained, name, 0.0)
    for sleep in (0.0, 0.002):
        found = sharing_npus(world).run(_trained, name, sleep)
        for (losses, weights), (wanted, others) in zip(found, at_once, strict=True):
            assert losses == wanted
            assert all(weights[name].equal(others[name]) for name in others)
