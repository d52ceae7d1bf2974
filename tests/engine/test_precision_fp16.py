"""fp16: inputs that are cast, the loss scale's two machines, and who overflowed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ranks import RankPools, on_ranks
from torch import nn

import hadal
from engine.logs import logged
from engine.toys import Leaves, config_of, engine_of, model_of
from hadal import comm
from hadal.config import load_config
from hadal.errors import LossScaleError

STAGES = [0, 1, 2, 3]
INF = float("inf")
SGD = {"type": "SGD", "params": {"lr": 0.5}}


def fp16(**keys: Any) -> dict[str, Any]:
    return {"fp16": {"enabled": True, **keys}}


# ---- inputs --------------------------------------------------------------------------------------


class Notes(nn.Module):
    """Notes the dtypes it is given, and computes in its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.seen: list[torch.dtype] = []

    def forward(self, inputs: Any, more: Any = ()) -> torch.Tensor:
        self.seen = [inputs.dtype, *(one.dtype for one in more)]
        return self.layer(inputs.to(self.layer.weight.dtype))


def notice_inputs(stage: int, casts: bool) -> None:
    engine = engine_of(stage, Notes(), **fp16(auto_cast=casts))
    inputs = torch.ones(1, 2)
    engine.backward(engine(inputs, more=(inputs, torch.arange(2))).float().sum())
    expected = torch.float16 if casts else torch.float32
    assert engine.module.seen == [expected, expected, torch.int64]
    engine.step()
    assert engine.module.layer.weight.dtype == torch.float16
    engine.destroy()


@pytest.mark.claims("fp16", "fp16.enabled", "fp16.auto_cast")
@pytest.mark.parametrize("casts", [False, True])
def test_auto_cast_casts_the_floating_point_inputs(casts: bool, ranks: RankPools) -> None:
    ranks(1).run(notice_inputs, 0, casts)
    ranks(2).run(notice_inputs, 3, casts)


# ---- the scale -----------------------------------------------------------------------------------

# What DeepSpeed's two machines did under these overflows (O; a dot is a clean update): the scale
# after each update, and whether the last overflow ends training.
FOLLOWS = {
    "A": (
        {"initial_scale_power": 10, "loss_scale_window": 3, "hysteresis": 2},
        "OO..OO.....O....",
        [1024, 512, 512, 512, 256, 128, 128, 128, 128, 256, 256, 256, 256, 256, 256, 512],
    ),
    "B": (
        {
            "initial_scale_power": 10,
            "loss_scale_window": 3,
            "hysteresis": 2,
            "consecutive_hysteresis": True,
        },
        "O.OO.O..",
        [1024, 1024, 1024, 512, 512, 512, 512, 512],
    ),
    "C": ({"initial_scale_power": 2, "hysteresis": 1}, "OOO", [2, 1, None]),
    "D": (
        {"initial_scale_power": 3, "hysteresis": 1, "min_loss_scale": 3},
        "OOO",
        [4, 3, None],
    ),
    "E": (
        {"initial_scale_power": 2, "loss_scale_window": 2},
        "........",
        [4, 4, 8, 8, 16, 16, 32, 32],
    ),
    "G": (
        {"initial_scale_power": 2, "loss_scale_window": 1, "hysteresis": 1},
        ".....O...",
        [4, 8, 16, 32, 64, 32, 32, 64, 128],
    ),
    "W": (
        {"initial_scale_power": 10, "loss_scale_window": 3, "min_loss_scale": 256},
        "OO..OO.....O",
        [512, 256, 256, 256, 256, 256, 256, 256, 256, 512, 512, 256],
    ),
}


