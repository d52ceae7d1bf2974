"""torch_autocast: the forward's dtype, the dtype on the wire, the loss scale, torch's numbers."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from ranks import RankPools, on_ranks
from torch import Tensor, nn

from engine.toys import TINY, batch_of, engine_of, loss_of, model_of
from hadal import comm
from hadal.errors import ConfigError, LossScaleError

STAGES = [0, 1, 2, 3]
SGD = {"type": "SGD", "params": {"lr": 0.5}}
HERE = "engine.test_precision_autocast"


def autocast(dtype: str | None, **keys: Any) -> dict[str, Any]:
    return {"torch_autocast": {"enabled": True, "dtype": dtype, **keys}}


class Notes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 4)
        self.seen: torch.dtype | None = None

    def forward(self, inputs: Tensor) -> Tensor:
        outputs = self.layer(inputs)
        self.seen = outputs.dtype
        return outputs


def notice(dtype: str | None, expected: torch.dtype, outer: torch.dtype | None) -> None:
    engine = engine_of(0, Notes(), **autocast(dtype))
    assert engine.module.layer.weight.dtype == torch.float32
    with torch.autocast("cpu", dtype=outer or torch.bfloat16, enabled=outer is not None):
        outputs = engine(batch_of(0)[0])
    assert outputs.dtype == engine.module.seen == expected
    engine.backward(outputs.float().square().mean())
    engine.step()
    assert engine.loss_scale == (65536 if expected is torch.float16 else 1)
    engine.destroy()


NAMES = {
    None: torch.bfloat16,  # torch's choice on a CPU
    "bfloat16": torch.bfloat16,
    "bf16": torch.bfloat16,
    "torch.bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "fp16": torch.float16,
    "half": torch.float16,
    "torch.float16": torch.float16,
}


@pytest.mark.claims("torch_autocast", "torch_autocast.enabled", "torch_autocast.dtype")
@pytest.mark.parametrize("name", NAMES)
def test_the_forward_runs_in_the_dtype_that_is_named(name: str | None, ranks: RankPools) -> None:
    ranks(1).run(notice, name, NAMES[name], None)


def test_autocast_overrides_the_callers_context(ranks: RankPools) -> None:
    ranks(1).run(notice, "bf16", torch.bfloat16, torch.float16)
    ranks(1).run(notice, "fp16", torch.float16, torch.bfloat16)


@pytest.mark.claims("torch_autocast.enabled")
@on_ranks(1)
def test_autocast_that_is_off_changes_nothing() -> None:
    engine = engine_of(0, Notes(), torch_autocast={"enabled": False, "dtype": "bf16"})
    engine(batch_of(0)[0])
    assert engine.module.seen == torch.float32
    engine.destroy()


# ---- the wire ------------------------------------------------------------------------------------


class Scale(nn.Module):
    """Multiplies, which autocast leaves in fp32: its gradient is what the input is."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(20))

    def forward(self, inputs: Tensor) -> Tensor:
        return (self.weight * inputs).sum()


class OtherScale(Scale):
    """The same computation, of another class."""


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.low = Scale()
        self.own = nn.Module()
        self.own.weight = nn.Parameter(torch.zeros(20))
        self.linear = nn.Linear(2, 2)

    def forward(self, inputs: Tensor) -> Tensor:
        # Every rank's gradient is 1 + 2^-12, which bf16 rounds to 1.
        return self.low(inputs) + (self.own.weight * inputs).sum()


def travel(stage: int, safe: list[str] | None, **sections: Any) -> dict[str, float]:
    keys = {} if safe is None else {"lower_precision_safe_modules": safe}
    engine = engine_of(
        stage,
        Two(),
        optimizer={"type": "SGD", "params": {"lr": 1.0}},
        **autocast("bf16", **keys),
        **sections,
    )
    engine.backward(engine(torch.full((20,), 1 + 2.0**-12)))
    engine.step()
    state = engine.state_dict()
    precision = {
        name: engine._parts.runtime.bucket_of[p].precision.reduce
        for name, p in engine.module.named_parameters()
    }
    assert engine.module.low.weight.dtype == torch.float32
    engine.destroy()
    return {
        "low": -float(state["low.weight"][0]),
        "own": -float(state["own.weight"][0]),
        "linear is low": precision["linear.weight"] == torch.bfloat16,
    }


EXACT, ROUNDED = 1 + 2.0**-12, 1.0


@pytest.mark.claims("torch_autocast.lower_precision_safe_modules", "torch_autocast.dtype")
@pytest.mark.parametrize("stage", STAGES)
def test_gradients_of_safe_modules_travel_in_the_low_dtype(stage: int, ranks: RankPools) -> None:
    for found in ranks(2).run(travel, stage, [f"{HERE}.Scale"]):
        assert found == {"low": ROUNDED, "own": EXACT, "linear is low": False}


