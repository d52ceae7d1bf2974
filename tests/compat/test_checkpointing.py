"""`deepspeed.checkpointing`: options, outputs and random states as DeepSpeed has them."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from ranks import on_ranks
from torch import Tensor, nn

from hadal import comm
from hadal.compat import checkpointing
from hadal.compat.checkpointing import CheckpointFunction, checkpoint, configure
from hadal.errors import ConfigError, UsageError
from hadal.plugins.activation_checkpointing.function import get_cuda_rng_tracker

BATCH = {"train_micro_batch_size_per_gpu": 1}
# Three draws each, as DeepSpeed 0.19 makes them with seed 1234.
DEFAULT = [[0.028979, 0.401899, 0.259844], [0.366641, 0.058301, 0.700645]]
FORKED = {
    0: [[0.474900, 0.522508, 0.520116], [0.656026, 0.488764, 0.038073]],
    1: [[0.264341, 0.370171, 0.933508], [0.404740, 0.555388, 0.069228]],
}


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    """No options, as in a new process."""
    before, checkpointing._state = checkpointing._state, checkpointing._State()
    yield
    checkpointing._state = before
    get_cuda_rng_tracker().reset()


class Part:
    """This rank holds a part of a model."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def get_model_parallel_rank(self) -> int:
        return self.rank


def options() -> Any:
    return checkpointing._state.recomputation.options


@pytest.mark.parametrize("part", [0, 1])
def test_draws_are_deepspeeds(part: int) -> None:
    configure(Part(part))
    checkpointing.model_parallel_cuda_manual_seed(1234)
    tracker = get_cuda_rng_tracker()
    assert tracker.seeds_ == {1234 + 2718 + part} and list(tracker.states_) == [
        "model-parallel-rng"
    ]
    for default, forked in zip(DEFAULT, FORKED[part], strict=True):
        assert torch.rand(3).tolist() == pytest.approx(default, abs=1e-6)
        with tracker.fork():
            assert torch.rand(3).tolist() == pytest.approx(forked, abs=1e-6)


def test_one_state_can_be_seeded_alone() -> None:
    configure(Part(1))
    checkpointing.model_parallel_cuda_manual_seed(5)
    tracker = get_cuda_rng_tracker()
    tracker.add("data", 7)
    before, data = torch.get_rng_state(), tracker.states_["data"]
    checkpointing.model_parallel_reconfigure_tp_seed(1234)
    assert torch.equal(torch.get_rng_state(), before) and tracker.states_["data"] is data
    with tracker.fork():
        assert torch.rand(3).tolist() == pytest.approx(FORKED[1][0], abs=1e-6)


def test_arguments_win_over_the_section() -> None:
    section = {"partition_activations": True, "number_checkpoints": 4}
    config = {**BATCH, "activation_checkpointing": section}
    configure(None, config)
    assert (options().partition_activations, options().number_checkpoints) == (True, 4)
    configure(None, config, partition_activations=False)
    assert not options().partition_activations
    configure(None, checkpoint_in_cpu=True, synchronize=True, profile=True)
    assert not options().partition_activations and options().number_checkpoints is None
    assert options().cpu_checkpointing and options().profile
    assert options().synchronize_checkpoint_boundary
    checkpointing.set_num_layers(3)
    checkpointing.partition_activations_in_checkpoint(True)
    assert options().number_checkpoints == 3 and options().cpu_checkpointing
    with pytest.raises(ConfigError, match="partition_activation"):
        configure(None, {**BATCH, "activation_checkpointing": {"partition_activation": True}})


def test_buffers_need_their_number_and_slices() -> None:
    with pytest.raises(UsageError, match="needs partition_activations=True too"):
        configure(contiguous_checkpointing=True, num_checkpoints=2)
    with pytest.raises(UsageError, match="needs num_checkpoints="):
        configure(contiguous_checkpointing=True, partition_activations=True)
    assert not checkpointing.is_configured()


