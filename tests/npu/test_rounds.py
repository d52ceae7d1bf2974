"""Steady rounds, and backwards whose gathers are announced, on the device."""

from __future__ import annotations

from typing import Any

import pytest
from ranks import RankPools
from zero.test_gathering import DROPS
from zero.test_rounds import Micro, random_updates, train_as_plain_torch

import npu

# The first rank is ahead of the others with its gradients, or behind them.
AHEAD = [[[Micro((4, 0)), *[Micro((0, 1, 2, 3, 4))] * 2]]] * 3
BEHIND = [[[Micro((0, 1, 2, 3, 4, 1)), *[Micro((2, 4))] * 2]]] * 3


def _late(*given: Any) -> list[bool]:
    with npu.asynchronous():
        return train_as_plain_torch(*given)


@pytest.mark.parametrize("settings", [{}, DROPS], ids=["default", "nothing kept"])
@pytest.mark.parametrize("seed", [0, 1, 3])
def test_steady_rounds_may_be_left(seed: int, settings: dict[str, Any], npus: RankPools) -> None:
    world = 2 + seed % 2
    for steady in npus(world).run(_late, random_updates(seed, world), 3, settings):
        assert any(steady)


@pytest.mark.parametrize(
    "updates", [AHEAD, BEHIND, random_updates(1, 3)], ids=["ahead", "behind", "any"]
)
def test_a_collective_may_hold_up_the_host_where_it_begins(updates: Any, npus: RankPools) -> None:
    """As a communicator's first ones do, until all ranks have come: here each of them does."""
    npus(3).run(train_as_plain_torch, updates, 3, DROPS, timeout=60)
