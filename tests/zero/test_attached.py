"""Engines and models that nothing refers to are freed without `destroy`."""

from __future__ import annotations

import copy
import gc
import weakref
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from engine.toys import TINY, ByNorm, engine_of, model_of, train
from ranks import RankPools
from torch import nn

import hadal
from hadal.compat.engine import initialize
from hadal.zero.attached import Attached

WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "fp16": {"fp16": {"enabled": True}},
    "bf16": {"bf16": {"enabled": True}},
}


def drop(stage: int, born: bool, way: str, folder: str) -> None:
    wishes: dict[str, Any] = {}
    changes = dict(WAYS.get(way, {}))
    if way == "whole":
        wishes["optimizer"] = lambda parameters: ByNorm(parameters, 0.01)
        changes["optimizer"] = None
    if way == "disk":
        tier = {"device": "nvme", "nvme_path": folder}
        zero = {"stage": stage, **TINY, "offload_optimizer": tier, "offload_param": tier}
        changes["zero_optimization"] = zero
    with hadal.zero.Init() if born else nullcontext():
        model = model_of()
    engine = engine_of(stage, model, wishes, **changes)
    train(engine, range(2))
    runtime = engine._parts.runtime
    held = [engine, model, runtime, *runtime.buckets, *model.parameters(), *engine.optimizer.state]
    gone = [weakref.ref(one) for one in held]
    held.clear()
    del engine, model, runtime
    gc.collect()
    assert [type(one()) for one in gone if one() is not None] == []


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("born", [False, True], ids=["given", "created sharded"])
def test_an_engine_that_is_dropped_is_freed(
    stage: int, born: bool, ranks: RankPools, tmp_path: Any
) -> None:
    ranks(2).run(drop, stage, born, "plain", str(tmp_path))


@pytest.mark.parametrize(
    ("stage", "way"), [(1, "fp16"), (2, "bf16"), (3, "bf16"), (2, "whole"), (3, "disk")]
)
def test_it_is_freed_with_all_that_it_has(
    stage: int, way: str, ranks: RankPools, tmp_path: Any
) -> None:
    ranks(2).run(drop, stage, False, way, str(tmp_path))
    assert not list(tmp_path.iterdir())


def drop_under_the_other_name(stage: int) -> None:
    config = {"train_micro_batch_size_per_gpu": 3, "zero_optimization": {"stage": stage, **TINY}}
    config["optimizer"] = {"type": "AdamW", "params": {"lr": 0.01}}
    engine, _, _, _ = initialize(model=model_of(), config=config)
    train(engine, range(2))
    gone = weakref.ref(engine._parts.runtime)
    del engine
    gc.collect()
    assert gone() is None


def test_it_is_freed_under_the_name_of_deepspeed(ranks: RankPools) -> None:
    for stage in (2, 3):
        ranks(2).run(drop_under_the_other_name, stage)


def drop_the_engine_alone() -> None:
    engine = engine_of(3)
    whole = engine.state_dict()
    model = engine.module
    del engine
    gc.collect()
    with hadal.zero.GatheredParameters(list(model.parameters())):
        for name, parameter in model.named_parameters():
            assert torch.equal(parameter, whole[name])
    parameter = model[0].weight
    del model
    gc.collect()
    with hadal.zero.GatheredParameters(parameter):
        assert torch.equal(parameter, whole["0.weight"])


def test_a_parameter_keeps_what_it_needs(ranks: RankPools) -> None:
    ranks(2).run(drop_the_engine_alone)


def drop_what_was_born() -> None:
    with hadal.zero.Init():
        model = model_of()
    gone = [weakref.ref(parameter) for parameter in model.parameters()]
    del model
    gc.collect()
    assert all(one() is None for one in gone)


def test_a_model_that_was_born_sharded_is_freed(ranks: RankPools) -> None:
    ranks(2).run(drop_what_was_born)


def test_attributes_that_are_given_on_are_nobodys() -> None:
    table: Attached[int] = Attached("number")
    one, other = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    assert one not in table
    table[one] = 3
    vars(other).update(vars(one))
    assert (table[one], table.get(other)) == (3, None)
    with pytest.raises(KeyError):
        table[other]
    assert copy.deepcopy(one) not in table
    table.pop(one)
    table.pop(one)
    assert one not in table
