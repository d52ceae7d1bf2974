"""The bucket keys bound gradient buffers, gathered weights and messages of one step."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch
from ranks import RankPools
from torch import Tensor, nn

import hadal
from hadal.comm.local import pairs
from hadal.zero.bucket import Weights

WIDTH, LAYERS = 16, 8
MATRIX = WIDTH * WIDTH
KEYS = [MATRIX * layers for layers in (1, 2, 4, 8)]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS))

    def forward(self, values: Tensor) -> Tensor:
        for layer in self.layers:
            values = values + torch.tanh(layer(values))
        return values


def peaks(stage: int, reduce: int, gather: int, precision: dict[str, Any]) -> dict[str, int]:
    """The most elements, of one step, in gradient buffers, gathered weights and one message."""
    torch.manual_seed(0)
    model = nn.Sequential(Block(), Block(), Block())
    zero = {
        "stage": stage,
        "reduce_bucket_size": reduce,
        "allgather_bucket_size": gather,
        "stage3_param_persistence_threshold": 0,
        "stage3_max_live_parameters": 0,
        "stage3_max_reuse_distance": 0,
    }
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": zero,
        **precision,
    }
    engine, _, _, _ = hadal.initialize(model=model, config=config)
    runtime = engine._parts.runtime
    most = {"gradients": 0, "weights": 0, "message": 0}

    def look(*_: Any) -> None:
        buffers = [g.full.numel() for g in runtime.gradients if g.full is not None]
        most["gradients"] = max(most["gradients"], sum(buffers))
        whole = [b.full.numel() for b in runtime.buckets if b.state is not Weights.SHARDED]
        most["weights"] = max(most["weights"], sum(whole))

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(look)
    start = pairs._start
    itemsize = next(model.parameters()).itemsize
    inputs = torch.ones(1, WIDTH, dtype=next(model.parameters()).dtype)
    for _ in range(2):
        engine.backward(engine(inputs).float().square().mean())
        with patch.object(pairs, "_start") as sending:
            sending.side_effect = lambda sends, tensor, *args, **rest: (
                most.update(message=max(most["message"], sends * tensor.nbytes // itemsize)),
                start(sends, tensor, *args, **rest),
            )[1]
            engine.step()
    engine.destroy()
    return most


@pytest.mark.fast_cells("3-fp32")
@pytest.mark.claims("zero_optimization.reduce_bucket_size")
@pytest.mark.parametrize("precision", [{}, {"bf16": {"enabled": True}}], ids=["fp32", "bf16"])
@pytest.mark.parametrize("stage", [2, 3])
def test_two_gradient_buffers_are_under_way_at_most(
    stage: int, precision: dict[str, Any], ranks: RankPools
) -> None:
    """One that collects and one that travels, each of the bucket size at most."""
    held = [ranks(2).run(peaks, stage, key, key, precision)[0]["gradients"] for key in KEYS]
    for key, gradients in zip(KEYS, held, strict=True):
        assert key <= gradients <= 2 * key
    assert held == sorted(set(held))


@pytest.mark.slow
@pytest.mark.claims("zero_optimization.allgather_bucket_size")
def test_updated_weights_arrive_in_messages_of_the_size_asked_for(ranks: RankPools) -> None:
    largest = LAYERS * MATRIX
    for world in (2, 3):
        for key in KEYS:
            for one in ranks(world).run(peaks, 2, largest, key, {}):
                # Every rank's message together are one gather.
                assert key - world < one["message"] * world <= key
                assert one["gradients"] > largest  # the other key rules there


@pytest.mark.claims(
    "zero_optimization.allgather_bucket_size", "zero_optimization.reduce_bucket_size"
)
def test_stage_3_gathers_no_more_than_a_unit_in_buckets_of_the_smaller_size(
    ranks: RankPools,
) -> None:
    (one, _) = ranks(2).run(peaks, 3, KEYS[2], KEYS[0], {})
    assert one["gradients"] <= 2 * KEYS[0]
    assert 0 < one["weights"] <= LAYERS * MATRIX
