"""amp: Apex's levels and keywords, seen in dtypes, scales and numbers."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

import pytest
import torch
from ranks import RankPools, on_ranks
from torch import Tensor, nn
from torch.nn import functional as F

from engine.toys import engine_of
from hadal.config import load_config

F16, F32, BF16 = torch.float16, torch.float32, torch.bfloat16
SGD = {"type": "SGD", "params": {"lr": 0.25}}


class Net(nn.Module):
    """A layer, batch norm, a layer; notes the dtypes of what passes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.into = nn.Linear(4, 6)
        self.norm = nn.BatchNorm1d(6)
        self.out = nn.Linear(6, 2)
        self.seen: dict[str, torch.dtype] = {}

    def forward(self, inputs: Tensor) -> dict[str, Tensor]:
        hidden = self.into(inputs)
        outputs = self.out(self.norm(hidden).to(self.out.weight.dtype))
        self.seen = {"inputs": inputs.dtype, "hidden": hidden.dtype}
        return {"logits": outputs}


class Seen(NamedTuple):
    """Dtypes, and whether the weight has a separate master."""

    inputs: torch.dtype
    hidden: torch.dtype
    outputs: torch.dtype
    weight: torch.dtype
    norm: torch.dtype
    statistics: torch.dtype
    keeps_master: bool
    scale: float


def inputs_of(step: int) -> Tensor:
    return torch.randn(8, 4, generator=torch.Generator().manual_seed(step))


def amp_engine(**keys: Any) -> Any:
    return engine_of(0, Net(), optimizer=SGD, amp={"enabled": True, **keys})


def seen_under(**keys: Any) -> Seen:
    engine = amp_engine(**keys)
    outputs = engine(inputs_of(0))["logits"]
    engine.backward(outputs.float().square().mean() * 2.0**-8)
    engine.step()
    net = engine.module
    bucket = engine._parts.runtime.bucket_of[net.into.weight]
    seen = Seen(
        net.seen["inputs"],
        net.seen["hidden"],
        outputs.dtype,
        net.into.weight.dtype,
        net.norm.weight.dtype,
        net.norm.running_mean.dtype,
        bucket.precision.keeps_master,
        engine.loss_scale,
    )
    assert engine.skipped_steps == 0
    assert (bucket.master.dtype == F32) == (seen.keeps_master or seen.weight == F32)
    assert bucket.precision.state_dtype == F32
    engine.destroy()
    return seen


def look_at(keys: dict[str, Any], expected: Seen) -> None:
    assert seen_under(**keys) == expected


O0 = Seen(F32, F32, F32, F32, F32, F32, False, 1.0)
O1 = Seen(F32, F16, F16, F32, F32, F32, False, 65536.0)
O2 = Seen(F16, F16, F32, F16, F32, F32, True, 65536.0)
O3 = Seen(F16, F16, F32, F16, F16, F16, False, 1.0)
BY_KEYWORD = {
    "level O0": ({"opt_level": "O0"}, O0),
    "no level is O1": ({}, O1),
    "level O1": ({"opt_level": "O1"}, O1),
    "level O2": ({"opt_level": "O2"}, O2),
    "level O3": ({"opt_level": "O3"}, O3),
    "cast_model_type": (
        {"opt_level": "O2", "cast_model_type": "torch.bfloat16"},
        O2._replace(inputs=BF16, hidden=BF16, weight=BF16),
    ),
    "patch_torch_functions": (
        {"patch_torch_functions": False},
        O1._replace(hidden=F32, outputs=F32),
    ),
    "keep_batchnorm_fp32": (
        {"opt_level": "O3", "keep_batchnorm_fp32": "True"},
        O3._replace(norm=F32, statistics=F32),
    ),
    "master_weights": (
        {"opt_level": "O2", "master_weights": False},
        O2._replace(keeps_master=False),
    ),
    "a static loss_scale": ({"opt_level": "O2", "loss_scale": 128}, O2._replace(scale=128.0)),
    "a dynamic loss_scale": (
        {"opt_level": "O3", "loss_scale": "dynamic"},
        O3._replace(scale=65536.0),
    ),
    "max_loss_scale": ({"max_loss_scale": 1024}, O1._replace(scale=1024.0)),
    "min_loss_scale": ({"min_loss_scale": 131072}, O1._replace(scale=131072.0)),
    "cast_model_outputs": ({"cast_model_outputs": "bf16"}, O1._replace(outputs=BF16)),
}


