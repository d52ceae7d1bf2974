"""`activation_checkpointing.memory_budget`: as few modules as needed are recomputed."""

from __future__ import annotations

import itertools
import logging
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st
from ranks import on_ranks
from torch import nn

import hadal
from activation_checkpointing.test_modules import Model, engine_of, losses_of
from hadal.config import load_config
from hadal.engine.policies import budget_of
from hadal.plugins.activation_checkpointing import BudgetedModules, measuring
from hadal.plugins.activation_checkpointing.measuring import (
    HostMeter,
    MeasuredBackward,
    MeasuredCall,
    MeasuredStep,
    ModuleChoice,
    choose,
    table,
)

STORED, RECOMPUTED, OFFLOADED = ModuleChoice.STORED, ModuleChoice.RECOMPUTED, ModuleChoice.OFFLOADED


def step_of(*calls: tuple[int, int, float], update: int = 0, base: int = 1000) -> MeasuredStep:
    """A step of modules "0", "1", ...: activation bytes, input bytes and seconds of each, in order.

    Every input is there in forward; a part of backward has the inputs up to its own.
    """
    inputs = list(itertools.accumulate(nbytes for _, nbytes, _ in calls))
    measured = [
        MeasuredCall(str(place), stored, nbytes, seconds, base + inputs[place] + stored)
        for place, (stored, nbytes, seconds) in enumerate(calls)
    ]
    return MeasuredStep((MeasuredBackward(base + inputs[-1], tuple(measured[::-1])),), update)


def chosen(
    step: MeasuredStep, budget: int, count: int, *, offloads: bool = True
) -> list[ModuleChoice]:
    names = [str(place) for place in range(count)]
    verdict = choose([step], names, budget, offloads=offloads)
    assert verdict.peak == step.peak(verdict.choices)
    return list(verdict.choices.values())


def test_equal_modules_are_stored_from_the_last_one() -> None:
    step = step_of(*[(100, 10, 1.0)] * 4)
    # One block's activations are there in any case, and all inputs: 1140.
    assert step.peak(dict.fromkeys("0123", RECOMPUTED)) == 1140
    assert step.peak(dict.fromkeys("0123", STORED)) == 1440
    assert chosen(step, 1440, 4) == [STORED] * 4
    assert chosen(step, 1439, 4) == [RECOMPUTED, STORED, STORED, STORED]
    assert chosen(step, 1240, 4) == [RECOMPUTED, RECOMPUTED, STORED, STORED]
    assert chosen(step, 1140, 4) == [RECOMPUTED, RECOMPUTED, RECOMPUTED, STORED]


def test_modules_with_most_time_per_byte_are_stored() -> None:
    step = step_of((100, 10, 1.0), (120, 10, 5.0), (300, 10, 6.0))
    assert chosen(step, 1450, 3) == [RECOMPUTED, STORED, STORED]
    assert chosen(step, 1330, 3)[1:] == [RECOMPUTED, STORED]


def test_inputs_go_to_the_host_if_recomputing_is_not_enough() -> None:
    step = step_of(*[(100, 50, 1.0)] * 4)
    assert chosen(step, 1299, 4) == [OFFLOADED, RECOMPUTED, RECOMPUTED, RECOMPUTED]
    assert chosen(step, 1299, 4, offloads=False) == [RECOMPUTED] * 4
    verdict = choose([step], list("0123"), 900, offloads=True)
    assert not verdict.fits and set(verdict.choices.values()) == {OFFLOADED}
    assert any("raise it to at least" in line for line in table([step], verdict))


def test_every_rank_must_fit() -> None:
    steps = [step_of(*[(100, 10, 1.0)] * 2), step_of(*[(200, 10, 1.0)] * 2)]
    verdict = choose(steps, ["0", "1"], 1400, offloads=True)
    assert list(verdict.choices.values()) == [RECOMPUTED, STORED]
    assert choose([step_of((9, 9, 1.0), update=5000)], ["0"], 2000, offloads=True).peak == 5000


@given(
    st.lists(st.tuples(st.integers(1, 500), st.integers(0, 50), st.floats(0, 9)), min_size=1),
    st.integers(900, 9000),
)
def test_choices_fit_and_are_needed(calls: list[tuple[int, int, float]], budget: int) -> None:
    step, names = step_of(*calls), [str(place) for place in range(len(calls))]
    verdict = choose([step], names, budget, offloads=False)
    if not verdict.fits:
        assert set(verdict.choices.values()) == {RECOMPUTED}
        return
    for name, choice in verdict.choices.items():
        if choice is RECOMPUTED:
            assert step.peak({**verdict.choices, name: STORED}) > budget


