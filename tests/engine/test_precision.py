"""bf16 and data_types: sums of gradients, buffers, masters, and updates that are skipped or not."""

from __future__ import annotations

import math
from typing import Any
from unittest.mock import patch

import pytest
import torch
from ranks import RankPools, on_ranks
from torch import Tensor, nn

from engine.logs import logged
from engine.toys import Leaves, engine_of
from hadal import comm
from hadal.config import load_config
from hadal.device import emulates
from hadal.engine import precision
from hadal.utils import safe_get_full_fp32_param

STAGES = [0, 1, 2, 3]
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
SGD = {"type": "SGD", "params": {"lr": 0.5}}
BF16 = {"enabled": True}

# Gradients of four micro-steps. Their sum is 1 in bf16, loses the last in fp16, and is whole in
# fp32.
SUMMANDS = [1.0, 2.0**-9, 2.0**-9, 2.0**-12]
SUMS = {"bf16": 1.0, "fp16": 1 + 2.0**-8, "fp32": 1 + 2.0**-8 + 2.0**-12}


def mode(name: str) -> dict[str, Any]:
    """The sections of a precision mode; fp16's scale is a power of two that moves nothing."""
    more = {"loss_scale": 4.0} if name == "fp16" else {}
    return {} if name == "fp32" else {name: {"enabled": True, **more}}


def sum_of(stage: int, **sections: Any) -> float:
    """The mean gradient, four times what one element of it is, after micro-steps of SUMMANDS."""
    engine = engine_of(
        stage, Leaves([(20,)]), optimizer=SGD, gradient_accumulation_steps=4, **sections
    )
    dtype = next(engine.module.parameters()).dtype
    for summand in SUMMANDS:
        engine.backward(engine([torch.full((20,), summand, dtype=dtype)]))
        engine.step()
    norm = engine.get_global_grad_norm()
    engine.destroy()
    return 4 * norm / math.sqrt(20)


def sums_of_all(stage: int) -> dict[tuple[str, str], float]:
    return {
        (compute, summed): sum_of(stage, **mode(compute), data_types={"grad_accum_dtype": summed})
        for compute in DTYPES
        for summed in [*DTYPES, None]
    }


@pytest.mark.fast_cells("3")
@pytest.mark.claims("data_types", "data_types.grad_accum_dtype")
@pytest.mark.parametrize("stage", STAGES)
def test_gradients_are_summed_in_the_dtype_that_is_named(stage: int, ranks: RankPools) -> None:
    for (compute, summed), found in ranks(2).run(sums_of_all, stage)[0].items():
        assert found == pytest.approx(SUMS[summed or compute], rel=1e-6), (compute, summed)


def round_as(stage: int, early: bool | None) -> tuple[float, float]:
    """A master's first value, given as 1 + 2^-10, and the mean gradient of two micro-steps.

    In the first all ranks have 2^-9, in the second they have 1 and 1 + 2^-7.
    """
    model = Leaves([(20,)])
    nn.init.constant_(model.leaves[0], 1 + 2.0**-10)
    sections = {"bf16": BF16, "data_types": {"early_rounding": early}, "optimizer": SGD}
    engine = engine_of(stage, model, gradient_accumulation_steps=2, **sections)
    master = safe_get_full_fp32_param(model.leaves[0])
    for gradient in (2.0**-9, 1 + 2.0**-7 * comm.get_rank()):
        engine.backward(engine([torch.full((20,), gradient, dtype=torch.bfloat16)]))
        engine.step()
    mean = 2 * engine.get_global_grad_norm() / math.sqrt(20)  # each counts a half
    engine.destroy()
    return master[0].item(), mean


@pytest.mark.parametrize("stage", STAGES)
def test_rounding_is_late_unless_it_is_asked_for(stage: int, ranks: RankPools) -> None:
    for early in (None, False, True):
        # Below stage 2 each rank adds up its own gradients, which rounds as it does everywhere.
        mean = 1.0 if early or stage < 2 else 1 + 2.0**-7
        for found in ranks(2).run(round_as, stage, early):
            assert found == pytest.approx((1.0 if early else 1 + 2.0**-10, mean), abs=1e-6)


# ---- bf16 ----------------------------------------------------------------------------------------


@pytest.mark.claims("bf16.immediate_grad_update")
@pytest.mark.parametrize("stage", STAGES)
@on_ranks(2)
def test_immediate_sums_are_exact_to_fp32(stage: int) -> None:
    found = [
        sum_of(stage, bf16={**BF16, "immediate_grad_update": immediate})
        for immediate in (False, True)
    ]
    assert found == pytest.approx([SUMS["bf16"], SUMS["fp32"]], rel=1e-6)


