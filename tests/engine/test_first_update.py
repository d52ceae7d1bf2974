"""Mistakes that train nothing, or count wrong, are reported once during the first update."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import warnings
from typing import Any

import pytest
import torch
from ranks import RankPools
from torch import Tensor

from engine.logs import logged
from engine.toys import ROWS, engine_of, loss_of, model_of, train
from hadal.engine.mistakes import batch_size
from hadal.errors import UsageError


def told_of_batches(sizes: list[int], training: bool = True) -> list[str]:
    """The log of batches of these sizes, one update each."""
    with logged() as messages:
        engine = engine_of(2)
        engine.train(training)
        for size in sizes:
            loss = loss_of(engine(torch.ones(size, 6)), torch.ones(size, 4))
            engine.backward(loss)
            engine.step()
    assert all(listener.name != "_first_update" for listener in engine._state.listeners)
    engine.destroy()
    return messages


def test_a_first_batch_of_another_size_is_logged_once(ranks: RankPools) -> None:
    first, second = ranks(2).run(told_of_batches, [7, 7, 5])
    (message,) = first
    assert "the first batch has 7 samples" in message
    assert "train_micro_batch_size_per_gpu is 3" in message
    assert second == []


def test_a_smaller_last_batch_is_valid(ranks: RankPools) -> None:
    assert ranks(1).run(told_of_batches, [ROWS, ROWS, 1]) == [[]]
    assert ranks(1).run(told_of_batches, [7], False) == [[]]


def test_pairs_and_other_multiples_are_valid(ranks: RankPools) -> None:
    assert ranks(1).run(told_of_batches, [2 * ROWS, ROWS]) == [[]]
    assert "the first batch has 2 samples" in ranks(1).run(told_of_batches, [2])[0][0]


def run_nested(stage: int) -> list[str]:
    """An input of sequences of different lengths, which has no shape."""
    with logged() as messages, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own: nested tensors are a prototype
        nested = torch.nested.nested_tensor([torch.ones(2, 6), torch.ones(5, 6)])
        engine = engine_of(stage, torch.nn.Sequential(torch.nn.Linear(6, 4)))
        engine.backward(engine(nested).to_padded_tensor(0.0).mean())
        engine.step()
    engine.destroy()
    return messages


@pytest.mark.parametrize("stage", [1, 3])
def test_nested_tensors_are_valid_inputs(stage: int, ranks: RankPools) -> None:
    assert ranks(2).run(run_nested, stage) == [[], []]


def test_the_batch_is_dimension_0_where_nothing_else_can_be_meant() -> None:
    batch = torch.ones(4, 2)
    for inputs in ((batch,), ([torch.tensor(1.0), batch],), ({"x": {"y": (batch,)}},), (3, batch)):
        assert batch_size(inputs, 3) == 4
    unclear: list[tuple[Any, ...]] = [
        ("text", None, torch.tensor(2.0)),
        (batch, torch.ones(5)),
        (torch.ones(5, 3),),
        (torch.ones(4),),
    ]
    for inputs in unclear:
        assert batch_size(inputs, 3) == 3


class SequenceFirst(torch.nn.Module):
    """Takes (length, batch, features)."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = model_of()

    def forward(self, values: Tensor) -> Any:
        return self.inner(values)


def told_of_sequences() -> list[str]:
    with logged() as messages:
        engine = engine_of(1, SequenceFirst())
        loss = engine(torch.ones(5, ROWS, 6)).mean()
        engine.backward(loss)
        engine.step()
        engine.destroy()
    return messages


def test_a_batch_in_the_second_dimension_is_valid(ranks: RankPools) -> None:
    assert ranks(1).run(told_of_sequences) == [[]]


def told_without_steps(backwards: int, accumulation: int, fails: bool = False) -> list[str]:
    with logged() as messages, contextlib.suppress(ZeroDivisionError):
        engine = engine_of(1, gradient_accumulation_steps=accumulation)
        for _ in range(backwards):
            engine.backward(loss_of(engine(torch.ones(ROWS, 6)), torch.ones(ROWS, 4)))
        try:
            1 / (not fails)
        finally:
            engine.destroy()
    return messages


def test_backwards_without_a_step_are_reported_once(ranks: RankPools) -> None:
    assert ranks(1).run(told_without_steps, 0, 1) == [[]]
    assert ranks(1).run(told_without_steps, 9, 1, True) == [[]]  # an error is report enough
    for backwards, accumulation, counted in ((16, 1, 10), (9, 1, 9), (15, 4, 15)):
        ((message,),) = ranks(1).run(told_without_steps, backwards, accumulation)
        assert "engine.step() was never called" in message
        assert f"{counted} backward passes" in message


def several_losses() -> list[str]:
    """Many backwards in each micro-step, and a step after them."""
    with logged() as messages:
        engine = engine_of(1, gradient_accumulation_steps=4)
        for _ in range(4):
            for _ in range(6):
                engine.backward(loss_of(engine(torch.ones(ROWS, 6)), torch.ones(ROWS, 4)))
            engine.step()
        train(engine, range(2))
        engine.destroy()
    return messages


def test_several_losses_in_a_micro_step_are_valid(ranks: RankPools) -> None:
    assert ranks(1).run(several_losses) == [[]]


PROGRAM = """
import torch, hadal
model = torch.nn.Linear(2, 2)
config = {{"train_micro_batch_size_per_gpu": 4, "optimizer": {{"type": "Adam", "params": {{}}}}}}
engine, *_ = hadal.initialize(model=model, config=config)
engine.backward(engine(torch.ones(4, 2)).sum())
{end}
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("end", "is_told"), [("", True), ("engine.step()", False), ("raise ValueError", False)]
)
def test_a_program_that_ends_without_a_step_is_reported(end: str, is_told: bool) -> None:
    command = [sys.executable, "-c", PROGRAM.format(end=end)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ("engine.step() was never called" in ended.stderr) == is_told, ended.stderr


@pytest.mark.parametrize("stage", [0, 3])
def test_a_gradient_that_the_program_sets_is_an_error(stage: int) -> None:
    engine = engine_of(stage, gradient_accumulation_steps=1)
    engine.backward(loss_of(engine(torch.ones(ROWS, 6)), torch.ones(ROWS, 4)))
    parameter = next(engine.module.parameters())
    parameter.grad = torch.zeros_like(parameter)
    with pytest.raises(UsageError, match=r"\.grad was set between .*safe_set_full_grad"):
        engine.step()
    parameter.grad = None
    engine.destroy()


def update_on_another_loss(stage: int) -> list[str]:
    with logged() as messages:
        engine = engine_of(stage, gradient_accumulation_steps=1)
        for _ in range(2):
            engine(torch.ones(ROWS, 6))
            engine.backward(model_of()(torch.ones(ROWS, 6)).float().sum())
            engine.step()
    engine.destroy()
    return messages


@pytest.mark.parametrize("stage", [0, 3])
def test_a_loss_that_no_gradient_reaches_is_reported_once(ranks: RankPools, stage: int) -> None:
    (message,), others = ranks(2).run(update_on_another_loss, stage)
    assert others == []
    assert "all gradients of the first update are 0 on all ranks" in message
