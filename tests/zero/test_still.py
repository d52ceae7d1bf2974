"""A trained parameter that is frozen keeps its value, and trains again once unfrozen."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from engine.toys import assert_equal, engine_of, train
from ranks import RankPools, on_ranks

from hadal import comm

OPTIMIZERS = ["AdamW", "Adafactor", "Lamb", "Muon", "Lion"]


def freeze_meanwhile(stage: int, optimizer: str, settings: dict[str, Any]) -> None:
    section = {"type": optimizer, "params": {"lr": 0.01, "weight_decay": 0.1}}
    engine = engine_of(stage, optimizer=section, **settings)
    first = engine.module[0]
    train(engine, range(2))
    before = engine.state_dict()
    first.requires_grad_(False)
    train(engine, range(2, 4))
    during = engine.state_dict()
    mine = ["0.weight", "0.bias"]
    assert_equal({name: during[name] for name in mine}, {name: before[name] for name in mine})
    assert not torch.equal(during["3.weight"], before["3.weight"])
    first.requires_grad_(True)
    train(engine, range(4, 5))
    after = engine.state_dict()
    for name in mine:
        assert not torch.equal(after[name], during[name])
    engine.destroy()


@pytest.mark.fast_cells("0")
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_what_is_frozen_meanwhile_stands_still(stage: int, ranks: RankPools) -> None:
    for optimizer in OPTIMIZERS:
        ranks(2).run(freeze_meanwhile, stage, optimizer, {})
    ranks(2).run(freeze_meanwhile, stage, "AdamW", {"bf16": {"enabled": True}})


@on_ranks(2)
def test_what_one_rank_freezes_lets_nobody_wait() -> None:
    engine = engine_of(2)
    engine.module[0].requires_grad_(comm.get_rank() == 0)
    train(engine, range(2))  # nobody waits for anybody
    engine.destroy()
