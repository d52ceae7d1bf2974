"""Parameters that other modules read: announced, returned, or used far from their owner."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from engine.toys import alone, assert_close, engine_of, train
from ranks import RankPools
from torch import Tensor, nn
from torch.nn import functional as F

from hadal.errors import UsageError
from hadal.zero import (
    GatheredParameters,
    register_external_parameter,
    unregister_external_parameter,
)
from hadal.zero.external import external_parameters


class Lender(nn.Module):
    """Gives its weight away: as it is, or as a view."""

    def __init__(self, gives: Callable[[nn.Parameter], Tensor]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 6, generator=torch.Generator().manual_seed(1)))
        self.gives = gives

    def forward(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        return F.linear(inputs, self.weight), self.gives(self.weight)


class Borrows(nn.Module):
    def __init__(self, gives: Callable[[nn.Parameter], Tensor]) -> None:
        super().__init__()
        self.lender = Lender(gives)
        self.between = nn.Linear(6, 6)
        self.last = nn.Linear(6, 4)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.linspace(-0.5, 0.5, parameter.numel()).view_as(parameter))

    def forward(self, inputs: Tensor) -> Tensor:
        values, weight = self.lender(inputs)
        values = torch.tanh(self.between(values)) @ weight + weight.sum()
        outputs: Tensor = self.last(values)
        return outputs


class Head(nn.Module):
    """Has no parameter of its own."""

    def __init__(self, embedding: nn.Linear) -> None:
        super().__init__()
        self.read = lambda: embedding.weight
        register_external_parameter(self, embedding.weight)

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs @ self.read()


class Announced(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.embedding = nn.Linear(6, 4, bias=False)
        self.middle = nn.Linear(4, 4)
        self.head = Head(self.embedding)
        self.out = nn.Linear(6, 4)

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.out(self.head(torch.tanh(self.middle(self.embedding(inputs)))))
        return outputs


def itself(weight: nn.Parameter) -> Tensor:
    return weight


def a_view(weight: nn.Parameter) -> Tensor:
    return weight.t()


def detached(weight: nn.Parameter) -> Tensor:
    return weight.detach()


def train_borrowers(make: Callable[[], nn.Module], stage: int) -> None:
    engine = engine_of(stage, make())
    train(engine, range(2))
    assert_close(engine.state_dict(), alone(make(), [[0], [1]]))
    engine.destroy()


def returns_itself() -> nn.Module:
    return Borrows(itself)


def returns_a_view() -> nn.Module:
    return Borrows(a_view)


def returns_detached() -> nn.Module:
    return Borrows(detached)


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize(
    "make", [returns_itself, returns_a_view, returns_detached, Announced], ids=lambda m: m.__name__
)
def test_reads_outside_of_the_owner(
    make: Callable[[], nn.Module], stage: int, ranks: RankPools
) -> None:
    ranks(2).run(train_borrowers, make, stage)


def watch_the_head(forget: bool) -> None:
    """An announced weight is there before the module's own code begins."""
    model = Announced()
    if forget:
        unregister_external_parameter(model.head, model.embedding.weight)
    engine = engine_of(3, model)
    weight = model.embedding.weight
    seen: list[bool] = []

    def look(*_: object) -> None:
        with torch._C.DisableTorchFunction():  # looking must not gather
            seen.append(weight.untyped_storage().nbytes() >= 4 * weight.numel())

    model.head.register_forward_pre_hook(look)  # comes after the engine's
    train(engine, range(1))
    assert seen == [not forget]
    engine.destroy()


@pytest.mark.parametrize("forget", [False, True])
def test_an_announced_parameter_is_gathered_before_its_reader(
    forget: bool, ranks: RankPools
) -> None:
    ranks(2).run(watch_the_head, forget)


def announce_by_gathering() -> None:
    model = Announced()
    unregister_external_parameter(model.head, model.embedding.weight)
    engine = engine_of(3, model)
    with GatheredParameters(model.embedding.weight, fwd_module=model.head):
        pass
    assert external_parameters(model.head) == [model.embedding.weight]
    train(engine, range(1))
    engine.destroy()


def test_fwd_module_registers(ranks: RankPools) -> None:
    ranks(2).run(announce_by_gathering)


def test_registering() -> None:
    module, other = nn.Linear(2, 2), nn.Linear(2, 2)
    for _ in range(2):
        register_external_parameter(module, other.weight)
    register_external_parameter(module, other.bias)
    assert [p is q for p, q in zip(external_parameters(module), other.parameters(), strict=True)]
    unregister_external_parameter(module, other.weight)
    assert len(external_parameters(module)) == 1
    with pytest.raises(UsageError, match=r"this parameter of shape \(2, 2\) was not registered"):
        unregister_external_parameter(module, other.weight)
    with pytest.raises(UsageError, match=r"takes a torch\.nn\.Module and a torch\.nn\.Parameter"):
        register_external_parameter(module, torch.ones(2))  # type: ignore[arg-type]
    del other
    assert external_parameters(module) == []


class Functional(nn.Module):
    """A head that is called with other values, or with those after a step of its own."""

    def __init__(self, way: str) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.body, self.head, self.way = nn.Linear(6, 5), nn.Linear(5, 4), way

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = torch.tanh(self.body(inputs))
        if self.way == "functional_call":
            doubled = {name: 2 * value for name, value in self.head.named_parameters()}
            outputs: Tensor = torch.func.functional_call(self.head, doubled, (hidden,))
            return outputs
        inner = self.head(hidden).square().mean()
        (gradient,) = torch.autograd.grad(inner, [self.head.weight], create_graph=True)
        return hidden @ (self.head.weight - 0.1 * gradient).t() + self.head.bias


def train_functional(way: str) -> None:
    engine = engine_of(3, Functional(way))
    expected = alone(Functional(way), [[step] for step in range(3)])
    train(engine, range(3))
    assert_close(engine.state_dict(), expected)
    engine.destroy()


@pytest.mark.parametrize("way", ["functional_call", "autograd.grad"])
def test_weights_may_be_used_by_functions(way: str, ranks: RankPools) -> None:
    """Return a forward's results with other modules' weights, second derivatives included."""
    ranks(2).run(train_functional, way)
