"""The table of optimizers: its facts are true, and a row is all that a new optimizer needs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pkgutil import resolve_name
from typing import Any
from unittest import mock

import pytest
import torch
from ranks import RankPools
from torch import Tensor, nn

import hadal
from hadal.config import load_config
from hadal.config.optimizer import KINDS, Optimizer, OptimizerKind, built_in
from hadal.config.section import Section, key
from hadal.errors import ConfigError
from hadal.optim.build import build_optimizer, kind_of
from hadal.optim.elementwise import (
    Block,
    ElementwiseOptimizer,
    Group,
    Scaling,
    SliceUpdate,
    State,
    Zeros,
)


class HeavyBall(ElementwiseOptimizer):
    """An optimizer that Hadal does not have: velocity = inertia * velocity + gradient."""

    def __init__(self, params: Iterable[nn.Parameter], lr: float, inertia: float = 0.5) -> None:
        super().__init__(params, {"lr": lr, "inertia": inertia})

    def begin(self, group: Group, state: State, zeros: Zeros) -> SliceUpdate:
        if "velocity" not in state:
            state["velocity"] = zeros()

        def apply(blocks: list[Block], scaling: Scaling) -> None:
            for values, gradient, (velocity,), _ in blocks:
                if scaling.divisor is not None:
                    gradient.div_(scaling.divisor)
                velocity.mul_(group["inertia"]).add_(gradient)
                values.sub_(velocity, alpha=group["lr"])

        return SliceUpdate((state["velocity"],), apply)


class HeavyBallParams(Section):
    """Heavy ball."""

    lr: float = key(0.1, "Learning rate.", gt=0)
    inertia: float = key(0.5, "Inertia.", ge=0, lt=1)


ROW = OptimizerKind("HeavyBall", f"{__name__}:HeavyBall", HeavyBallParams, "blocks", ("velocity",))
MADE = [name for name, kind in KINDS.items() if not kind.refused]
MUP = [name for name in MADE if KINDS[name].made_by.startswith("mup:")]


def section(**params: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 0,
        "optimizer": {"type": "heavyball", "params": params},
    }


@contextmanager
def one_row_more() -> Iterator[None]:
    """Add the row to the table, and to what the section took from the table when it was made."""
    with mock.patch.dict(KINDS, {ROW.name: ROW}), mock.patch.object(Optimizer, "types", built_in()):
        yield


def trained(stage: int) -> list[Tensor]:
    """Train with the new row in this process's table; return the weights and the velocity."""
    with one_row_more():
        config = section(lr=0.25, inertia=0.5) | {"zero_optimization": {"stage": stage}}
        model = nn.Linear(3, 1, bias=False)
        nn.init.zeros_(model.weight)
        engine, *_ = hadal.initialize(model=model, config=config)
        for step in range(3):
            x = torch.tensor([[1.0, 2.0, float(hadal.comm.get_rank() + step)]])
            engine.backward(engine(x).sum())
            engine.step()
        weight = engine.state_dict()["weight"]
        (velocity,) = (
            hadal.utils.safe_get_full_optimizer_state(p, "velocity") for p in model.parameters()
        )
        return [weight, velocity]


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_an_optimizer_is_added_by_one_row(ranks: RankPools, stage: int) -> None:
    weight, velocity = torch.zeros(3), torch.zeros(3)
    for step in range(3):
        velocity = 0.5 * velocity + torch.tensor([1.0, 2.0, 0.5 + step])
        weight = weight - 0.25 * velocity
    for found in ranks(2).run(trained, stage):
        assert torch.equal(found[0].flatten(), weight)
        assert torch.equal(found[1].flatten(), velocity)


def test_the_row_brings_its_section() -> None:
    with one_row_more():
        read = load_config(section(lr=0.5)).optimizer
        assert read is not None
        assert (read.type, read.rates) == ("HeavyBall", [0.5])
        with pytest.raises(ConfigError, match="inertia"):
            load_config(section(inertia=1.5))


@pytest.mark.parametrize("name", [name for name in MADE if name not in MUP])
def test_the_facts_of_a_row_are_those_of_its_class(name: str) -> None:
    kind, weight = KINDS[name], nn.Parameter(torch.ones(4, 4))
    for option in ("", *kind.optional_state):
        params = {option: 0.5 if option == "momentum" else True} if option else {}
        optimizer = build_optimizer(name, {"lr": 0.1, **params}, [weight], {weight: "weight"})
        assert kind_of(optimizer).steps == kind.steps
        assert type(optimizer).__name__ in kind.class_names
        weight.grad = torch.ones_like(weight)
        optimizer.step()
        whole = [k for k, v in optimizer.state[weight].items() if v is not None and v.numel() == 16]
        assert kind.state is None or sorted(whole) == sorted(kind.state_with(params) or ())


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_every_path_of_a_row_leads_somewhere(kind: OptimizerKind) -> None:
    makers = [] if kind.name in MUP else [kind.made_by]
    for path in (*makers, *kind.classes, kind.stepper, kind.groups):
        assert path == "" or callable(resolve_name(path))