def follow(stage: int, name: str) -> None:
    keys, letters, expected = FOLLOWS[name]
    engine = engine_of(stage, optimizer=SGD, **fp16(**keys))
    last = comm.get_rank() == comm.get_world_size() - 1
    inputs = torch.linspace(-1, 1, 18).reshape(3, 6).half()
    scales: list[float | None] = []
    for number, letter in enumerate(letters):
        loss = engine(inputs).float().square().mean() * 1e-3
        engine.backward(loss * INF if letter == "O" and last else loss)
        if expected[number] is None:
            with pytest.raises(LossScaleError, match="train in bf16"):
                engine.step()
            scales.append(None)
        else:
            engine.step()
            scales.append(engine.loss_scale)
        assert engine.overflow == (letter == "O")
        assert (engine.get_global_grad_norm() == INF) == (letter == "O")
    assert scales == expected
    assert engine.skipped_steps == letters.count("O")
    engine.destroy()


@pytest.mark.fast_cells("C", "D")
@pytest.mark.claims(
    "fp16.loss_scale",
    "fp16.initial_scale_power",
    "fp16.loss_scale_window",
    "fp16.hysteresis",
    "fp16.consecutive_hysteresis",
    "fp16.min_loss_scale",
)
@pytest.mark.parametrize("name", FOLLOWS)
def test_the_scale_follows_the_recorded_machines(name: str, ranks: RankPools) -> None:
    for stage in {"A": [1, 2, 3], "W": [0]}.get(name, [3]):
        ranks(2).run(follow, stage, name)
    if name in ("A", "W"):
        # The machine goes by the stage that is configured, with one process too.
        ranks(1).run(follow, 0 if name == "W" else 2, name)


@pytest.mark.slow_cells("3")
@pytest.mark.claims("fp16.loss_scale")
@pytest.mark.parametrize("stage", STAGES)
@on_ranks(2)
def test_a_static_scale_stays_and_overflows_are_skipped(stage: int) -> None:
    engine = engine_of(stage, optimizer=SGD, **fp16(loss_scale=128))
    inputs = torch.linspace(-1, 1, 18).reshape(3, 6).half()
    for number, letter in enumerate("O.OO."):
        before = engine.state_dict()
        loss = engine(inputs).float().square().mean()
        engine.backward(loss * INF if letter == "O" else loss)
        engine.step()
        assert engine.loss_scale == 128
        moved = not torch.equal(engine.state_dict()["0.weight"], before["0.weight"])
        assert moved == (letter == "."), number
    assert engine.skipped_steps == 3
    assert engine.global_steps == 5
    engine.destroy()


@pytest.mark.claims("fp16.hysteresis", "fp16.consecutive_hysteresis")
def test_keys_without_effect_without_zero_are_reported() -> None:
    keys = fp16(hysteresis=2, consecutive_hysteresis=True)
    (note,) = load_config({"train_batch_size": 8, **keys}).notes
    assert note.startswith("fp16.hysteresis, fp16.consecutive_hysteresis: has no effect at")
    for quiet in (
        {**keys, "zero_optimization": {"stage": 1}},
        fp16(hysteresis=2, loss_scale=8),
        {"fp16": {"enabled": False, "hysteresis": 3}},
        fp16(),
    ):
        assert load_config({"train_batch_size": 8, **quiet}).notes == ()


# ---- who overflowed ------------------------------------------------------------------------------

SHAPES = ((30,), (5, 4), (), (70,), (3,))


def overflow_in(stage: int, where: list[int], name: str) -> list[str]:
    """Each rank's gradient of its own leaf is infinite; the first in the model's order is named."""
    engine = engine_of(stage, Leaves(SHAPES), **fp16(initial_scale_power=4, hysteresis=1))
    mine = where[comm.get_rank()]

    def step(bad: int | None) -> None:
        gradients = [torch.full(shape, 2.0**-4).half() for shape in SHAPES]
        if bad is not None:
            gradients[bad].view(-1)[-1] = INF
        engine.backward(engine(gradients))
        engine.step()

    with logged() as messages:
        step(None)
        assert messages == []
        step(mine)
    engine.destroy()
    infinite = ", ".join(map(str, range(comm.get_world_size())))
    told = (
        f"update 1 skipped: the gradient of {name} is not finite, nor is the loss on rank"
        f" {infinite}; loss scale 16 -> 8"
    )
    assert messages == ([told] if comm.get_rank() == 0 else [])
    return messages