def test_the_meter_of_a_host_counts_allocations_and_frees(monkeypatch: pytest.MonkeyPatch) -> None:
    # Python and torch allocate some 10 kB now and then, which is not what this test is about.
    monkeypatch.setattr(measuring, "allocated_host_nbytes", lambda: 1000)
    meter = HostMeter()
    for _ in range(2):
        meter.take_peak()
        meter.start()
        values = torch.ones(1 << 20) + 1
        torch.cat([values, values]).sum()
        meter.stop()
        # `values`, twice as much, and the 4 bytes of the sum.
        assert meter.take_peak() == 1000 + (3 << 22) + 4
        del values


def test_a_host_counts_the_bytes_of_tensors() -> None:
    before = HostMeter().in_use()
    values = torch.ones(1 << 24)
    assert HostMeter().in_use() - before == pytest.approx(values.nbytes, rel=0.01)


@pytest.mark.claims("activation_checkpointing")
def test_a_share_is_of_the_device() -> None:
    there = hadal.device.total_memory(torch.device("cpu")).total
    for budget, expected in ((0.5, there // 2), (12345678, 12345678), (None, None)):
        section = {"activation_checkpointing": {"memory_budget": budget}}
        config = load_config({"train_batch_size": 1, **section})
        assert budget_of(config, torch.device("cpu")) == expected


def listener_of(engine: Any) -> BudgetedModules:
    (found,) = [one for one in engine.listeners if isinstance(one, BudgetedModules)]
    return found


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 3])
@on_ranks(2)
def test_losses_are_the_same(stage: int) -> None:
    """The same losses with a budget; all ranks choose alike, between nothing and everything."""
    plain = engine_of(None, stage)
    expected = losses_of(plain, updates=6)
    plain.destroy()
    for budget, choice in ((1 << 50, STORED), (1 << 20, RECOMPUTED)):
        engine = engine_of({"memory_budget": budget}, stage)
        assert losses_of(engine, updates=6) == expected
        verdict = listener_of(engine).verdict
        assert verdict is not None
        assert list(verdict.choices.values()) == [choice] * 3
        # Two updates with recomputation, and four with the choice.
        assert engine.module.blocks[0].forwards == 24 - 8 * (choice is STORED)
        engine.destroy()


def test_a_table_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    engine = engine_of({"memory_budget": 1 << 50, "modules": ["blocks.1", "blocks.2"]})
    with caplog.at_level(logging.INFO, "hadal"):
        losses_of(engine, updates=5)
    engine.destroy()
    assert "blocks.1" in caplog.text and "blocks.0" not in caplog.text
    assert "recomputation ms  choice" in caplog.text
    assert "peak measured: " in caplog.text


@pytest.mark.parametrize("budget", [1.5, 80, 16384])
def test_neither_a_share_nor_bytes(budget: float) -> None:
    section = {"activation_checkpointing": {"memory_budget": budget}}
    with pytest.raises(hadal.ConfigError, match=rf"memory_budget.*{budget} is neither a fraction"):
        load_config({"train_batch_size": 1, **section})


def test_a_budget_that_nothing_fits_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    engine = engine_of({"memory_budget": 1 << 20})
    with caplog.at_level(logging.WARNING, "hadal"):
        losses_of(engine)
    engine.destroy()
    assert "no choice fits into activation_checkpointing.memory_budget: raise it" in caplog.text


def test_a_model_without_blocks_is_refused() -> None:
    config = {"train_batch_size": 1, "activation_checkpointing": {"memory_budget": 0.5}}
    with pytest.raises(hadal.ConfigError, match='"units" finds no repeated blocks'):
        hadal.initialize(model=nn.Linear(2, 2), config=config)


def test_an_error_in_the_measured_update_ends_the_measurement() -> None:
    engine = engine_of({"memory_budget": 1})
    losses_of(engine, updates=1)
    with pytest.raises(RuntimeError):
        engine(torch.randn(5, 7))
    assert torch.utils._python_dispatch._get_current_dispatch_mode() is None
    losses_of(engine, updates=1)
    assert listener_of(engine).verdict is not None
    engine.destroy()
    assert isinstance(engine.module, Model)
