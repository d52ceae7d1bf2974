"""Pruning in an engine: schedules, scores, masks, resumed runs, and equal results at all stages."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from engine.toys import engine_of
from ranks import RankPools, on_ranks
from torch import nn

import hadal
from compression.test_pruning import blocks, sparse
from compression.test_shrinking import LAYER, channels, heads, rows
from compression.test_training import train
from compression.toys import Bert, config
from hadal import comm
from hadal.errors import UsageError
from hadal.plugins.compression import init_compression
from hadal.plugins.compression.layers import compressed_modules
from hadal.zero.access import keeper_of

DATA = Path(__file__).parents[1] / "data" / "snip_momentum.json"
GOLDEN = {name: case for name, case in json.loads(DATA.read_text()).items() if name != "setup"}
SPARSE = "compression_training.sparse_pruning.shared_parameters"


class Two(nn.Module):
    """The golden values' model."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 8, bias=False), nn.Linear(4, 8, bias=False)
        with torch.no_grad():
            for part, factor in ((self.a, 7), (self.b, 11)):
                part.weight.copy_(((torch.arange(32) * factor % 13 - 6) / 6).reshape(8, 4))

    def forward(self, x):
        return (self.a(x) - 1).square().mean() + (self.b(x) + 0.5).square().mean()


def golden_run(name: str, stage: int) -> list[tuple[float, dict[str, list[str]]]]:
    case = GOLDEN[name]["config"]
    wishes = blocks(
        case["pattern"],
        dense_ratio=1 - case["target_sparsity"],
        schedule_offset=case["start_step"],
        schedule_offset_end=case["end_step"],
        schedule_offset_stride=case["pruning_frequency"],
    )
    engine = engine_of(
        stage,
        Two(),
        **config(wishes),
        optimizer={"type": "SGD", "params": {"lr": 0.1}},
        train_micro_batch_size_per_gpu=1,
    )
    found = []
    for step in range(8):
        loss = engine(torch.tensor([1, -0.5, 0.25, 2]) * (1 + 0.1 * step))
        masks = {}
        for name, module in compressed_modules(engine.module):
            with hadal.zero.GatheredParameters([module.sparse_pruning_mask]):
                blocks_ = module.compression.prunings[0].blocks
                whole = blocks_.expand(module.sparse_pruning_mask.detach().clone())
            masks[name] = ["".join(str(int(one)) for one in row) for row in whole]
        engine.backward(loss)
        engine.step()
        found.append((loss.item(), masks))
    engine.destroy()
    return found


@pytest.mark.fast_cells("2:4")
@pytest.mark.claims(
    f"{SPARSE}.schedule_offset",
    f"{SPARSE}.schedule_offset_end",
    f"{SPARSE}.schedule_offset_stride",
    f"{SPARSE}.dense_ratio",
)
@pytest.mark.parametrize("name", GOLDEN)
def test_blocks_are_pruned_as_by_neural_compressor(ranks: RankPools, name):
    expected = GOLDEN[name]["trace"]
    for size, stage in ((1, 0), (2, 3)):
        found = ranks(size).run(golden_run, name, stage)[0]
        assert [masks for _, masks in found] == [step["masks"] for step in expected]
        losses = [step["loss"] for step in expected]
        assert [loss for loss, _ in found] == pytest.approx(losses, abs=2e-6)


EXCLUDED = {"excluded_modules": ["classifier"]}


@pytest.mark.claims(
    *(
        f"compression_training.{name}_pruning.shared_parameters.schedule_offset"
        for name in ("row", "head", "channel")
    )
)
def test_techniques_begin_after_their_own_number_of_updates():
    model = Bert()
    model.image = nn.Conv2d(1, 2, 1)
    late = [rows(schedule_offset=1), heads(schedule_offset=2)]
    late += [channels(schedule_offset=3, modules=["image"])]
    engine = engine_of(0, model, **config(*late))
    seen = []
    for step in range(5):
        train(engine, range(step, step + 1))
        parts = [module.compression.active for _, module in compressed_modules(model)]
        seen.append(len({rule.technique for part in parts for rule in part}))
    assert seen == [0, 1, 2, 3, 3]
    engine.destroy()


GROWING = blocks(schedule_offset=1, schedule_offset_end=4, schedule_offset_stride=1, **EXCLUDED)
FIXED = sparse("l1", 0.3, ["attention.self"], schedule_offset=2)
LEARNED = sparse("topk", 0.3, ["attention.self"], schedule_offset=2)
SMALLER = {
    **rows("l1", schedule_offset=2, related=[[LAYER + "output"]]),
    **heads(schedule_offset=3, related=[["self.query", "self.key", "self.value"]]),
}
ALL = {"blocks": GROWING, "l1": FIXED, "topk": LEARNED, "rows and heads": SMALLER}