def take_at_once(stage: int) -> None:
    """When the first layer's gradient is computed, the last layer's is already in its fp32 sum."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    engine = engine_of(stage, model, bf16={**BF16, "immediate_grad_update": True})
    seen: list[tuple[Any, torch.dtype]] = []

    def look(_: Tensor) -> None:
        gradients = engine._parts.runtime.gradients
        mine = next(g for g in gradients if any(p is model[1].weight for p in g.bucket.parameters))
        assert mine.full is not None
        assert bool(mine.full.any())
        seen.append((model[1].weight.grad, mine.full.dtype))

    hidden = []
    model[0].register_forward_hook(lambda *args: hidden.append(args[-1]))
    loss = engine(torch.ones(2, 4).bfloat16()).float().square().sum()
    hidden[0].register_hook(look)
    engine.backward(loss)
    engine.step()
    assert seen == [(None, torch.float32)]
    engine.destroy()


@pytest.mark.claims("bf16.immediate_grad_update")
def test_gradients_are_taken_during_backward(ranks: RankPools) -> None:
    for stage in (0, 1):
        ranks(2).run(take_at_once, stage)


def meet_infinity(stage: int, checks: bool) -> None:
    engine = engine_of(
        stage, Leaves([(6,), (3,)]), optimizer=SGD, bf16={**BF16, "check_grad_overflow": checks}
    )
    assert engine.loss_scale == 1.0
    before = engine.state_dict()
    bad = float("inf") if comm.get_rank() else 1.0
    with logged() as messages:
        engine.backward(engine([torch.full((6,), 1.0), torch.full((3,), bad)]))
        engine.step()
    after = engine.state_dict()
    assert engine.overflow == checks
    assert engine.skipped_steps == int(checks)
    assert torch.equal(after["leaves.0"], before["leaves.0"]) == checks
    assert bool(after["leaves.1"].isfinite().all()) == checks
    if comm.get_rank() == 0:
        (message,) = messages
        assert "the gradient of leaves.1 is not finite" in message
        assert ("does not skip such updates" in message) == (not checks)
    else:
        assert messages == []
    engine.destroy()


@pytest.mark.claims("bf16", "bf16.enabled", "bf16.check_grad_overflow")
@pytest.mark.parametrize("stage", STAGES)
def test_updates_that_are_not_finite_are_skipped_if_asked(stage: int, ranks: RankPools) -> None:
    for checks in (True, False):
        ranks(2).run(meet_infinity, stage, checks)


LEFTOVERS = {
    "loss_scale": 128,
    "loss_scale_window": 2,
    "initial_scale_power": 4,
    "hysteresis": 1,
    "min_loss_scale": 8,
    "check_overflow": False,
}


def train_with_leftovers(section: str) -> tuple[str, float, float]:
    engine = engine_of(1, **{section: {**BF16, **LEFTOVERS}})
    inputs = torch.linspace(-1, 1, 18).reshape(3, 6).bfloat16()
    engine.backward(engine(inputs).float().square().mean())
    engine.step()
    dtype = str(next(engine.module.parameters()).dtype)
    found = (dtype, engine.loss_scale, engine.get_global_grad_norm())
    engine.destroy()
    return found


@pytest.mark.claims(
    "bfloat16",
    "bf16.loss_scale",
    "bf16.loss_scale_window",
    "bf16.initial_scale_power",
    "bf16.hysteresis",
    "bf16.min_loss_scale",
    "bf16.check_overflow",
)
def test_leftovers_are_logged_and_scale_nothing(ranks: RankPools) -> None:
    notes = load_config({"train_batch_size": 8, "bf16": {**BF16, **LEFTOVERS}}).notes
    for name in LEFTOVERS:
        assert any(f"bf16.{name}" in note and "ignored" in note for note in notes), name
    old = load_config({"train_batch_size": 8, "bfloat16": BF16})
    assert old.bf16.enabled
    assert old.notes == ('bfloat16: an old name, read as "bf16"',)
    plain, named_old = (ranks(1).run(train_with_leftovers, s)[0] for s in ("bf16", "bfloat16"))
    assert plain == named_old
    assert plain[:2] == ("torch.bfloat16", 1.0)


# ---- data_types ----------------------------------------------------------------------------------


class Rooms(nn.Module):
    """Buffers of all kinds, in modules of names that patterns may mean."""

    _keep_in_fp32_modules = ("norm",)
    _keep_in_fp32_modules_strict = ("rope",)

    def __init__(self) -> None:
        super().__init__()
        for name in ("norm", "rope", "layernorm", "block"):
            room = nn.Linear(2, 2)
            room.register_buffer("mean", torch.ones(2))
            room.register_buffer("count", torch.tensor(3))
            self.add_module(name, room)
        self.batch = nn.BatchNorm1d(2)
        self.register_buffer("table", torch.ones(2, dtype=torch.float64))


def buffer_dtypes(**sections: Any) -> dict[str, str]:
    engine = engine_of(0, Rooms(), **sections)
    found = {
        name: str(buffer.dtype).removeprefix("torch.")
        for name, buffer in engine.module.named_buffers()
        if not name.endswith(("count", "num_batches_tracked", "running_var"))
    }
    counts = {b.dtype for name, b in engine.module.named_buffers() if name.endswith("count")}
    assert counts == {torch.int64}
    for name, parameter in engine.module.named_parameters():
        expected = torch.bfloat16 if "bf16" in sections else torch.float32
        assert parameter.dtype == expected, name
    engine.destroy()
    return found


NAMES = ["table", "norm.mean", "rope.mean", "layernorm.mean", "block.mean", "batch.running_mean"]
BF, F16, F32, F64 = "bfloat16", "float16", "float32", "float64"
IN_BF: dict[str, Any] = {"bf16": BF16, "data_types": {"buffer_dtype": "bf16"}}


def with_kept(patterns: list[str]) -> dict[str, Any]:
    return IN_BF | {"data_types": {"buffer_dtype": "bf16", "keep_in_fp32_modules": patterns}}


BUFFERS = [
    # As they are given, but for running statistics, which follow their module.
    ({}, [F64, F32, F32, F32, F32, F32]),
    ({"bf16": BF16}, [F64, F32, F32, F32, F32, BF]),
    ({"bf16": BF16, "data_types": {"keep_in_fp32_modules": ["batch"]}}, [F64, *[F32] * 5]),
    # Named; the model's own lists are kept.
    (IN_BF, [BF, F32, F32, BF, BF, BF]),
    ({"data_types": {"buffer_dtype": "fp16"}}, [F16, F32, F32, F16, F16, F16]),
    ({"bf16": BF16, "data_types": {"buffer_dtype": "fp32"}}, [F32] * 6),
    # The user's patterns take the place of the model's lists.
    (with_kept([]), [BF] * 6),
    (with_kept(["block"]), [BF, BF, BF, BF, F32, BF]),
    (with_kept([".*norm", "table"]), [F64, F32, BF, F32, BF, BF]),
    (with_kept(["norm.mean"]), [BF, F32, BF, BF, BF, BF]),
]


@pytest.mark.claims("data_types.buffer_dtype", "data_types.keep_in_fp32_modules")
@pytest.mark.parametrize(("sections", "expected"), BUFFERS)
def test_buffers_are_cast_but_for_those_that_are_kept(
    sections: dict[str, Any], expected: list[str], ranks: RankPools
) -> None:
    (found,) = ranks(1).run(cast_buffers, sections)
    assert found == dict(zip(NAMES, expected, strict=True))


def cast_buffers(sections: dict[str, Any]) -> dict[str, str]:
    return buffer_dtypes(**sections)


def weights_dtype(section: str) -> str:
    engine = engine_of(0, **mode(section), data_types={"param_dtype": section})
    dtype = str(next(engine.module.parameters()).dtype)
    engine.destroy()
    return dtype


@pytest.mark.claims("data_types.param_dtype")
@pytest.mark.parametrize("name", DTYPES)
def test_param_dtype_confirms_the_mode(name: str, ranks: RankPools) -> None:
    """Contradictions are refused: see the rules' own test."""
    assert ranks(1).run(weights_dtype, name) == [str(DTYPES[name])]


@pytest.mark.parametrize("section", ["fp16", "bf16", "amp", "torch_autocast"])
def test_a_warning_names_the_section_whose_dtype_is_emulated(
    section: str, caplog: pytest.LogCaptureFixture
) -> None:
    config = load_config({"train_batch_size": 1, section: {"enabled": True}})
    for is_emulated, warnings in [(False, 0), (True, 1)]:
        with patch.object(precision, "emulates", return_value=is_emulated):
            precision.warn_of_emulation(config, torch.device("cpu"))
        assert len(caplog.messages) == warnings
    assert caplog.messages[0].startswith(f"{section}.enabled: this CPU has no ")


def test_only_cpus_emulate() -> None:
    assert not emulates(torch.float32, torch.device("cpu"))
    assert not emulates(torch.bfloat16, torch.device("meta"))
    is_missing = not torch.ops.mkldnn._is_mkldnn_bf16_supported()
    assert emulates(torch.bfloat16, torch.device("cpu")) == is_missing
