"""From text to a curriculum: tokens, the rarity of their words, training on common ones first.

    python examples/42_text_to_curriculum.py

It runs the commands `hadal data index` and `hadal data analyze`.
"""

import random
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import nn

import hadal
from hadal.cli.main import main as run_hadal
from hadal.data_efficiency.indexed import IndexedRows

COMMON, RARE = ["the", "cat", "sat", "on", "a", "mat"], ["quiz", "jazz", "fjord", "vex"]


def config_of(analysis: str) -> dict[str, Any]:
    metric = {
        "index_to_sample_path": f"{analysis}/rarity/rarity_index_to_sample_percentile_merged",
        "difficulty_type": "percentile",
        "clustering_type": "schedule_based",
        "min_difficulty": 20,
        "max_difficulty": 100,
        "schedule_type": "fixed_linear",
        "schedule_config": {"total_curriculum_step": 20, "difficulty_step": 20},
    }
    curriculum = {"enabled": True, "curriculum_metrics": {"rarity": metric}}
    return {
        "train_micro_batch_size_per_gpu": 8,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.2}},
        "data_efficiency": {"data_sampling": {"curriculum_learning": curriculum}},
    }


class Model(nn.Embedding):
    """Predicts the next byte from the last one."""

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        logits = super().forward(rows[:, :-1])
        return nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())


class Rows(IndexedRows):
    def __getitem__(self, index: int) -> tuple[int, torch.Tensor]:
        return index, torch.tensor(self.get(index), dtype=torch.int64)


def main(folder: str) -> None:
    random.seed(0)
    corpus, analysis = f"{folder}/corpus", f"{folder}/analysis"
    texts = [" ".join(random.choices(COMMON + RARE * (n % 2), k=20))[:32] for n in range(400)]
    Path(f"{corpus}.txt").write_text("\n".join(texts))
    assert run_hadal(["data", "index", f"{corpus}.txt", "--output", corpus]) == 0
    assert run_hadal(["data", "analyze", corpus, "--output", analysis, "--no-picture"]) == 0
    rarity = IndexedRows(f"{analysis}/rarity/rarity_sample_to_metric").numbers
    torch.manual_seed(0)
    wishes = {"config": config_of(analysis), "training_data": Rows(corpus)}
    engine, _, loader, _ = hadal.initialize(model=Model(256, 256), **wishes)
    found = []
    for _, (numbers, rows) in zip(range(40), loader, strict=False):
        loss = engine(rows.to(engine.device))
        engine.backward(loss)
        engine.step()
        found.append((rarity[numbers].mean(), loss.item()))
    (easy, before), (hard, after) = found[0], found[-1]
    assert easy < hard and after < 0.7 * before
    print(f"mean rarity {easy:.0f} -> {hard:.0f}, loss {before:.2f} -> {after:.2f}")
    engine.destroy()


with TemporaryDirectory() as made:
    main(made)
