"""One update: sharded weights change as whole ones do in plain torch, under any optimizer."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from engine.toys import Leaves, engine_of, given_gradients, mean_gradients
from hypothesis import given, strategies as st
from ranks import RankPools, on_ranks

from hadal import comm
from hadal.optim.norm import clip_coefficient
from hadal.optim.step import FlatStepper, WholeStepper
from hadal.optim.workspace import block_numel

UPDATES = 4
ODD = ((5, 3), (), (7,), (0, 2), (1,), (2, 3, 4), (33,))
MATRICES = ((5, 3), (4, 4), (2, 9), (8, 3), (16, 2))
# The first one alone fills more than one block of the step, and not evenly.
BLOCK = block_numel(torch.device("cpu"))
LARGE = ((BLOCK + 37,), (13,))


@given(st.floats(0, 1e30), st.floats(1e-3, 1e6))
def test_clipping_limits_the_norm(norm, limit):
    factor = clip_coefficient(norm, limit)
    assert 0 <= factor <= 1
    assert norm * factor <= limit * (1 + 1e-12)
    if norm + 1e-6 <= limit:
        assert factor == 1.0
    else:
        assert norm * factor == pytest.approx(limit, rel=1e-6 / max(norm, 1e-3) + 1e-9)


def test_no_limit_clips_nothing():
    assert clip_coefficient(1e9, 0.0) == 1.0
    assert clip_coefficient(2.0, 1.0) == pytest.approx(0.5, rel=1e-6)
    assert clip_coefficient(math.inf, 1.0) == 0.0


def grouped(model: Leaves, groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Assign the parameters to the groups in turn."""
    leaves = list(model.leaves)
    return [
        {**group, "params": leaves[number :: len(groups)]} for number, group in enumerate(groups)
    ]


def train_both(
    stage: int,
    kind: type[torch.optim.Optimizer],
    shapes: tuple[tuple[int, ...], ...],
    options: dict[str, Any],
    groups: list[dict[str, Any]],
    reference: dict[str, Any],
) -> tuple[Any, list[tuple[torch.Tensor, torch.Tensor]]]:
    """Return (Hadal's, torch's) parameters after a few updates with the same gradients."""
    plain, model = Leaves(shapes), Leaves(shapes)
    expected = kind(grouped(plain, groups), **options, **reference)
    optimizer = kind(grouped(model, groups), **options)
    own = optimizer.param_groups
    engine = engine_of(stage, model, {"optimizer": optimizer}, optimizer=None)
    assert engine.optimizer is optimizer
    assert all(one is other for one, other in zip(own, optimizer.param_groups, strict=True))
    for step in range(UPDATES):
        for leaf, mean in zip(plain.leaves, mean_gradients(shapes, step), strict=True):
            leaf.grad = mean
        expected.step()
        engine.backward(engine(given_gradients(shapes, step, comm.get_rank())))
        engine.step()
    stepper = engine.stepper
    engine.destroy()
    pairs = zip(model.leaves, plain.leaves, strict=True)
    return stepper, [(found.detach(), leaf.detach()) for found, leaf in pairs]


# ---- Adam in blocks -----------------------------------------------------------------------------

ADAM_GROUPS = [{"lr": 0.02, "weight_decay": 0.1}, {"lr": 0.005}, {"betas": (0.5, 0.9)}]
VARIANTS = [
    {},
    {"amsgrad": True},
    {"maximize": True},
    {"weight_decay": 0.3, "amsgrad": True, "maximize": True},
]


@pytest.mark.fast_cells("0-2")
@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("stage", [0, 1, 3])
@on_ranks("world")
def test_adam_steps_like_torchs_fused_kernel(stage: int) -> None:
    for kind in (torch.optim.Adam, torch.optim.AdamW):
        for number, variant in enumerate(VARIANTS):
            shapes, groups = (LARGE, [{}]) if number == 0 else (ODD, ADAM_GROUPS)
            options = {"lr": 0.01, **variant}
            stepper, pairs = train_both(stage, kind, shapes, options, groups, {"fused": True})
            assert type(stepper) is FlatStepper
            for found, expected in pairs:
                assert torch.allclose(found, expected, rtol=1e-6, atol=1e-7), (kind, variant)


def hook_adam() -> list[str]:
    calls: list[str] = []
    model = Leaves(ODD)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))
    engine = engine_of(2, model, {"optimizer": optimizer}, optimizer=None)
    engine.backward(engine(given_gradients(ODD, 0, comm.get_rank())))
    engine.step()
    engine.destroy()
    return calls


def test_the_users_step_hooks_are_called_once_per_update(ranks: RankPools) -> None:
    assert ranks(2).run(hook_adam) == [["before", "after"]] * 2


# ---- other elementwise optimizers ---------------------------------------------------------------

ELEMENTWISE = [
    (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}),
    (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    (torch.optim.RMSprop, {"lr": 0.01, "momentum": 0.5, "centered": True}),
    (torch.optim.Adagrad, {"lr": 0.1, "lr_decay": 0.01}),
    (torch.optim.NAdam, {"lr": 0.01}),
    (torch.optim.RAdam, {"lr": 0.01}),
    (torch.optim.Adamax, {"lr": 0.01}),
    (torch.optim.Adadelta, {"lr": 1.0}),
    (torch.optim.ASGD, {"lr": 0.1}),
    (torch.optim.Rprop, {"lr": 0.01}),
]


