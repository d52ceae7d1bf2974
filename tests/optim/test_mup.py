"""MuAdam, MuAdamW and MuSGD: optimizers built by the mup package."""

from __future__ import annotations

import importlib.util
import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from engine.toys import Leaves, engine_of, given_gradients, mean_gradients
from ranks import RankPools
from torch import nn

from hadal import comm
from hadal.errors import OptimizerError
from hadal.optim.build import build_optimizer
from hadal.optim.step import FlatStepper

SHAPES = ((6, 4), (7,), (8, 4), (3, 3, 2))
HAS_MUP = importlib.util.find_spec("mup") is not None
KINDS = {"MuAdam": torch.optim.Adam, "MuAdamW": torch.optim.AdamW, "MuSGD": torch.optim.SGD}


def stand_in() -> ModuleType:
    """Return a fake of the mup package: functions that divide groups by a mark on parameters."""
    package = ModuleType("mup")

    def maker(implementation: Any) -> Any:
        def make(params: Any, impl: Any = implementation, **kwargs: Any) -> Any:
            groups: dict[float, dict[str, Any]] = {}
            for parameter in params:
                assert hasattr(parameter, "infshape"), "Did you forget to call set_base_shapes?"
                width = parameter.infshape
                group = groups.setdefault(width, {"params": [], "lr": kwargs["lr"] / width})
                group["params"].append(parameter)
            return impl([*groups.values(), {"params": [], "lr": kwargs["lr"]}], **kwargs)

        return make

    for kind, implementation in KINDS.items():
        setattr(package, kind, maker(implementation))
    return package


def real_or_stand_in(model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    """Set a model's base shapes, with mup itself if it is installed."""
    if not HAS_MUP:
        monkeypatch.setitem(sys.modules, "mup", stand_in())
        for index, parameter in enumerate(model.parameters()):
            parameter.infshape = 1.0 + index % 2  # type: ignore[attr-defined]
        return
    mup = importlib.import_module("mup")
    narrow = Leaves([tuple(max(1, length // 2) for length in shape[:2]) for shape in SHAPES[:3]])
    wide = Leaves([tuple(2 * length for length in shape[:2]) for shape in SHAPES[:3]])
    narrow.leaves.append(nn.Parameter(torch.ones(SHAPES[3])))
    wide.leaves.append(nn.Parameter(torch.ones(SHAPES[3])))
    mup.set_base_shapes(model, narrow, delta=wide, rescale_params=False)


def train_as_torch_does(kind: str, stage: int) -> None:
    params: dict[str, Any] = {"lr": 0.05, "weight_decay": 0.1}
    params |= {"momentum": 0.9} if kind == "MuSGD" else {"betas": [0.8, 0.95]}
    plain, model = Leaves(SHAPES), Leaves(SHAPES)
    with pytest.MonkeyPatch.context() as monkeypatch:
        real_or_stand_in(plain, monkeypatch)
        real_or_stand_in(model, monkeypatch)
        expected = build_optimizer(kind, params, list(plain.parameters()))
        assert type(expected) is KINDS[kind]
        assert len({group["lr"] for group in expected.param_groups}) > 1
        engine = engine_of(stage, model, optimizer={"type": kind.lower(), "params": params})
    assert type(engine.stepper) is FlatStepper
    rates = [group["lr"] for group in expected.param_groups]
    assert [group["lr"] for group in engine.optimizer.param_groups] == rates
    for update in range(3):
        for leaf, mean in zip(plain.leaves, mean_gradients(SHAPES, update), strict=True):
            leaf.grad = mean
        expected.step()
        engine.backward(engine(given_gradients(SHAPES, update, comm.get_rank())))
        engine.step()
    engine.destroy()
    for found, leaf in zip(model.leaves, plain.leaves, strict=True):
        assert torch.allclose(found, leaf, rtol=1e-6, atol=1e-7)


@pytest.mark.fast_cells("MuAdam")
@pytest.mark.claims("optimizer.params{type=MuAdam|MuAdamW|MuSGD}.<mup keyword>")
@pytest.mark.parametrize("kind", KINDS)
def test_each_width_has_its_rate(kind: str, ranks: RankPools) -> None:
    for stage in (0, 1, 3):
        ranks(2).run(train_as_torch_does, kind, stage)


def test_a_missing_package_is_reported_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mup", None)
    with pytest.raises(OptimizerError, match=r"MuSGD needs the mup package.*pip install mup"):
        build_optimizer("MuSGD", {"lr": 0.1}, [nn.Parameter(torch.ones(2))])


def test_errors_of_mup_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Leaves(SHAPES)
    if not HAS_MUP:
        monkeypatch.setitem(sys.modules, "mup", stand_in())
    with pytest.raises(OptimizerError, match=r"Call mup\.set_base_shapes"):
        build_optimizer("MuAdam", {"lr": 0.1}, list(model.parameters()))
    real_or_stand_in(model, monkeypatch)
    with pytest.raises(OptimizerError, match=r"needs optimizer\.params\.lr"):
        build_optimizer("MuAdam", {}, list(model.parameters()))
    with pytest.raises(OptimizerError, match="bettas"):
        build_optimizer("MuAdam", {"lr": 0.1, "bettas": [0.9, 0.99]}, list(model.parameters()))