@pytest.mark.parametrize("stage", STAGES)
def test_an_overflow_names_the_first_parameter(stage: int, ranks: RankPools) -> None:
    ranks(2).run(overflow_in, stage, [3, 1], "leaves.1")
    ranks(2).run(overflow_in, stage, [4, 4], "leaves.4")
    ranks(1).run(overflow_in, stage, [2], "leaves.2")


@on_ranks(2)
def test_nothing_is_searched_while_all_is_finite() -> None:
    from hadal.engine import update

    def search(*_: Any) -> None:
        raise AssertionError("searched although nothing overflowed")

    before, update.first_overflow = update.first_overflow, search
    try:
        engine = engine_of(1, **fp16(initial_scale_power=4))
        inputs = torch.ones(3, 6).half()
        for _ in range(2):
            engine.backward(engine(inputs).float().mean())
            engine.step()
        assert engine.skipped_steps == 0
        engine.backward(engine(inputs).float().mean() * INF)
        with pytest.raises(AssertionError, match="searched"):
            engine.step()
    finally:
        update.first_overflow = before
    engine.destroy()


def overflow_at_the_floor() -> list[str]:
    engine = engine_of(1, **fp16(initial_scale_power=0))
    with logged() as messages:
        for _ in range(2):
            engine.backward(engine(torch.ones(3, 6).half()).float().mean() * INF)
            if engine.global_steps:
                with pytest.raises(LossScaleError, match=r"floor of the loss scale \(1, update 1"):
                    engine.step()
            else:
                engine.step()
    engine.destroy()
    return messages


@pytest.mark.claims("fp16.min_loss_scale")
def test_the_parameter_is_reported_at_the_floor_too(ranks: RankPools) -> None:
    first, _ = ranks(2).run(overflow_at_the_floor)
    assert [message.partition(":")[0] for message in first] == [
        *("update 0 skipped", "update 1 skipped")
    ]
    assert "0.weight is not finite" in first[1]


# ---- weights that were trained in bf16 -----------------------------------------------------------


def born_in(dtype: torch.dtype, section: str) -> list[str]:
    model = model_of().to(dtype)
    with logged() as messages:
        engine, *_ = hadal.initialize(
            model=model, config=config_of(1, **{section: {"enabled": True}})
        )
    engine.destroy()
    return messages


def test_weights_given_in_bf16_are_warned_of(ranks: RankPools) -> None:
    first, second = ranks(2).run(born_in, torch.bfloat16, "fp16")
    assert second == []
    (message,) = first
    assert message.startswith("6 parameters, the first of them 0.weight, are in bfloat16")
    assert "bf16.enabled true" in message
    assert ranks(2).run(born_in, torch.float32, "fp16") == [[], []]
    assert ranks(2).run(born_in, torch.bfloat16, "bf16") == [[], []]


def born_in_alone(dtype: torch.dtype, frozen: bool) -> list[str]:
    model = model_of().to(dtype).requires_grad_(not frozen)
    with logged() as messages:
        engine, *_ = hadal.initialize(model=model.eval(), config=config_of(1))
    engine.destroy()
    return messages


def test_16_bit_weights_without_a_section_are_warned_of(ranks: RankPools) -> None:
    ((message,),) = ranks(1).run(born_in_alone, torch.float16, False)
    assert message.startswith("6 trainable parameters, the first of them 0.weight, are in fl")
    assert "without a loss scale and without fp32 master weights" in message
    assert '"fp16": {"enabled": true}' in message
    ((message,),) = ranks(1).run(born_in_alone, torch.bfloat16, False)
    assert "they are trained without fp32 master weights" in message
    assert '"bf16": {"enabled": true}' in message
    assert ranks(1).run(born_in_alone, torch.bfloat16, True) == [[]]
    assert ranks(1).run(born_in_alone, torch.float32, False) == [[]]
