"""Techniques in an engine: schedules, resumed runs, and equal results at every stage."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
from engine.toys import engine_of
from ranks import RankPools
from torch import Tensor, nn

from compression.toys import TOKENS, Bert, config, inputs, section, weights
from hadal import comm
from hadal.errors import UsageError
from hadal.plugins.compression import CompressionScheduler, init_compression, redundancy_clean
from hadal.plugins.compression.layers import compressed_modules

FALLING = weights(8, 3, 1, schedule_offset=1)


def engine_with(*sections, stage: int = 0, prepared: bool = True, **changes):
    model, wishes = Bert(), config(*sections)
    if prepared:
        init_compression(model, wishes)
    return engine_of(stage, model, **wishes, **changes)


def train(engine, steps: range, model: nn.Module | None = None) -> list[float]:
    losses = []
    for step in steps:
        tokens = (TOKENS + step + comm.get_rank()) % 12
        loss = (model or engine)(tokens).float().square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def bits_of(engine) -> list[int | None]:
    modules = [module for _, module in compressed_modules(engine.module)]
    return [module.compression.bits and module.compression.bits.bits for module in modules]


@pytest.mark.claims(
    "compression_training.weight_quantization.shared_parameters.schedule_offset",
    "compression_training.weight_quantization.shared_parameters.quantize_verbose",
    "compression_training.weight_quantization.shared_parameters.quantizer_kernel",
    "compression_training.weight_quantization.different_groups.<group>.params.quantization_period",
    "compression_training.activation_quantization.shared_parameters.schedule_offset",
)
@pytest.mark.parametrize("prepared", [True, False])
def test_bits_fall_with_the_applied_updates(caplog, prepared):
    caplog.set_level(logging.INFO, logger="hadal.plugins.compression")
    verbose = weights(8, 3, 1, schedule_offset=1, quantize_verbose=True, quantizer_kernel=True)
    late = inputs(8, ["intermediate"], schedule_offset=2)
    engine = engine_with(verbose, late, prepared=prepared, gradient_accumulation_steps=2)
    seen, on = [], []
    intermediate = engine.module.bert.encoder.layer[0].intermediate["dense"]
    for step in range(10):
        train(engine, range(step, step + 1))
        seen.append(bits_of(engine)[0])
        on.append(intermediate.compression.activation_is_on)
    assert seen == [None, None, 8, 8, 7, 7, 6, 6, 6, 6]
    assert on == [False] * 4 + [True] * 6
    told = "bert.encoder.layer.0.attention.self.query: 7 bits after 2 updates"
    assert told in caplog.messages
    engine.destroy()


SIXTEEN_BITS = {
    "bf16": {"bf16": {"enabled": True}},
    "fp16": {"fp16": {"enabled": True, "loss_scale": 64.0}},
}
KEPT = {"dense_ratio": 0.5}
TECHNIQUES = {
    "weight_quantization": (
        {"quantize_weight_in_forward": True},
        {"start_bits": 8, "target_bits": 8},
    ),
    "activation_quantization": ({}, {"bits": 8}),
    "sparse_pruning": ({"method": "l1"}, KEPT),
    "row_pruning": ({"method": "topk"}, KEPT),
    "head_pruning": ({"num_heads": 4}, KEPT),
    "channel_pruning": ({"method": "l1"}, KEPT),
}


@pytest.mark.parametrize("technique", TECHNIQUES)
def test_a_group_may_begin_at_an_update_of_its_own(technique):
    shared, params = TECHNIQUES[technique]
    wish = section(technique, {**shared, "schedule_offset": 1}, params, ["first"])
    late = {"params": {**params, "schedule_offset": 3}, "modules": ["last"]}
    wish[technique]["different_groups"]["late"] = late
    is_image = technique == "channel_pruning"
    made = [nn.Conv2d(4, 4, 1) if is_image else nn.Linear(4, 4) for _ in range(2)]
    model = nn.ModuleDict({"first": made[0], "last": made[1]})
    init_compression(model, config(wish))
    scheduler = CompressionScheduler(model, config(wish))
    seen = {name: [] for name in model}
    for _ in range(5):
        for name, module in compressed_modules(model):
            state = module.compression
            seen[name].append(bool(state.bits or state.activation_is_on or state.active))
        scheduler.step()
    assert seen == {"first": [False] + 4 * [True], "last": 3 * [False] + 2 * [True]}
    assert [module.compression.settled for _, module in compressed_modules(model)] == [1, 3]


@pytest.mark.claims(
    "compression_training.weight_quantization.shared_parameters.fp16_mixed_quantize",
    "compression_training.weight_quantization.shared_parameters.fp16_mixed_quantize.enabled",
    "compression_training.weight_quantization.shared_parameters.fp16_mixed_quantize"
    ".quantize_change_ratio",
)
def test_a_blend_moves_from_the_weights_to_the_quantized_ones():
    mixed = {"enabled": True, "quantize_change_ratio": 0.5}
    engine = engine_with(weights(4, 4, 0, fp16_mixed_quantize=mixed))
    _, module = next(compressed_modules(engine.module))
    sizes = []
    for step in range(3):
        train(engine, range(step, step + 1))
        found = module.quantized(module.compression.bits)
        plain = module.weight.detach()
        sizes.append((found - plain).abs().max().item())
    assert sizes[0] == 0.0
    assert 0.0 < sizes[1] < sizes[2]
    engine.destroy()


@pytest.mark.fast_cells("float16")
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_programs_that_call_the_module_train_by_the_same_schedule(tmp_path: Path, dtype):
    found = []
    sections = FALLING, inputs(8, ["intermediate"], schedule_offset=2)
    for is_module in (False, True):
        engine = engine_with(*sections, **SIXTEEN_BITS.get(dtype, {}))
        called = engine.module if is_module else engine
        losses = train(engine, range(4), called)
        engine.save_checkpoint(tmp_path / str(is_module))
        engine.destroy()
        engine = engine_with(*sections, **SIXTEEN_BITS.get(dtype, {}))
        engine.load_checkpoint(tmp_path / str(is_module))
        called = engine.module if is_module else engine
        losses += train(engine, range(4, 7), called)
        engine.destroy()
        found.append(losses)
    assert found[0] == found[1]


def test_a_resumed_run_continues_with_the_same_bits(tmp_path: Path):
    sections = (FALLING, inputs(8, ["intermediate"], schedule_offset=4, range_calibration="static"))
    engine = engine_with(*sections)
    train(engine, range(3))
    engine.save_checkpoint(tmp_path)
    expected = train(engine, range(3, 8))
    bits = bits_of(engine)
    engine.load_checkpoint(tmp_path)  # back to fewer updates
    assert train(engine, range(3, 8)) == expected
    engine.destroy()
    engine = engine_with(*sections)
    engine.load_checkpoint(tmp_path)
    assert train(engine, range(3, 8)) == expected
    assert bits_of(engine) == bits
    engine.destroy()


def bits_seen(engine, steps: range) -> list[int | None]:
    """The bits in an evaluation, and in the forward of each update after it."""
    engine.eval()
    with torch.no_grad():
        engine(TOKENS)
    found = [bits_of(engine)[0]]
    engine.train()
    for step in steps:
        train(engine, range(step, step + 1))
        found.append(bits_of(engine)[0])
    return found


def save_in_mid_schedule(folder: str) -> list[int | None]:
    engine = engine_with(FALLING, stage=2)
    train(engine, range(3))
    engine.save_checkpoint(folder)
    found = bits_seen(engine, range(3, 6))
    engine.destroy()
    return found


def go_on(folder: str, stage: int) -> list[int | None]:
    engine = engine_with(FALLING, stage=stage)
    engine.load_checkpoint(folder)
    found = bits_seen(engine, range(3, 6))
    engine.destroy()
    return found


def test_the_schedule_resumes_at_another_number_of_ranks(ranks: RankPools, tmp_path: Path):
    told, same = ranks(2).run(save_in_mid_schedule, str(tmp_path))
    assert told == same == [6, 6, 6, 5]
    assert ranks(1).run(go_on, str(tmp_path), 3) == [told]
    assert ranks(2).run(go_on, str(tmp_path), 0) == [told, told]


def test_updates_that_overflow_do_not_count():
    fp16 = {"enabled": True, "initial_scale_power": 26, "hysteresis": 1}
    engine = engine_with(weights(8, 3, 1), fp16=fp16)
    train(engine, range(12))
    assert 0 < engine.skipped_steps < 12
    applied = engine.global_steps - engine.skipped_steps
    train(engine, range(1))
    _, module = next(compressed_modules(engine.module))
    assert module.compression.bits == module.compression.weight.at(applied)
    engine.destroy()


@pytest.mark.fast_cells("fp32")
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_every_stage_trains_identically(ranks: RankPools, dtype):
    found = [ranks(2).run(losses_of, stage, dtype) for stage in range(4)]
    assert all(each == found[0] for each in found)


def losses_of(stage: int, dtype: str) -> list[float]:
    static = inputs(8, ["intermediate"], range_calibration="static")
    engine = engine_with(FALLING, static, stage=stage, **SIXTEEN_BITS.get(dtype, {}))
    losses = train(engine, range(5))
    ranges = engine.module.bert.encoder.layer[0].intermediate["dense"].activation_quantizer
    mine = ranges.x_min_max.float().tolist()
    # Ranks saw different samples.
    total = ranges.x_min_max.float().clone()
    comm.all_reduce(total)
    assert (total / comm.get_world_size()).tolist() == pytest.approx(mine)
    engine.destroy()
    return losses


STATIC = inputs(8, ["intermediate"], range_calibration="static")
HALF = {"dense_ratio": 0.5}
SNIP = {"method": "snip_momentum", "block_pattern": "4x1", "schedule_offset_end": 4, **HALF}
COMPILED = {
    "quantized": [weights(4, 3, 1, rounding="stochastic"), STATIC],
    "after updates": [weights(8, 4, 1, quantize_weight_in_forward=False), STATIC],
    "sparse": [section("sparse_pruning", {**SNIP, "schedule_offset": 1}, {}, None)],
    "without rows and heads": [
        section("row_pruning", {"method": "topk"}, HALF, ["intermediate.dense"]),
        section("head_pruning", {"method": "topk", "num_heads": 4}, HALF, ["attention.output"]),
    ],
}


@pytest.mark.slow_cells("quantized")
@pytest.mark.filterwarnings("ignore")  # the compiler's own, about itself
@pytest.mark.parametrize(
    "techniques",
    [
        pytest.param(name, marks=[pytest.mark.slow] if name in ("sparse", "after updates") else [])
        for name in COMPILED
    ],
)
def test_a_compiled_model_is_compressed_identically(techniques):
    found = []
    for is_compiled in (False, True):
        torch.manual_seed(0)
        engine = engine_with(*COMPILED[techniques], stage=3, train_micro_batch_size_per_gpu=4)
        if is_compiled:
            engine.compile(backend="aot_eager")
        found.append(train(engine, range(4)))
        engine.destroy()
        torch.compiler.reset()
    plain, compiled = found
    assert compiled == pytest.approx(plain, rel=1e-6)
    assert compiled[-1] < compiled[0]


@pytest.mark.fast_cells("3")
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_cleaning_ends_the_training_of_an_engine(ranks: RankPools, stage):
    first, second = ranks(2).run(clean_and_evaluate, stage)
    assert torch.equal(first, second)


def clean_and_evaluate(stage: int) -> Tensor:
    engine = engine_with(FALLING, stage=stage)
    train(engine, range(2))
    wishes = config(FALLING)
    if stage == 3:
        with pytest.raises(
            UsageError, match=r"query\.weight is sharded over ranks; pass the engine"
        ):
            redundancy_clean(engine.module, wishes)
    taken = init_compression(Bert(), wishes)
    taken.load_state_dict(engine.state_dict())
    assert redundancy_clean(engine, wishes) is engine
    redundancy_clean(taken, wishes)
    for name, value in engine.state_dict().items():
        assert torch.equal(value, taken.state_dict()[name])
    weight = engine.module.bert.encoder.layer[0].attention.self["query"].weight
    assert weight.unique().numel() <= 8
    engine.eval()
    found = engine(TOKENS)
    assert torch.equal(found, taken(TOKENS))
    assert torch.equal(found, engine.module(TOKENS))
    engine.train()
    ended = r"training has ended .*; save engine\.module, or initialize again"
    for call in (
        lambda: engine.backward(found.sum()),
        engine.step,
        lambda: engine.load_state_dict({}),
    ):
        with pytest.raises(UsageError, match=ended):
            call()
    with pytest.raises(UsageError, match=ended):
        engine.save_checkpoint("nowhere")
    engine.end_training()
    again = engine_of(stage, engine.module)
    again.backward(again(TOKENS).square().mean())
    again.step()
    again.destroy()
    engine.destroy()
    with pytest.raises(UsageError, match="this engine was destroyed"):
        engine(TOKENS)
    return found
