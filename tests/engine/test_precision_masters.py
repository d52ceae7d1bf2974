"""Weights that are their own masters: 16-bit AdamW and SGD, written out element by element."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import RankPools, on_ranks
from torch import Tensor

from engine.toys import Leaves, engine_of, given_gradients, mean_gradients
from hadal.errors import OptimizerError

SHAPES = ((40, 30), (7,), (25, 8))
STEPS = 6
LR, BETAS, EPS, DECAY = 0.02, (0.9, 0.99), 1e-8, 0.1
ADAMW = {
    "type": "AdamW",
    "params": {"lr": LR, "betas": list(BETAS), "eps": EPS, "weight_decay": DECAY},
}
MODES: dict[str, tuple[torch.dtype, torch.dtype, dict[str, Any]]] = {
    "bf16": (
        torch.bfloat16,
        torch.float32,
        {"bf16": {"enabled": True, "bf16_master_weights_and_grads": True}},
    ),
    "bf16 moments": (
        torch.bfloat16,
        torch.bfloat16,
        {
            "bf16": {
                "enabled": True,
                "bf16_master_weights_and_grads": True,
                "bf16_optimizer_states": True,
            }
        },
    ),
    "fp16": (
        torch.float16,
        torch.float32,
        {"fp16": {"enabled": True, "loss_scale": 128, "fp16_master_weights_and_grads": True}},
    ),
}


def by_hand(
    values: Tensor, gradients: list[Tensor], master: torch.dtype, state: torch.dtype
) -> Any:
    """AdamW (Loshchilov & Hutter 2019) on values that are rounded to `master` after each step."""
    values = values.to(master)
    first, second = torch.zeros_like(values, dtype=state), torch.zeros_like(values, dtype=state)
    for number, gradient in enumerate(gradients, start=1):
        m = BETAS[0] * first.double() + (1 - BETAS[0]) * gradient.double()
        v = BETAS[1] * second.double() + (1 - BETAS[1]) * gradient.double() ** 2
        moved = values.double() * (1 - LR * DECAY)
        corrected = m / (1 - BETAS[0] ** number)
        moved -= LR * corrected / ((v / (1 - BETAS[1] ** number)).sqrt() + EPS)
        values, first, second = moved.to(master), m.to(state), v.to(state)
    return values, first, second


@pytest.mark.slow_cells("3-bf16 moments")
@pytest.mark.claims(
    "bf16.bf16_master_weights_and_grads",
    "bf16.bf16_optimizer_states",
    "fp16.fp16_master_weights_and_grads",
)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("stage", [1, 2, 3])
@on_ranks(2)
def test_the_weights_are_what_adamw_rounds_to(stage: int, mode: str) -> None:
    master, state, sections = MODES[mode]
    engine = engine_of(stage, Leaves(SHAPES), optimizer=ADAMW, **sections)
    for step in range(STEPS):
        gradients = given_gradients(SHAPES, step, torch.distributed.get_rank())
        engine.backward(engine([one.to(master) for one in gradients]))
        engine.step()
    assert engine.skipped_steps == 0
    buckets = engine._parts.runtime.buckets
    assert all(b.master.data_ptr() == b.shard.data_ptr() for b in buckets)
    for held in engine.optimizer.state.values():
        assert held["exp_avg"].dtype == held["exp_avg_sq"].dtype == state
    found = engine.state_dict()
    means = [mean_gradients(SHAPES, step) for step in range(STEPS)]
    differs = numel = 0
    for index, leaf in enumerate(Leaves(SHAPES).leaves):
        gradients = [step[index] for step in means]
        expected, _, _ = by_hand(leaf.detach(), gradients, master, state)
        value = found[f"leaves.{index}"]
        assert value.dtype == master
        # The kernel computes in fp32, this in fp64: now and then a value falls to the other side.
        unit = torch.finfo(master).eps * expected.float().abs() + 2.0**-14
        assert bool(((value.float() - expected.float()).abs() <= unit).all())
        differs += int((value != expected).sum())
        numel += value.numel()
        with_masters, _, _ = by_hand(leaf.detach(), gradients, torch.float32, torch.float32)
        assert (value.float() != with_masters.to(master).float()).float().mean() > 0.1
    assert differs < 0.02 * numel, differs / numel
    engine.destroy()


@pytest.mark.fast_cells("fp16")
@pytest.mark.parametrize("mode", MODES)
@on_ranks(2)
def test_training_without_masters_resumes_bit_for_bit(mode: str, tmp_path: Path) -> None:
    """Saved after three updates and loaded into a new engine, training continues bit for bit."""
    master, _, sections = MODES[mode]

    def made() -> Any:
        return engine_of(2, Leaves(SHAPES), optimizer=ADAMW, **sections)

    def train(engine: Any, steps: range) -> None:
        for step in steps:
            gradients = given_gradients(SHAPES, step, torch.distributed.get_rank())
            engine.backward(engine([one.to(master) for one in gradients]))
            engine.step()

    whole, again = made(), made()
    train(whole, range(3))
    whole.save_checkpoint(tmp_path)
    train(whole, range(3, STEPS))
    again.load_checkpoint(tmp_path)
    train(again, range(3, STEPS))
    expected = whole.state_dict()
    for name, value in again.state_dict().items():
        assert torch.equal(value, expected[name]), name
    whole.destroy()
    again.destroy()


def step_small(stage: int, mode: str) -> float:
    """A step below half a unit in the last place: without a master it is lost."""
    master, _, sections = MODES[mode]
    sgd = {"type": "SGD", "params": {"lr": torch.finfo(master).eps / 16}}
    model = Leaves([(20,)])
    with torch.no_grad():
        model.leaves[0].fill_(1.0)
    engine = engine_of(stage, model, optimizer=sgd, **sections)
    for _ in range(16):
        engine.backward(engine([torch.ones(20, dtype=master)]))
        engine.step()
    value = float(engine.state_dict()["leaves.0"][0])
    engine.destroy()
    return value


@pytest.mark.parametrize("mode", ["bf16", "fp16"])
def test_updates_below_the_weights_precision_are_lost(mode: str, ranks: RankPools) -> None:
    """The price of having no masters: with them 16 such steps add up (the matrix shows it)."""
    assert ranks(2).run(step_small, 2, mode) == [1.0, 1.0]


def train_with_another_optimizer() -> None:
    rms = {"type": "RMSprop", "params": {"lr": 0.1}}
    engine = engine_of(1, Leaves(SHAPES), optimizer=rms, **MODES["bf16"][2])
    engine.backward(engine([torch.ones(shape).bfloat16() for shape in SHAPES]))
    engine.step()


def test_an_optimizer_that_cannot_keep_finer_moments_is_refused(ranks: RankPools) -> None:
    for error in ranks(2).raises(train_with_another_optimizer):
        assert isinstance(error, OptimizerError)
        assert "RMSprop" in str(error)