def seeded_engine(wish: dict, stage: int, **changes):
    model = Bert()
    torch.manual_seed(1 + comm.get_rank())
    init_compression(model, config(wish))
    return engine_of(stage, model, **config(wish), **changes)


def losses_of(name: str, stage: int, changes: dict) -> list[float]:
    engine = seeded_engine(ALL[name], stage, **changes)
    losses = train(engine, range(6))
    engine.destroy()
    return losses


@pytest.mark.fast_cells("rows and heads-fp32")
@pytest.mark.parametrize("dtype", ["fp32", pytest.param("bf16", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "name", [*(each for each in ALL if each != "l1"), pytest.param("l1", marks=pytest.mark.slow)]
)
def test_every_stage_trains_identically(ranks: RankPools, name, dtype):
    changes = {"gradient_accumulation_steps": 2} if dtype == "fp32" else {"bf16": {"enabled": True}}
    found = [ranks(2).run(losses_of, name, stage, changes) for stage in range(4)]
    assert all(each == found[0] for each in found)


@pytest.mark.fast_cells("blocks")
@pytest.mark.parametrize("name", ALL)
def test_a_resumed_run_continues_with_the_same_masks(tmp_path: Path, name):
    engine = seeded_engine(ALL[name], 0)
    train(engine, range(3))
    engine.save_checkpoint(tmp_path)
    expected = train(engine, range(3, 8))
    engine.load_checkpoint(tmp_path)  # back to fewer updates
    assert train(engine, range(3, 8)) == expected
    engine.destroy()
    engine = seeded_engine(ALL[name], 0)
    engine.load_checkpoint(tmp_path)
    assert train(engine, range(3, 8)) == expected
    engine.destroy()


@on_ranks(2)
def test_masks_are_sharded_and_offloaded_as_weights_are() -> None:
    offload = {
        "stage": 3,
        "offload_param": {"device": "cpu"},
        "offload_optimizer": {"device": "cpu"},
    }
    engines = [seeded_engine(FIXED, 3), seeded_engine(FIXED, 3, zero_optimization=offload)]
    losses = [train(engine, range(4)) for engine in engines]
    assert losses[0] == losses[1]
    query = engines[0].module.bert.encoder.layer[0].attention.self["query"]
    held, mask = keeper_of(query.weight).bucket_of, query.sparse_pruning_mask
    assert held[mask].partition == held[query.weight].partition
    # Half of the masks, and half of everything else.
    assert held[mask].shard.numel() <= held[mask].layout.numel // 2 + 8
    for engine in engines:
        engine.destroy()


def test_updates_that_overflow_leave_scores_alone():
    fp16 = {"enabled": True, "initial_scale_power": 30, "hysteresis": 1}
    engine = seeded_engine(GROWING, 0, fp16=fp16)
    train(engine, range(3))
    scores = engine.module.bert.encoder.layer[0].attention.self["query"].sparse_pruning_scores
    assert engine.skipped_steps == 3
    assert scores.abs().sum() == 0
    train(engine, range(30))
    assert engine.skipped_steps < 33
    assert scores.isfinite().all()
    assert (scores > 0).sum() > 20
    engine.destroy()


def test_an_engine_prepares_the_model_before_it_makes_the_optimizer():
    engine = engine_of(0, Bert(), **config(LEARNED))
    query = engine.module.bert.encoder.layer[0].attention.self["query"]
    before = query.sparse_mask_scores.detach().clone()
    train(engine, range(4))
    assert not torch.equal(before, query.sparse_mask_scores)
    engine.destroy()


def test_an_optimizer_without_the_scores_is_refused():
    model = Bert()
    wishes = {"optimizer": torch.optim.SGD(model.parameters(), lr=0.1)}
    init_compression(model, config(LEARNED))
    with pytest.raises(UsageError, match=r"query.sparse_mask_scores.*6 in all.*init_compression"):
        engine_of(0, model, wishes, **config(LEARNED), optimizer=None)


@pytest.mark.slow
def test_models_that_are_born_sharded(ranks: RankPools):
    found = [ranks(2).run(born_run, name) for name in (None, "before", "engine")]
    assert found[0] == found[1] == found[2]


def born_run(way: str | None) -> list[float]:
    if way is None:
        model = Bert()
    else:
        with hadal.zero.Init():
            model = Bert()
    if way == "before":
        with pytest.raises(UsageError, match=r"query.weight, which is sharded over ranks; call it"):
            init_compression(model, config(FIXED))
        with hadal.zero.GatheredParameters(model.parameters()):
            init_compression(model, config(FIXED))
    engine = engine_of(3, model, **config(FIXED))
    losses = train(engine, range(4))
    engine.destroy()
    return losses
