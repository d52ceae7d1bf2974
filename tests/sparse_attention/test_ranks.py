"""Random layouts are the same on all ranks, and in a checkpoint."""

from __future__ import annotations

import random

import torch
from ranks import RankPools
from torch import Tensor, nn

import hadal
from hadal import comm
from hadal.plugins.sparse_attention import BigBirdSparsityConfig, SparseSelfAttention


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inputs = nn.Linear(8, 24)
        self.attention = SparseSelfAttention(
            BigBirdSparsityConfig(2, num_random_blocks=2, block=4), max_seq_length=64
        )

    def forward(self, hidden: Tensor) -> Tensor:
        query, key, value = self.inputs(hidden).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        return self.attention(query, key, value).square().mean()


def train(stage: int, folder: str) -> list[list[list[int]]]:
    config = {
        "train_batch_size": 2,
        "zero_optimization": {"stage": stage},
        "optimizer": {"type": "Adam", "params": {"lr": 0.01}},
    }

    def made(seed: int) -> hadal.Engine:
        random.seed(seed)
        torch.manual_seed(0)
        return hadal.initialize(model=Model(), config=config)[0]

    engine = made(comm.get_rank())
    generator = torch.Generator().manual_seed(comm.get_rank())
    # Lengths differ over the ranks: nothing communicates in forward.
    loss = engine(torch.randn(1, 40 + 4 * comm.get_rank(), 8, generator=generator))
    engine.backward(loss)
    engine.step()
    engine.save_checkpoint(folder)
    later = made(5)
    before = later.module.attention.get_layout(64)
    later.load_checkpoint(folder)
    layouts = [each.module.attention.get_layout(64) for each in (engine, later)]
    return [layout.tolist() for layout in (*layouts, before)]


def test_ranks_and_checkpoints_have_one_layout(ranks: RankPools, tmp_path) -> None:
    for stage in (0, 3):
        first, second = ranks(2).run(train, stage, str(tmp_path / str(stage)))
        assert first == second
        own, loaded, before = first
        assert own == loaded
        assert own != before