@pytest.mark.claims("amp", "amp.enabled", "amp.opt_level", "amp.<apex keyword>")
@pytest.mark.parametrize("name", BY_KEYWORD)
def test_a_level_and_its_keywords_choose_dtypes_and_scale(name: str, ranks: RankPools) -> None:
    ranks(1).run(look_at, *BY_KEYWORD[name])


@pytest.mark.claims("amp.enabled")
@on_ranks(1)
def test_amp_that_is_off_changes_nothing() -> None:
    engine = engine_of(0, Net(), amp={"enabled": False, "opt_level": "O2"})
    engine.backward(engine(inputs_of(0))["logits"].square().mean())
    assert engine.module.seen == {"inputs": F32, "hidden": F32}
    assert engine.loss_scale == 1.0
    engine.destroy()


def move_the_scale() -> list[float]:
    """Apex's scale: halved by each overflow, down to its floor, never an error."""
    engine = amp_engine(min_loss_scale=16384)
    scales = []
    for letter in "OOO.O":
        loss = engine(inputs_of(0))["logits"].float().square().mean()
        engine.backward(loss * float("inf") if letter == "O" else loss)
        engine.step()
        scales.append(engine.loss_scale)
    assert engine.skipped_steps == 4
    rule = engine._parts.scale_rule
    assert (rule.window, rule.maximum) == (2000, 2.0**24)
    engine.destroy()
    return scales


@pytest.mark.claims("amp.<apex keyword>")
def test_the_scale_halves_at_each_overflow_down_to_its_floor(ranks: RankPools) -> None:
    for scales in ranks(2).run(move_the_scale):
        assert scales == [32768, 16384, 16384, 16384, 16384]


def autocast_alone(steps: int) -> tuple[list[float], Tensor]:
    """Level O1 in plain torch: fp32 weights, fp16 autocast, a scaled loss."""
    net, losses = Net(), []
    optimizer = torch.optim.SGD(net.parameters(), lr=0.25)
    for step in range(steps):
        with torch.autocast("cpu", dtype=F16):
            outputs = net(inputs_of(step))["logits"]
        loss = F.mse_loss(outputs.float(), torch.ones(8, 2))
        (loss * 256.0).backward()
        for parameter in net.parameters():
            parameter.grad.div_(256.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, net.into.weight.detach()


def train_at(level: str, steps: int) -> None:
    engine = amp_engine(opt_level=level, **({} if level == "O0" else {"loss_scale": 256}))
    losses = []
    for step in range(steps):
        loss = F.mse_loss(engine(inputs_of(step))["logits"].float(), torch.ones(8, 2))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    weight = engine.state_dict()["into.weight"].float()
    engine.destroy()
    expected, expected_weight = autocast_alone(steps)
    if level == "O1":
        assert losses == pytest.approx(expected, rel=1e-6)
        assert torch.allclose(weight, expected_weight, rtol=1e-6, atol=1e-7)
    else:
        # The same training up to fp16's rounding of weights and activations.
        assert losses == pytest.approx(expected, rel=0.02)
    assert losses[-1] < losses[0]


@pytest.mark.claims("amp", "amp.opt_level")
@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3"])
def test_every_level_trains(level: str, ranks: RankPools) -> None:
    ranks(1).run(train_at, level, 5)


@pytest.mark.claims("amp.<apex keyword>")
def test_meaningless_keywords_are_reported() -> None:
    keys = {"amp": {"enabled": True, "verbosity": 0, "num_losses": 2}}
    notes = load_config({"train_batch_size": 8, **keys}).notes
    assert notes == (
        "amp.num_losses: 2 has no effect",
        "amp.verbosity: 0 has no effect",
    )


@pytest.mark.claims("amp.<apex keyword>")
@pytest.mark.parametrize(
    ("keys", "told"),
    [
        ({"master_weights": True}, ["master_weights"]),
        ({"opt_level": "O0", "keep_batchnorm_fp32": True}, ["keep_batchnorm_fp32"]),
        ({"opt_level": "O2", "keep_batchnorm_fp32": False, "master_weights": None}, []),
        ({"opt_level": "O3", "min_loss_scale": 2}, ["min_loss_scale"]),
        ({"loss_scale": 8, "max_loss_scale": 16}, ["max_loss_scale"]),
        ({"max_loss_scale": 16}, []),
    ],
)
def test_keywords_without_effect_at_a_level_are_reported(
    keys: dict[str, Any], told: list[str]
) -> None:
    notes = load_config({"train_batch_size": 8, "amp": {"enabled": True, **keys}}).notes
    assert [note.partition(": ")[0] for note in notes] == [f"amp.{name}" for name in told]
    assert all(re.search("has no effect (with|unless)", note) for note in notes)
