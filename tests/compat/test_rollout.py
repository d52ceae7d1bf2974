"""Rollouts with the weights of an engine."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from engine.toys import config_of
from ranks import RankPools
from torch import Tensor, nn

from hadal.compat.engine import initialize
from hadal.compat.install import alias


class Counter(nn.Module):
    """A model whose `generate` counts up from the last token, by its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.step = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.step).sum()

    def generate(self, ids: Tensor, **options: Any) -> Tensor:
        assert options["do_sample"] is False and options["attention_mask"].shape == ids.shape
        new = ids
        for _ in range(options["max_new_tokens"]):
            new = torch.cat([new, new[:, -1:] + self.step[:1].long()], dim=1)
        return new


def generated(stage: int) -> list[list[list[int]]]:
    rollout = alias("deepspeed.runtime.rollout")
    engine, *_ = initialize(model=Counter(), config=config_of(stage))
    tokenizer = SimpleNamespace(eos_token_id=4, pad_token_id=0)
    made = rollout.build_rollout(rollout.RolloutConfig(), engine, tokenizer)
    request = rollout.RolloutRequest(torch.tensor([[0, 2], [5, 6]]), torch.tensor([[0, 1], [1, 1]]))
    sampling = rollout.SamplingConfig(max_new_tokens=3, temperature=0.0, n_samples_per_prompt=2)
    batch = made.generate(request, sampling)
    made.sync_weights(1)
    made.shutdown()
    assert (batch.batch_size, batch.seq_len) == (4, 5)
    assert batch.response_start_idx.tolist() == [2] * 4
    engine.destroy()
    return [batch.input_ids.tolist(), batch.attention_mask.tolist()]


@pytest.mark.parametrize("stage", [0, 3])
def test_prompts_come_back_with_responses(ranks: RankPools, stage: int) -> None:
    ids = 2 * [[0, 2, 3, 4, 5]] + 2 * [[5, 6, 7, 8, 9]]
    mask = 2 * [[0, 1, 1, 1, 0]] + 2 * [[1, 1, 1, 1, 1]]
    assert ranks(2).run(generated, stage) == 2 * [[ids, mask]]


def test_wrong_requests_are_errors() -> None:
    rollout = alias("deepspeed.runtime.rollout")
    with pytest.raises(RuntimeError, match="rows of tokens"):
        rollout.RolloutRequest(torch.ones(3), torch.ones(3))
    with pytest.raises(RuntimeError, match="response_start_idx"):
        rollout.RolloutBatch(torch.ones(2, 3), torch.ones(2, 3), torch.ones(3))
    with pytest.raises(ValueError, match="'hybrid_engine'"):
        rollout.build_rollout(rollout.RolloutConfig(engine="other"))
    with pytest.raises(RuntimeError, match="tokenizer"):
        rollout.build_rollout(rollout.RolloutConfig())
    with pytest.raises(NotImplementedError, match="Leave it False"):
        rollout.HybridEngineRollout(None, None, rollout.RolloutConfig(use_graph_capture=True))


def test_graphs_are_not_captured_and_the_reason_is_told() -> None:
    graphs = alias("deepspeed.runtime.hybrid_engine_graph")
    assert "not built" in graphs.validate_cuda_graph_support(None, 0)
    steps = graphs.decode_steps_from_generate_kwargs
    assert steps({"max_new_tokens": 5, "min_new_tokens": 5}) == 4
    assert steps({"max_new_tokens": 5}) is steps({"min_new_tokens": 5}) is None
