"""Programs whose ranks differ, and backwards whose gathers are announced, on the device."""

from __future__ import annotations

from typing import Any

import pytest
from cases import every
from engine.toys import engine_of
from ranks import RankPools
from zero.test_gathering import CUT, DROPS, blocks, inputs_of
from zero.test_programs import Micro, random_updates, train_as_plain_torch

import npu
from hadal import comm

# The first rank is ahead of the others with its gradients, or behind them.
AHEAD = [[[Micro((4, 0)), *[Micro((0, 1, 2, 3, 4))] * 2]]] * 3
BEHIND = [[[Micro((0, 1, 2, 3, 4, 1)), *[Micro((2, 4))] * 2]]] * 3


def _late(*given: Any) -> None:
    with npu.asynchronous():
        train_as_plain_torch(*given)


@pytest.mark.slow
@every(seed=[0, 1, 3], settings=[{}, DROPS])
def test_ranks_may_differ(seed: int, settings: dict[str, Any], npus: RankPools) -> None:
    world = 2 + seed % 2
    meets = bool(settings)
    npus(world).run(_late, random_updates(seed, world), 3, settings, meets)


def _held_behind_a_plan() -> list[tuple[int, set[str]]]:
    """For each backward: the peak of full gradient buffers, and the place of late gradients."""
    model = blocks()
    engine = engine_of(3, model, zero_optimization={**CUT, **DROPS})
    all_gradients = engine._parts.runtime.gradients
    found: list[tuple[int, set[str]]] = []
    held: list[int] = []

    def count(_: Any) -> None:
        held.append(sum(one.full is not None for one in all_gradients))

    def read_the_first() -> None:
        """Backward begins with what its plan has last."""
        model.blocks[0].weight.sum()

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(count)
    with npu.asynchronous():
        for step in range(6):
            held.clear()
            loss = engine(inputs_of(step).to(engine.device)).square().mean()
            if step == 4 and comm.get_rank() == 1:
                model.look = read_the_first
            engine.backward(loss)
            model.look = lambda: None
            late = {late.device.type for one in all_gradients for late in one._late.values()}
            found.append((max(held), late))
            engine.step()
    engine.destroy()
    return found


def test_late_gradients_wait_on_the_host(npus: RankPools) -> None:
    for rank, found in enumerate(npus(2).run(_held_behind_a_plan)):
        assert [most for most, _ in found] == [found[0][0]] * 6
        assert [places for _, places in found] == [set()] * 4 + [{"cpu"} if rank else set(), set()]


@pytest.mark.slow
@pytest.mark.parametrize(
    "updates", [AHEAD, BEHIND, random_updates(1, 3)], ids=["ahead", "behind", "any"]
)
def test_a_collective_may_hold_up_the_host_where_it_begins(updates: Any, npus: RankPools) -> None:
    """Blocks until all ranks have arrived, like a communicator's first collectives."""
    npus(3).run(train_as_plain_torch, updates, 3, DROPS, timeout=60)
