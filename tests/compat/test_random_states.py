"""Named random states, as Megatron's programs use them around dropout."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from hadal.compat import checkpointing
from hadal.errors import UsageError
from hadal.plugins.activation_checkpointing.function import (
    CudaRNGStatesTracker,
    get_cuda_rng_tracker,
)


class _Third:
    """This rank holds the third part of a model."""

    def get_tensor_model_parallel_rank(self) -> int:
        return 2


def _drawn(seed: int) -> Tensor:
    torch.manual_seed(seed)
    return torch.rand(3)


def test_parts_draw_differently_inside_a_fork_and_equally_outside() -> None:
    expected = _drawn(7), _drawn(7 + 2718 + 2)
    checkpointing.configure(_Third())
    try:
        checkpointing.model_parallel_cuda_manual_seed(7)
        with get_cuda_rng_tracker().fork():
            inside = torch.rand(3)
        assert torch.equal(torch.rand(3), expected[0])
        assert torch.equal(inside, expected[1])
    finally:
        checkpointing._state.mpu = None
        get_cuda_rng_tracker().reset()


def test_a_recomputation_draws_the_same_again() -> None:
    checkpointing.model_parallel_cuda_manual_seed(3)
    dropout = nn.Dropout(0.5)
    seen: list[Tensor] = []

    def layer(x: Tensor) -> Tensor:
        with get_cuda_rng_tracker().fork():
            y: Tensor = dropout(x)
        seen.append(y.detach())
        return y * y

    try:
        x = torch.ones(64, requires_grad=True)
        y = checkpointing.checkpoint(layer, x)
        with get_cuda_rng_tracker().fork():
            other = dropout(torch.ones(64))
        states = get_cuda_rng_tracker().get_states()
        y.sum().backward()
        assert torch.equal(seen[0], seen[1])
        assert not torch.equal(seen[0], other)
        after = get_cuda_rng_tracker().get_states()
        assert all(torch.equal(after[name], states[name]) for name in states)
        assert torch.equal(x.grad, 2 * seen[0] * 2 * (seen[0] > 0))
    finally:
        get_cuda_rng_tracker().reset()


def test_states_are_distinguished_by_name_and_seed() -> None:
    tracker = CudaRNGStatesTracker()
    with pytest.raises(UsageError, match="no such random state"), tracker.fork("mine"):
        pass
    before = torch.get_rng_state()
    tracker.add("mine", 5)
    assert torch.equal(torch.get_rng_state(), before)
    for name, seed in (("mine", 6), ("other", 5)):
        with pytest.raises(UsageError, match="already used by"):
            tracker.add(name, seed)
    kept = tracker.get_states()
    with tracker.fork("mine"):
        drawn = torch.rand(1)
    assert torch.equal(drawn, _drawn(5)[:1])
    tracker.set_states(kept)
    with tracker.fork("mine"):
        assert torch.equal(torch.rand(1), drawn)
    tracker.reset()
    assert tracker.get_states() == {}
