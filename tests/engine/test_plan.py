"""The plan of a model: without ranks, without values, and the same as an engine's."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from ranks import RankPools
from torch import nn

import hadal
from hadal.config import load_config
from hadal.engine.plan import ModelPlan, RankCounts, plan_model, plan_modules
from hadal.zero.estimate import (
    ShardTiers,
    TierBytes,
    portions_of,
    states_of_portions,
)

WIDTH = 24


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)


class Tower(nn.Module):
    """A frozen embedding, blocks of which one is in float64, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, WIDTH).requires_grad_(False)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.blocks[1].double()
        self.head = nn.Linear(WIDTH, 50, bias=False)


def config_of(stage: int, **changes: Any) -> dict[str, Any]:
    zero = {"stage": stage, **changes.pop("zero", {})}
    if stage == 3:
        zero = {"stage3_param_persistence_threshold": 100, **zero}
    adam = {"type": "AdamW", "params": {"lr": 0.01}}
    return {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": adam,
        "zero_optimization": zero,
        **changes,
    }


def planned(model: nn.Module, raw: dict[str, Any], ranks: int) -> tuple[ModelPlan, RankCounts]:
    config = load_config(raw, world_size=ranks)
    counts = RankCounts.of(config, ranks)
    trained = {p: 0 for p in model.parameters() if p.requires_grad}
    modules = plan_modules(model, config)
    return plan_model(model, modules, config, torch.device("cpu"), counts, trained), counts


def on_meta(raw: dict[str, Any], ranks: int) -> tuple[ModelPlan, RankCounts]:
    with torch.device("meta"):
        model = Tower()
    return planned(model, raw, ranks)


def described(plan: ModelPlan) -> list[tuple[Any, ...]]:
    """Everything of a plan that is more than the objects of one process."""
    units = [(unit.name, [member.name for member in unit.members]) for unit in plan.units]
    buckets = [
        (b.name, b.partition, b.precision, [(m.name, m.group) for m in b.members])
        for b in plan.buckets
    ]
    return [*units, *buckets]


GROUPS = [{"modules": "blocks.2", "stage": 1}]


def of_an_engine(raw: dict[str, Any]) -> tuple[list[tuple[Any, ...]], dict[str, int]]:
    engine, *_ = hadal.initialize(model=Tower(), config=raw)
    return described(engine._parts.sharded.plan), engine.state_nbytes()


CASES = [
    config_of(0),
    config_of(2, bf16={"enabled": True}),
    config_of(3, bf16={"enabled": True}),
    config_of(3, bf16={"enabled": True}, zero={"groups": GROUPS}),
]


def test_an_engine_follows_the_plan_of_a_model_on_meta(ranks: RankPools) -> None:
    for raw in CASES:
        plan, counts = on_meta(raw, 2)
        for found, held in ranks(2).run(of_an_engine, raw):
            assert found == described(plan)
            portions = portions_of(plan.buckets, counts.shards_of, moments=2)
            states = states_of_portions(portions, ShardTiers())
            weights, gradients = states.weights.device, states.gradients.device
            padding = 8 * 2 * 16 * len(plan.buckets)
            assert weights <= held["weights"] <= weights + padding
            assert gradients <= held["gradients"] <= gradients + padding


def test_small_parameters_stay_whole_within_their_limit() -> None:
    key = "stage3_model_persistence_threshold"
    for limit, whole in ((10**6, 3 * 5 * WIDTH), (3 * WIDTH, 3 * WIDTH)):
        plan, _ = on_meta(config_of(3, zero={key: limit}), 8)
        kept = sum(b.numel for b in plan.buckets if not b.partition.weights)
        assert kept == whole
        assert plan.limits.persistent_total_numel == limit - whole


def test_bytes_are_counted_in_each_parameter_s_own_dtypes_and_groups() -> None:
    block = 2 * 2 * WIDTH * WIDTH + 5 * WIDTH
    embedding = head = 50 * WIDTH
    plan, counts = on_meta(config_of(0), 4)
    states = states_of_portions(portions_of(plan.buckets, counts.shards_of, 2), ShardTiers())
    trained = 4 * (2 * block + head) + 8 * block
    assert states.weights == TierBytes(4 * embedding + trained)
    assert states.gradients == TierBytes(trained)
    assert states.optimizer == TierBytes(2 * trained)
    raw = config_of(3, zero={"groups": GROUPS, "stage3_param_persistence_threshold": 0})
    plan, counts = on_meta(raw, 4)
    states = states_of_portions(portions_of(plan.buckets, counts.shards_of, 2), ShardTiers())
    cut = 4 * (embedding + block + head) + 8 * block
    assert states.weights == TierBytes(cut // 4 + 4 * block)


def test_experts_are_planned_for_the_ranks_that_hold_them() -> None:
    from hadal.plugins.moe import MoE

    model = nn.Sequential(MoE(4, nn.Linear(4, 4), num_experts=8, ep_size=4))
    plan, counts = planned(model, config_of(2), 8)
    shards = {b.holders.experts: counts.shards_of(b.holders) for b in plan.buckets}
    assert shards == {None: 8, "ep_size_4": 2}


def test_the_largest_unit() -> None:
    plan, _ = on_meta(config_of(3), 2)
    assert plan.unit_numel == 2 * 2 * WIDTH * WIDTH + 5 * WIDTH
    plan, _ = on_meta(config_of(3, zero={"leaf_module": {"names": ["blocks"]}}), 2)
    assert plan.unit_numel == 2 * 2 * WIDTH * WIDTH + 5 * WIDTH
    assert planned(nn.ReLU(), config_of(0), 1)[0].unit_numel == 0


class WithCodes(nn.Module):
    """A layer beside frozen integers, which no bucket holds."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.codes = nn.Parameter(torch.zeros(1000, dtype=torch.int8), requires_grad=False)


def test_a_removed_parameter_outside_of_buckets_is_freed() -> None:
    model = WithCodes()
    engine, *_ = hadal.initialize(model=model, config=config_of(0))
    gone = weakref.ref(model.codes)
    del model.codes
    gc.collect()
    assert gone() is None
    engine.destroy()


COMPRESSED = {
    "weight_quantization": {
        "shared_parameters": {"enabled": True},
        "different_groups": {
            "all": {"params": {"start_bits": 8, "target_bits": 8}, "modules": ["*"]}
        },
    }
}


def kinds_after_a_refusal(changes: dict[str, Any]) -> tuple[str, set[str]]:
    model = Tower()
    raw = config_of(0, compression_training=COMPRESSED, **changes)
    with pytest.raises(hadal.ConfigError) as refusal:
        hadal.initialize(model=model, config=raw)
    return str(refusal.value), {type(module).__name__ for module in model.modules()}


def test_a_plan_is_refused_before_the_model_is_changed(ranks: RankPools) -> None:
    whole = {type(module).__name__ for module in Tower().modules()}
    for changes, words in (
        ({"activation_checkpointing": {"modules": ["towers.*"]}}, "towers"),
        ({"zero": {"groups": [{"modules": ["towers.*"], "stage": 0}]}}, "towers"),
    ):
        for said, found in ranks(1).run(kinds_after_a_refusal, changes):
            assert words in said
            assert found == whole
