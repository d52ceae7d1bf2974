"""Copies between host and device overlap with work, and every use of them waits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import late
import pytest
import torch
from cases import often
from ranks import RankPools
from torch import Tensor

import hadal
from hadal import utils
from offload.test_tiers import apart, config_of, model_of, small_blocks, state_of, train

# Stage, and where optimizer and weights rest.
CASES = [
    (0, "cpu", None),
    (2, "cpu", None),
    (2, "nvme", None),
    (3, "cpu", "cpu"),
    (3, None, "cpu"),
    (3, "nvme", "nvme"),
]


def found_in(config: dict[str, Any]) -> list[Tensor]:
    engine, *_ = hadal.initialize(model=model_of(), config=config)
    losses = train(engine, 2)
    weight = engine.module[1][0].weight
    gradients = []
    for step in range(2):  # a gradient that is looked at, and changed, between two micro-steps
        loss = engine(torch.randn(2, 96, dtype=weight.dtype)).float().square().mean()
        engine.backward(loss)
        if step == 0:
            gradients.append(utils.safe_get_full_grad(weight))
            utils.safe_set_full_grad(weight, 2 * gradients[0])
        engine.step()
    other = engine.module[0][0].weight
    with hadal.zero.GatheredParameters([weight, other], modifier_rank=0):
        weight.data[0] = 3.0
        other.data.neg_()
    utils.safe_set_full_fp32_param(engine.module[1][0].bias, torch.full((192,), 0.25))
    losses += train(engine, 2, 2)
    state = state_of(engine)
    engine.destroy()
    return [torch.tensor(losses), *gradients, *state]


def compare_late(
    stage: int, optimizer: str | None, weights: str | None, path: str, **zero: Any
) -> None:
    """The same bits, whether copies run at once or as late as allowed."""
    config = config_of(stage, "bf16", optimizer, weights, path, reduce_bucket_size=10_000, **zero)
    with small_blocks():
        torch.manual_seed(1)
        with apart():
            wanted = found_in(config)
        torch.manual_seed(1)
        with late.device():
            found = found_in(config)
            assert late.copies["leaving"] and late.copies["coming"]
    assert all(bool(one.isfinite().all()) for one in wanted)
    for mine, theirs in zip(found, wanted, strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.slow_cells("2-cpu-None", "3-nvme-nvme")
@pytest.mark.parametrize(("stage", "optimizer", "weights"), often(CASES, *CASES[1::2]))
def test_late_copies_change_no_bit(
    stage: int, optimizer: str | None, weights: str | None, ranks: RankPools, tmp_path: Path
) -> None:
    ranks(2).run(compare_late, stage, optimizer, weights, str(tmp_path))


def compare_late_sums(stage: int, path: str) -> None:
    compare_late(stage, "cpu", None, path, offload_optimizer={"accumulate_on": "host"})


@pytest.mark.slow
def test_late_sums_change_no_bit(ranks: RankPools, tmp_path: Path) -> None:
    for stage in (2, 3):
        ranks(2).run(compare_late_sums, stage, str(tmp_path))


def test_one_rank_alone_waits_as_well(ranks: RankPools, tmp_path: Path) -> None:
    for case in CASES[1:4:2]:
        ranks(1).run(compare_late, *case, str(tmp_path))