def test_a_single_rank_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "hadal"):
        configure(None, partition_activations=True)
    assert "partition_activations has no effect: one rank holds" in caplog.text
    assert checkpointing.is_configured()


def test_outputs_come_as_deepspeeds() -> None:
    x = torch.ones(3, requires_grad=True)
    assert type(checkpoint(lambda x: [x * 1, x * 2], x)) is tuple
    assert isinstance(checkpoint(lambda x: (x * 1,), x), Tensor)
    first, count, nothing = checkpoint(lambda x: (x * 2, 7, None), x)
    assert (count, nothing) == (7, None) and torch.equal(first, 2 * torch.ones(3))
    assert checkpoint(lambda x: x.argmax(), x).dtype == torch.int64
    assert checkpoint(lambda x, y: x * 2, x, None).sum() == 6
    outputs: list[Any] = []
    found = CheckpointFunction.apply(lambda x: (x * 2, 7), outputs, x)
    assert len(found) == 1 and outputs[1] == 7
    with pytest.raises(TypeError, match="unexpected keyword argument 's'"):
        checkpointing.non_reentrant_checkpoint(torch.sin, x, s=3)
    assert torch.equal(checkpointing.non_reentrant_checkpoint(torch.sin, x), x.sin())


def test_keywords_take_part() -> None:
    x, scale = torch.ones(3, requires_grad=True), torch.full((3,), 2.0, requires_grad=True)
    checkpoint(lambda x, *, scale, power: (x * scale) ** power, x, scale=scale, power=2)
    out = checkpoint(lambda x, *, scale, power: (x * scale) ** power, x, scale=scale, power=2)
    (slope,) = torch.autograd.grad(out.sum(), scale)
    assert torch.equal(slope, torch.full((3,), 4.0))
    with torch.no_grad():
        assert not checkpoint(torch.sin, x).requires_grad


class _Megatron:
    """The groups of two tensor-parallel ranks, as Megatron's `parallel_state` has them."""

    def get_tensor_model_parallel_group(self) -> Any:
        return torch.distributed.group.WORLD

    def get_tensor_model_parallel_rank(self) -> int:
        return comm.get_rank()

    def get_tensor_model_parallel_world_size(self) -> int:
        return comm.get_world_size()


@on_ranks(2)
def test_megatrons_calls() -> None:
    """Its calls, in its order: sharded inputs in buffers, forks inside, arguments that are None."""
    checkpointing._state = checkpointing._State()
    arguments: dict[str, Any] = {"partition_activations": True, "contiguous_checkpointing": True}
    configure(_Megatron(), num_checkpoints=2, checkpoint_in_cpu=False, **arguments)
    checkpointing.model_parallel_cuda_manual_seed(1234)
    dropout, layer, nothing = nn.Dropout(0.5), nn.Linear(6, 6), [None] * 6

    def block(hidden: Tensor, mask: Tensor, *_: Any) -> tuple[Tensor, None]:
        with get_cuda_rng_tracker().fork():
            drawn = dropout(torch.ones(5, 6))  # differs between the ranks; their sum does not
        torch.distributed.all_reduce(drawn)
        return layer(hidden) * drawn * mask, None

    found = []
    for recomputes in (False, True):
        checkpointing.model_parallel_cuda_manual_seed(1234)
        torch.manual_seed(3)
        x = torch.randn(5, 6, requires_grad=True)
        hidden, mask = x * 1, torch.ones(5, 6) > 0
        for _ in range(2):
            run = checkpoint if recomputes else lambda block, *args: block(*args)
            checkpointing.reset()
            hidden, _ = run(block, hidden, mask, *nothing)
        hidden.sum().backward()
        found.append([x.grad, layer.weight.grad.clone(), *get_cuda_rng_tracker().states_.values()])
        layer.zero_grad()
    assert all(torch.equal(*pair) for pair in zip(*found, strict=True))
