"""`Module.apply` on freed weights: functions find values, and what they write is kept."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from engine.toys import assert_equal, engine_of, model_of
from ranks import RankPools, on_ranks
from torch import nn

import hadal
from hadal import comm
from hadal.errors import ShardedAccessError
from hadal.zero import GatheredParameters


class Net(nn.Module):
    """A net whose parts are initialised by themselves, by their parents, and by way of `.data`."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 6, padding_idx=0)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6)) for _ in range(12)
        )
        self.norm = nn.LayerNorm(6)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        values = self.embedding(tokens)
        for block in self.blocks:
            values = values + block(values)
        outputs: torch.Tensor = self.norm(values)
        return outputs


def start(module: nn.Module) -> None:
    if isinstance(module, nn.Linear):
        nn.init.trunc_normal_(module.weight, std=0.02)
        module.bias.data.zero_()
    elif isinstance(module, nn.Embedding):
        module.weight.data.normal_(0.0, 0.02)
        module.weight.data[0].zero_()
    elif isinstance(module, nn.Sequential):
        # A parent reaches into its children.
        module[1].weight.data /= 2.0
        with torch.no_grad():
            module[0].weight[0].copy_(module[1].weight[1])


def net(context: Any = None) -> Net:
    torch.manual_seed(1)
    with context or contextlib.nullcontext():
        return Net()


def values_of(model: nn.Module) -> dict[str, torch.Tensor]:
    with GatheredParameters(model.parameters()):
        return {name: value.detach().clone() for name, value in model.state_dict().items()}


def expected() -> dict[str, torch.Tensor]:
    model = net()
    torch.manual_seed(2)
    return dict(model.apply(start).state_dict())


def largest_held(model: nn.Module) -> int:
    with torch._C.DisableTorchFunction():  # looking must not gather
        held = [p for p in model.parameters() if any(p.stride()) and p.numel() > 1]
        return sum(p.numel() for p in held)


@on_ranks(2)
def test_after_the_context() -> None:
    model = net(hadal.zero.Init())
    torch.manual_seed(2 + comm.get_rank())  # rank 0's numbers count
    assert model.apply(start) is model
    assert largest_held(model) == 0
    assert_equal(values_of(model), expected())
    engine = engine_of(3, model)
    assert_equal(engine.state_dict(), expected())
    engine.destroy()


@pytest.mark.parametrize("stage", [0, 2, 3])
@on_ranks(2)
def test_after_initialize(stage: int) -> None:
    model = net()
    engine = engine_of(stage, model)
    torch.manual_seed(2)
    largest: list[int] = []

    def watched(module: nn.Module) -> None:
        start(module)
        largest.append(largest_held(model))

    model.apply(watched)
    assert_equal(engine.state_dict(), expected())
    if stage == 3:
        # What one call touches, and the bucket of the call before it.
        assert max(largest) <= 2 * 84 + 42
        assert largest_held(model) == 0
    engine.destroy()


@on_ranks(2)
def test_an_exception_leaves_nothing_gathered() -> None:
    def fails(module: nn.Module) -> None:
        module.weight.data.fill_(2.0)  # type: ignore[union-attr, operator]
        raise KeyError("mine")

    model = model_of()
    engine = engine_of(3, model)
    with pytest.raises(KeyError):
        model.apply(fails)
    assert largest_held(model) == 0
    assert bool((engine.state_dict()["0.weight"] == 2.0).all())
    engine.destroy()


@pytest.mark.claims("zero_optimization.override_module_apply")
@on_ranks(2)
def test_it_may_be_switched_off() -> None:
    off = {"override_module_apply": False}
    model = model_of()
    settings = {"stage": 3, "stage3_param_persistence_threshold": 0, **off}
    engine = engine_of(3, model, zero_optimization=settings)
    with pytest.raises(
        ShardedAccessError, match=r"was read \(isnan\) while its values are sharded"
    ):
        model.apply(lambda module: [p.isnan() for p in module.parameters(False)])
    with pytest.raises(ShardedAccessError, match="was written to while its values were sharded"):
        model.apply(lambda module: [p.data.zero_() for p in module.parameters(False)])
    assert engine(torch.ones(1, 6)).isfinite().all()
    with hadal.zero.Init(config={"zero_optimization": off}):
        born = model_of()
    with pytest.raises(ShardedAccessError, match=r"Linear\[0\] was read \(isnan\)"):
        born.apply(lambda module: [p.isnan() for p in module.parameters(False)])


def strangers(make: Callable[[], nn.Module]) -> None:
    """Modules that nobody holds: the function is called as ever, once for each module."""
    calls: list[nn.Module] = []
    model = make()
    model.apply(calls.append)
    assert calls == [*model.children(), model]


def test_other_modules_are_left_alone(ranks: RankPools) -> None:
    ranks(2).run(strangers, model_of)
