"""`benchmarks/degrees.py`: its figures equal the bytes that ranks of a small model send."""

from __future__ import annotations

import importlib.util
import sys
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, strategies as st
from moe.models import EXPERTS, WIDTH, layer_of, tokens_of
from ranks import RankPools
from tensor_parallel.models import batch_of, model_of
from torch.utils.checkpoint import checkpoint

import hadal
from engine.test_pipeline import MICRO, batches, engine_of
from hadal.comm import adjoint
from hadal.plugins.moe import experts
from hadal.plugins.pipeline import wires

FILE = Path(__file__).parents[2] / "benchmarks/degrees.py"


def arithmetic() -> ModuleType:
    if "degrees" not in sys.modules:
        spec = importlib.util.spec_from_file_location("degrees", FILE)
        assert spec is not None and spec.loader is not None
        sys.modules["degrees"] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules["degrees"])
    return sys.modules["degrees"]


degrees = arithmetic()
powers = st.sampled_from((1, 2, 4, 8))


def test_the_models_have_their_sizes() -> None:
    assert degrees.DENSE.parameters == 70_553_706_496  # as published for Llama 3 70B
    assert 100e9 < degrees.EXPERTS.parameters < 106e9
    assert degrees.EXPERTS.active < 13e9


@given(powers, powers, powers, st.sampled_from((0, 1, 2, 3)))
def test_all_ranks_hold_every_state_at_least_once(
    data: int, tensor: int, pipeline: int, stage: int
) -> None:
    """And a higher ZeRO stage holds no more."""
    shape, job = degrees.DENSE, degrees.Job()
    layout = degrees.Layout(data, stage, tensor, pipeline)
    held = degrees.held_by(shape, layout, job)
    states = held.weights + held.gradients + held.optimizer
    assert states * layout.world >= 16 * shape.parameters * (1 - 1e-9)
    if (data, tensor, pipeline) == (1, 1, 1):
        assert states == pytest.approx(16 * shape.parameters)
    if stage:
        lower = degrees.held_by(shape, degrees.Layout(data, stage - 1, tensor, pipeline), job)
        assert states <= lower.weights + lower.gradients + lower.optimizer


@given(st.integers(1, 64), st.integers(1, 16), st.integers(1, 8))
def test_links_get_the_sent_bytes(size: int, stride: int, node: int) -> None:
    ranks = range(0, size * stride, stride)
    for wire in (degrees.ring(ranks, node, 1.0), degrees.exchange(ranks, node, 1.0)):
        assert sum(wire) == pytest.approx((size - 1) / size)
        assert min(wire) >= 0
        if ranks[-1] < node:
            assert wire.between == 0
        if stride >= node:
            assert wire.inside == pytest.approx(0)


def test_degrees_that_do_not_fit_are_faults() -> None:
    job = degrees.Job()
    for keys, told in (
        ({"pipeline": 3}, "layers"),
        ({"tensor": 3}, "key heads"),
        ({"data": 3}, "2048 sequences for 3 replicas"),
    ):
        layout = degrees.Layout(**{"data": 8, "stage": 1, **keys})
        with pytest.raises(ValueError, match=told):
            degrees.cost_of(degrees.DENSE, layout, job)
    layout = degrees.Layout(8, 1, experts=16)
    assert "replicas for expert ranks" in layout.fault(degrees.EXPERTS, job)


def sums(recomputes: bool) -> tuple[int, int]:
    """The all-reduces of activations in a micro-batch on two tensor-parallel ranks."""
    model = model_of("llama").train()
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "tensor_parallel": {"autotp_size": 2},
        "activation_checkpointing": {"modules": "units"} if recomputes else {},
    }
    engine = hadal.initialize(model=model, config=config)[0]
    batch = batch_of(0, 0, length=8)
    expected = (2, 8, model.config.hidden_size)
    seen: list[tuple[int, ...]] = []
    whole = adjoint.all_reduce

    def all_reduce(tensor: torch.Tensor, *args: Any, **rest: Any) -> Any:
        seen.append(tuple(tensor.shape))
        return whole(tensor, *args, **rest)

    with patch.object(adjoint, "all_reduce", all_reduce):
        engine.backward(engine(**batch).loss)
    return seen.count(expected), model.config.num_hidden_layers


def exchanges(recomputes: bool) -> list[int]:
    """The bytes that a rank sends in each exchange of tokens, for one layer of experts."""
    layer = layer_of(2)
    tokens = tokens_of(hadal.comm.get_rank()).requires_grad_()
    seen: list[int] = []
    whole = experts.all_to_all_single

    def exchanged(arrived: torch.Tensor, given: torch.Tensor, *rest: Any, **named: Any) -> Any:
        if given.is_floating_point():
            seen.append(given.nbytes)
        return whole(arrived, given, *rest, **named)

    with patch.object(experts, "all_to_all_single", exchanged):
        call = (lambda x: checkpoint(layer, x, use_reentrant=False)) if recomputes else layer
        call(tokens)[0].square().sum().backward()
    return seen


def messages() -> list[int]:
    """The bytes of values that a stage sends in an update."""
    engine = engine_of(2, {})
    seen: list[int] = []
    start = wires.start_send

    def start_send(tensor: torch.Tensor, *rest: Any) -> Any:
        if tensor.is_floating_point():
            seen.append(tensor.nbytes)
        return start(tensor, *rest)

    data = list(batches(0, 1))
    engine.train_batch(iter(data[:MICRO]))
    with patch.object(wires, "start_send", start_send):
        engine.train_batch(iter(data[MICRO : 2 * MICRO]))
    return seen


@pytest.mark.fast_cells("True")
@pytest.mark.skipif(find_spec("transformers") is None, reason="transformers is not installed")
@pytest.mark.parametrize("recomputes", [False, True])
def test_tensor_ranks_sum_as_often_as_said(recomputes: bool, ranks: RankPools) -> None:
    for count, blocks in ranks(2).run(sums, recomputes):
        assert count == degrees.tensor_sums(blocks, recomputes=recomputes, ends=2)


@pytest.mark.parametrize("recomputes", [False, True])
def test_experts_get_tokens_as_often_as_said(recomputes: bool, ranks: RankPools) -> None:
    """Each exchange forth of both ranks together has every token's rows once."""
    found = ranks(2).run(exchanges, recomputes)
    calls = degrees.expert_exchanges(1, recomputes=recomputes)
    assert [len(seen) for seen in found] == [calls, calls]
    rows = 2 * 7 * 2 * WIDTH * 4  # ranks, tokens, experts of a token, fp32
    assert EXPERTS == 4 and sum(seen[0] for seen in found) == rows


def test_stages_send_the_documented_bytes(ranks: RankPools) -> None:
    """An activation or a gradient for each micro-batch, of one size."""
    first, last = ranks(2).run(messages)
    assert first == last and len(first) == MICRO and len(set(first)) == 1