@pytest.mark.claims("torch_autocast.lower_precision_safe_modules")
@on_ranks(2)
def test_modules_are_safe_by_class() -> None:
    assert travel(1, None) == {"low": EXACT, "own": EXACT, "linear is low": True}
    assert travel(1, []) == {"low": EXACT, "own": EXACT, "linear is low": False}
    subclass = travel(1, [f"{HERE}.OtherScale", "torch.nn.modules.linear.Linear"])
    assert subclass == {"low": EXACT, "own": EXACT, "linear is low": True}
    said = travel(1, [f"{HERE}.Scale"], communication_data_type="fp32")
    assert said == {"low": EXACT, "own": EXACT, "linear is low": False}


def import_wrongly(path: str) -> None:
    safe = ["torch.nn.Linear", path]
    engine_of(1, **autocast("bf16", lower_precision_safe_modules=safe))


@pytest.mark.claims("torch_autocast.lower_precision_safe_modules")
@pytest.mark.parametrize(
    "path", ["torch.nn.Linnear", "no_such_package.Module", "Linear", "torch.nn.functional.relu"]
)
def test_a_class_that_cannot_be_imported_is_named_by_its_path(path: str, ranks: RankPools) -> None:
    for error in ranks(2).raises(import_wrongly, path):
        assert isinstance(error, ConfigError), repr(error)
        (fault,) = error.faults
        assert fault.path == "torch_autocast.lower_precision_safe_modules[1]"
        assert f'"{path}" cannot be imported' in fault.message


# ---- the scale -----------------------------------------------------------------------------------


def scale_with_autocast(stage: int) -> list[float | None]:
    engine = engine_of(
        stage,
        optimizer=SGD,
        **autocast("fp16"),
        fp16={"initial_scale_power": 2, "loss_scale_window": 1, "hysteresis": 1},
    )
    scales: list[float | None] = []
    for letter in "..OOOO":
        loss = loss_of(engine(batch_of(0)[0]), batch_of(0)[1])
        engine.backward(loss * float("inf") if letter == "O" else loss)
        try:
            engine.step()
            scales.append(engine.loss_scale)
        except LossScaleError:
            scales.append(None)
    engine.destroy()
    return scales


@pytest.mark.claims("torch_autocast.enabled")
@pytest.mark.parametrize("stage", STAGES)
def test_fp16_autocast_scales_the_loss_at_every_stage(stage: int, ranks: RankPools) -> None:
    for scales in ranks(2).run(scale_with_autocast, stage):
        assert scales == [4, 8, 4, 2, 1, 1 if stage == 0 else None]


# ---- the numbers ---------------------------------------------------------------------------------


@pytest.mark.slow_cells("3-fp16")
@pytest.mark.parametrize("name", ["bf16", "fp16"])
@pytest.mark.parametrize("stage", STAGES)
@on_ranks(2)
def test_it_trains_as_torch_autocast_does(stage: int, name: str) -> None:
    """The results of one process under torch.autocast on the batches of all ranks.

    A gradient is rounded once where it leaves its rank, and where means travel back (stage 0) once
    more. What that moves a weight by is doubled, because it changes later gradients as well.
    """
    dtype, rate = NAMES[name], 0.5
    unit, hops = torch.finfo(dtype).eps / 2, 2 if stage == 0 else 1
    engine = engine_of(stage, optimizer=SGD, **autocast(name), fp16={"initial_scale_power": 8})
    plain, world = model_of(), comm.get_world_size()
    scale = 256.0 if dtype is torch.float16 else 1.0
    allowed = dict.fromkeys(plain.state_dict(), 1e-6)
    for step in range(4):
        sums = {key: torch.zeros_like(value) for key, value in plain.state_dict().items()}
        for rank in range(world):
            inputs, targets = batch_of(step, rank)
            with torch.autocast("cpu", dtype=dtype):
                outputs = plain(inputs)
            loss = loss_of(outputs, targets)
            if rank == comm.get_rank():
                expected = loss.item()
            (loss * (scale / world)).backward()
            for key, parameter in plain.named_parameters():
                gradient = parameter.grad / scale
                sums[key] += gradient
                allowed[key] += 2 * hops * unit * rate * float(gradient.abs().max())
                parameter.grad = None
        with torch.no_grad():
            for key, parameter in plain.named_parameters():
                parameter -= rate * sums[key]
        inputs, targets = batch_of(step)
        loss = loss_of(engine(inputs), targets)
        engine.backward(loss)
        engine.step()
        near = 2 * hops * unit
        assert math.isclose(loss.item(), expected, rel_tol=near), (step, loss.item(), expected)
    state, start = engine.state_dict(), model_of().state_dict()
    for key, value in plain.state_dict().items():
        assert float((state[key] - value).abs().max()) <= allowed[key], key
        assert allowed[key] < 0.1 * float((value - start[key]).abs().max()), key
    engine.destroy()


def test_the_toy_is_cut_into_several_buckets() -> None:
    assert sum(p.numel() for p in model_of().parameters()) > TINY["reduce_bucket_size"]