@pytest.mark.fast_cells("SGD-options1")
@pytest.mark.parametrize(("kind", "options"), ELEMENTWISE)
@on_ranks(2)
def test_elementwise_optimizers_step_flat_shards(
    kind: type[torch.optim.Optimizer], options: dict[str, Any]
) -> None:
    for stage in (0, 2, 3):
        groups = [{}, {"lr": options["lr"] / 4}]
        stepper, pairs = train_both(stage, kind, ODD, options, groups, {"foreach": False})
        assert type(stepper) is FlatStepper
        for found, expected in pairs:
            assert torch.allclose(found, expected, rtol=1e-6, atol=1e-7), stage


# ---- optimizers that must see whole parameters --------------------------------------------------


class OwnAdam(torch.optim.AdamW):
    """An optimizer whose update depends on a whole tensor."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                scale = parameter.grad.norm() + 1e-3 if parameter.numel() else 1.0
                parameter.add_(parameter.grad / scale, alpha=-group["lr"])


WHOLE = [
    (torch.optim.Muon, MATRICES, {"lr": 0.1, "momentum": 0.9}),
    (torch.optim.Adafactor, (*MATRICES, (), (7,), (2, 3, 4)), {"lr": 0.05, "weight_decay": 0.1}),
    (OwnAdam, ODD, {"lr": 0.1}),
]


@pytest.mark.fast_cells("2-1", "3-1", "3-3")
@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@on_ranks("world")
def test_whole_parameters_are_stepped_bit_for_bit(stage: int) -> None:
    for kind, shapes, options in WHOLE:
        groups = [{}, {"lr": options["lr"] / 2}]
        stepper, pairs = train_both(stage, kind, shapes, options, groups, {})
        assert type(stepper) is WholeStepper
        for found, expected in pairs:
            assert torch.equal(found, expected), kind


@pytest.mark.fast_cells("3")
@pytest.mark.parametrize("stage", [0, 1, 3])
@on_ranks(2)
def test_whole_parameters_have_masters(stage: int) -> None:
    """Whole parameters have fp32 masters too, so many small updates of bf16 weights add up."""
    model = Leaves(((4, 4), (3, 4)))
    with torch.no_grad():
        for leaf in model.leaves:
            leaf.fill_(256.0)
    engine = engine_of(
        stage,
        model,
        {"optimizer": OwnAdam(model.parameters(), lr=0.5)},
        optimizer=None,
        bf16={"enabled": True},
    )
    for _ in range(16):
        engine.backward(engine([torch.ones(4, 4).bfloat16(), torch.ones(3, 4).bfloat16()]))
        engine.step()
    engine.destroy()
    # One update moves an element by about 0.5 / 4; the spacing of bfloat16 at 256 is 1 below it.
    moved = 16 * 0.5 / 4.001
    mean = float(model.leaves[0].detach().float().mean())
    assert mean == pytest.approx(256 - moved, abs=0.5)


def own_fewer_parameters_than_ranks(stage: int) -> int:
    _, pairs = train_both(stage, torch.optim.Muon, ((4, 3),), {"lr": 0.1}, [{}], {})
    assert all(torch.equal(found, expected) for found, expected in pairs)
    return len(pairs)


def test_a_rank_may_own_nothing(ranks: RankPools) -> None:
    assert ranks(3).run(own_fewer_parameters_than_ranks, 2) == [1] * 3


# ---- optimizers that have stepped before --------------------------------------------------------

BEFORE = 3
STEPPED = [
    (torch.optim.AdamW, ODD, {"lr": 0.01, "amsgrad": True}),
    (torch.optim.SGD, ODD, {"lr": 0.1, "momentum": 0.9}),
    (torch.optim.RMSprop, ODD, {"lr": 0.01, "centered": True}),
    (torch.optim.Muon, MATRICES, {"lr": 0.1, "momentum": 0.9}),
    (torch.optim.Adafactor, (*MATRICES, (), (7,)), {"lr": 0.05}),
]


def step_alone(
    model: Leaves,
    optimizer: torch.optim.Optimizer,
    shapes: tuple[tuple[int, ...], ...],
    steps: range,
) -> None:
    for step in steps:
        for leaf, mean in zip(model.leaves, mean_gradients(shapes, step), strict=True):
            leaf.grad = mean
        optimizer.step()


@pytest.mark.fast_cells("3")
@pytest.mark.parametrize("stage", [0, 1, 3])
@on_ranks(2)
def test_an_optimizer_that_has_stepped_continues(stage: int) -> None:
    """An optimizer's existing state moves with its parameters."""
    for kind, shapes, options in STEPPED:
        plain, model = Leaves(shapes), Leaves(shapes)
        groups = [{}, {"lr": options["lr"] / 2}]
        expected = kind(grouped(plain, groups), **options)
        optimizer = kind(grouped(model, groups), **options)
        step_alone(plain, expected, shapes, range(BEFORE + UPDATES))
        step_alone(model, optimizer, shapes, range(BEFORE))
        engine = engine_of(stage, model, {"optimizer": optimizer}, optimizer=None)
        for step in range(BEFORE, BEFORE + UPDATES):
            engine.backward(engine(given_gradients(shapes, step, comm.get_rank())))
            engine.step()
        engine.destroy()
        for found, leaf in zip(model.leaves, plain.leaves, strict=True):
            assert torch.allclose(found, leaf, rtol=1e-6, atol=1e-6), kind
