"""The load of experts in the monitors."""

from __future__ import annotations

import csv
import tempfile
from pathlib import Path

import pytest
import torch
from engine.toys import engine_of
from hypothesis import given, strategies as st
from ranks import RankPools
from torch import Tensor, nn

from hadal import comm
from hadal.plugins.moe import MoE
from hadal.plugins.moe.layer import Load, imbalance
from moe.models import EXPERTS, WIDTH, an_expert, filled, tokens_of


@given(st.lists(st.integers(0, 9), min_size=1, max_size=8))
def test_imbalance_is_between_one_and_the_number_of_experts(counts: list[int]) -> None:
    found = float(imbalance(torch.tensor(counts)))
    if sum(counts):
        assert 1 - 1e-9 <= found <= len(counts) + 1e-9
    assert float(imbalance(torch.tensor([3] * len(counts)))) == pytest.approx(1.0)


def test_a_load_counts_forwards_that_are_trained_with() -> None:
    load = Load(2)
    load.add(torch.tensor([1, 2]), 0)  # nobody wants to know
    load.is_counted = True
    load.add(torch.tensor([1, 2]), 1)
    load.add(torch.tensor([3, 0]), torch.tensor(2))
    with torch.no_grad():
        load.add(torch.tensor([9, 9]), 9)
    cpu = torch.device("cpu")
    assert load.take(cpu).tolist() == [4, 2, 3]
    assert load.take(cpu).tolist() == [0, 0, 0]


class OneLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        options = {"k": 1, "capacity_factor": 0.5, "min_capacity": 0, "use_rts": False}
        self.layer = MoE(WIDTH, an_expert(), EXPERTS, ep_size=2, **options)  # type: ignore[arg-type]

    def forward(self, tokens: Tensor) -> Tensor:
        output, loss, self.counts = self.layer(tokens)
        return output.square().mean() + loss  # type: ignore[no-any-return]


def written(folder: str) -> tuple[list[int], dict[str, list[str]]]:
    """The choices of two micro-steps, and what the monitor wrote after the update."""
    model = filled(OneLayer(), comm.get_rank())
    engine = engine_of(
        1,
        model,
        gradient_accumulation_steps=2,
        csv_monitor={"enabled": True, "output_path": folder, "job_name": "run"},
    )
    counts = torch.zeros(EXPERTS, dtype=torch.int64)
    for step in range(2):
        engine.backward(engine(tokens_of(2 * step + comm.get_rank(), 8)))
        counts += model.counts  # type: ignore[arg-type, operator]
        engine.step()
    engine.destroy()
    found = {}
    for name in ("load_imbalance", "dropped_tokens"):
        path = Path(folder) / "run" / f"Train_MoE_{name}.csv"
        found[name] = list(csv.reader(path.open()))[1] if path.exists() else []
    return counts.tolist(), found


def test_the_load_of_an_update_is_written(ranks: RankPools) -> None:
    with tempfile.TemporaryDirectory() as folder:
        (first, told), (second, _) = ranks(2).run(written, folder)
    counts = [a + b for a, b in zip(first, second, strict=True)]
    assert sum(counts) == 32
    samples, value = map(float, told["load_imbalance"])
    assert samples > 0
    assert value == pytest.approx(max(counts) / 8, rel=1e-5)
    assert 0 < float(told["dropped_tokens"][1]) <= 32 - 4
