"""The size of blocks, and that it changes no bit."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from hadal.offload.direct import cut
from hadal.offload.tensors import UNIT_NUMEL
from hadal.optim import norm, workspace
from hadal.optim.elementwise import begin_adam

CPU = torch.device("cpu")
NUMEL = (1 << 20) + 3


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def test_blocks_grow_with_the_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for threads in (1, 2, 3, 4, 16, 96):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        found.append(workspace.block_numel(CPU))
    assert found == [1 << 19, 1 << 21, 1 << 21, 1 << 22, 1 << 22, 1 << 22]
    assert all(numel % UNIT_NUMEL == 0 for numel in found)  # parts on a disk are whole blocks


def stepped(threads: int) -> list[Tensor]:
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    values, first, second = torch.rand(3, NUMEL)
    gradient, weights = torch.rand(NUMEL).bfloat16(), torch.empty(NUMEL, dtype=torch.bfloat16)
    group = {"lr": 0.1, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.1}
    group |= {"amsgrad": False, "maximize": False}
    state = {"exp_avg": first, "exp_avg_sq": second, "step": torch.tensor(3.0)}
    update = begin_adam(group, state, lambda: torch.zeros(0), decoupled=True)
    place = workspace.Workspace(0.3)
    for start, stop in cut(0, NUMEL, workspace.block_numel(CPU)):
        owned = [one[start:stop] for one in (values, first, second)]
        place.apply([workspace.Item(update, gradient[start:stop], owned)])
        weights[start:stop].copy_(values[start:stop])
    return [values, first, second, weights]


def test_threads_and_their_blocks_change_no_bit() -> None:
    alone = stepped(1)
    for threads in (2, 3):
        assert all(map(torch.equal, stepped(threads), alone))


@pytest.mark.parametrize(("multiplier", "divides"), [(1.0, False), (0.5, True)])
def test_gradients_that_are_not_scaled_are_not_rewritten(
    multiplier: float, divides: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kernel with a divisor writes the quotients back."""
    scales = []
    kernel = torch._fused_adamw_
    monkeypatch.setattr(
        torch, "_fused_adamw_", lambda *a, **k: scales.append(k["grad_scale"]) or kernel(*a, **k)
    )
    group = {"lr": 0.1, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.1}
    values, gradient = torch.ones(64), torch.ones(64)
    update = begin_adam(
        {**group, "amsgrad": False, "maximize": False}, {}, lambda: torch.zeros(64), decoupled=True
    )
    workspace.Workspace(multiplier).apply(
        [workspace.Item(update, gradient, [values, *update.state])]
    )
    assert [scale is not None for scale in scales] == [divides]
    assert bool((gradient == multiplier).all())


def test_norms_of_rows_are_the_same_with_any_threads() -> None:
    values = torch.rand(NUMEL, generator=torch.Generator().manual_seed(0)).bfloat16()
    found = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        rows = torch.cat(list(norm._norms(values)))
        found.append(rows[rows > 0])  # blocks without a rest give zeros
    assert all(torch.equal(one, found[0]) for one in found)
