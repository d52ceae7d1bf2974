"""Eigenvalues of blocks on a device whose work is late."""

from __future__ import annotations

import pytest
import torch
from compression.test_curvature import configured, inputs
from compression.test_eigenvalues import engine_of
from ranks import RankPools

import npu


def _values() -> list[float]:
    engine = engine_of(configured(tol=1e-6), stage=3)
    torch.manual_seed(0)
    engine.backward(engine(inputs().to(engine.device)))
    engine.step()
    found = list(engine.eigenvalues.values)
    engine.destroy()
    return found


def _late_values() -> list[float]:
    with npu.asynchronous():
        return _values()


@pytest.mark.slow
def test_eigenvalues_are_those_of_the_host(npus: RankPools) -> None:
    for found in npus(2).run(_late_values):
        assert found == pytest.approx(_values(), rel=1e-4)
