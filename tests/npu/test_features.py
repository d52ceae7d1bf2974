"""Features on a device whose work is late: what they give is what they give on the host."""

from __future__ import annotations

import weakref

import pytest
import torch
from compression.test_curvature import configured, inputs
from compression.test_eigenvalues import engine_of
from compression.test_momentum import ALL, seeded_engine
from compression.toys import TOKENS, config
from engine.test_pipeline import SCHEDULES, batches, engine_of as pipeline_of, module_of
from ranks import RankPools
from torch import nn

import npu
from hadal import comm
from hadal.device import look_at, widest_float
from hadal.plugins.compression import redundancy_clean

# ---- pruning -------------------------------------------------------------------------------------


def _trained(name: str, stage: int) -> tuple[list[float], torch.Tensor | None]:
    """The losses, and what the clean model returns where its weights are whole."""
    engine = seeded_engine(ALL[name], stage)
    losses, found = [], None
    for step in range(5):
        tokens = ((TOKENS + step + comm.get_rank()) % 12).to(engine.device)
        loss = engine(tokens).square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    if stage < 3:
        redundancy_clean(engine, config(ALL[name]))
        with torch.no_grad():
            found = engine.module(TOKENS.to(engine.device)).cpu()
    engine.destroy()
    return losses, found


def _late(name: str, stage: int) -> tuple[list[float], torch.Tensor | None]:
    with npu.asynchronous():
        return _trained(name, stage)


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("name", ALL)
def test_pruned_models_are_those_of_the_host(npus: RankPools, ranks: RankPools, name, stage):
    expected = ranks(2).run(_trained, name, stage)
    for (losses, found), (theirs, values) in zip(
        npus(2).run(_late, name, stage), expected, strict=True
    ):
        assert losses == pytest.approx(theirs, rel=1e-4)
        assert values is None or torch.allclose(found, values, atol=1e-5)


# ---- curvature -----------------------------------------------------------------------------------


def _values() -> list[float]:
    engine = engine_of(configured(tol=1e-6), stage=3)
    torch.manual_seed(0)
    engine.backward(engine(inputs().to(engine.device)))
    engine.step()
    found = list(engine.eigenvalues.values)
    engine.destroy()
    return found


def _late_values() -> list[float]:
    with npu.asynchronous():
        return _values()


@pytest.mark.slow
def test_eigenvalues_are_those_of_the_host(npus: RankPools) -> None:
    for found in npus(2).run(_late_values):
        assert found == pytest.approx(_values(), rel=1e-4)


# ---- pipelines -----------------------------------------------------------------------------------


def losses(stages: int, schedule: str, chunks: int) -> list[float]:
    keys = {
        "pipeline": {"schedule": schedule},
        "zero_optimization": {"stage": 1},
        "gradient_accumulation_steps": 2 * stages,
    }
    engine = pipeline_of(stages, keys, module_of(stages, chunks=chunks))
    data = batches(0, 1)
    found = [float(engine.train_batch(data)) for _ in range(2)]
    engine.destroy()
    return found


def losses_late(stages: int, schedule: str, chunks: int) -> list[float]:
    with npu.asynchronous():
        return losses(stages, schedule, chunks)


CASES = [(2, *one) for one in SCHEDULES] + [(3, "1f1b", 1), (3, "interleaved", 2)]


@pytest.mark.parametrize(("stages", "schedule", "chunks"), CASES)
def test_schedules_as_on_cpus(
    stages: int, schedule: str, chunks: int, npus: RankPools, ranks: RankPools
) -> None:
    wanted = ranks(stages).run(losses, stages, schedule, chunks)
    assert npus(stages).run(losses_late, stages, schedule, chunks) == wanted


# ---- places of parameters ------------------------------------------------------------------------


def _looked(device: str) -> list[str]:
    parameter = nn.Parameter(torch.arange(4.0), requires_grad=True)
    parameter.mark = "kept"
    known = weakref.ref(parameter)
    module = nn.Module()
    module.weight = parameter
    told: list[str] = []
    parameter.register_hook(lambda gradient: told.append("hook"))
    parameter.register_post_accumulate_grad_hook(lambda one: told.append("later hook"))
    target = torch.full((8,), 5.0, device=device)
    look_at(parameter, target[2:6])
    assert module.weight is parameter is known() and isinstance(parameter, nn.Parameter)
    assert parameter.mark == "kept" and parameter.requires_grad and parameter.is_leaf
    assert parameter.device == target.device
    parameter.sum().backward()
    assert parameter.grad is not None and parameter.grad.tolist() == [1.0] * 4
    target.fill_(6)
    assert (parameter == 6).all()
    look_at(parameter, torch.zeros(3, 2))
    assert parameter.device.type == "cpu" and parameter.shape == (3, 2)
    frozen = nn.Parameter(torch.zeros(2), requires_grad=False)
    look_at(frozen, target)
    assert not frozen.requires_grad and frozen.device == target.device
    return told


def test_a_parameter_looks_at_another_device(npus: RankPools, ranks: RankPools) -> None:
    assert npus(1).run(_looked, "npu") == ranks(1).run(_looked, "cpu") == [["hook", "later hook"]]


def _widest() -> torch.dtype:
    return widest_float(torch.device("npu", 0))


def test_sums_use_the_widest_dtype_of_a_device(npus: RankPools) -> None:
    assert npus(1).run(_widest) == [torch.float32]
    assert widest_float(torch.device("cpu")) == torch.float64
