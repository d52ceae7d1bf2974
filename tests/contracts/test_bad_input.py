"""Mistakes end at the door: one clear exception of `hadal.errors` on every rank, and no hang.

Each mistake is a function that every rank runs. The pool sees to it that all of them answer in
time and that no collective is left over.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import forks
import pytest
import torch
from ranks import RankPools
from torch import nn

import hadal
from hadal.errors import (
    ConfigError,
    HadalError,
    LossError,
    MismatchError,
    ModelError,
    OptimizerError,
    ShardedAccessError,
    UsageError,
)

LIMIT = 120.0  # seconds, against hanging; each takes well under one
INPUTS = torch.linspace(-1, 1, 12).reshape(2, 6)


def model_of(width: int = 8) -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, width), nn.Tanh(), nn.Linear(width, 4))


def config_of(stage: int, **changes: Any) -> dict[str, Any]:
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0, "reduce_bucket_size": 50}
    return {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": zero,
        **changes,
    }


def engine_of(stage: int, model: nn.Module | None = None, **changes: Any) -> Any:
    model = model_of() if model is None else model
    engine, _, _, _ = hadal.initialize(
        model=model, model_parameters=model.parameters(), config=config_of(stage, **changes)
    )
    return engine


def update(engine: Any) -> None:
    engine.backward(engine(INPUTS).square().mean())
    engine.step()


def is_last_rank() -> bool:
    return int(os.environ["RANK"]) == int(os.environ["WORLD_SIZE"]) - 1


# The mistakes.


def config_with_three_faults(stage: int) -> None:
    changes = {
        "train_micro_batch_size_per_gpu": -2,
        "gradient_cliping": 1.0,
        "steps_per_print": "x",
    }
    engine_of(stage, **changes)


def config_that_is_no_dict(stage: int) -> None:
    hadal.initialize(model=model_of(), config=[stage])


def config_file_that_is_missing(stage: int) -> None:
    hadal.initialize(model=model_of(), config=f"/nowhere/stage{stage}.json")


def config_wrong_on_one_rank(stage: int) -> None:
    engine_of(stage, gradient_clipping="much" if is_last_rank() else 1.0)


def configs_that_differ(stage: int) -> None:
    engine_of(stage, gradient_clipping=0.5 if is_last_rank() else 1.0)


def stages_that_differ(stage: int) -> None:
    engine_of((stage + 1) % 4 if is_last_rank() else stage)


def models_of_different_width(stage: int) -> None:
    engine_of(stage, nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 9 if is_last_rank() else 8)))


def models_of_different_depth(stage: int) -> None:
    deeper = [nn.Linear(4, 4)] if is_last_rank() else []
    engine_of(stage, nn.Sequential(nn.Linear(6, 4), *deeper))


def models_frozen_differently(stage: int) -> None:
    model = model_of()
    model[2].bias.requires_grad_(not is_last_rank())
    engine_of(stage, model)


def no_model(stage: int) -> None:
    hadal.initialize(model=None, config=config_of(stage))


def model_that_is_no_module(stage: int) -> None:
    hadal.initialize(model={"weights": torch.ones(3)}, config=config_of(stage))


def parameter_on_meta(stage: int) -> None:
    model = model_of()
    model[2].to("meta")
    engine_of(stage, model)


def parameter_on_meta_on_one_rank(stage: int) -> None:
    model = model_of()
    if is_last_rank():
        model[2].to("meta")
    engine_of(stage, model)


def unknown_optimizer(stage: int) -> None:
    engine_of(stage, optimizer={"type": "AdamWW", "params": {"lr": 1e-3}})


def unknown_optimizer_setting(stage: int) -> None:
    engine_of(stage, optimizer={"type": "AdamW", "params": {"lr": 1e-3, "bettas": [0.9, 0.9]}})


def scheduler_without_optimizer(stage: int) -> None:
    other = torch.optim.SGD(model_of().parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(other, step_size=1)
    model = model_of()
    hadal.initialize(
        model=model,
        model_parameters=model.parameters(),
        lr_scheduler=scheduler,
        config=config_of(stage),
    )


def given_optimizer(stage: int, optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
    config = config_of(stage)
    del config["optimizer"]
    hadal.initialize(model=model, optimizer=optimizer, config=config)


def lbfgs(stage: int) -> None:
    model = model_of()
    given_optimizer(stage, torch.optim.LBFGS(model.parameters()), model)


def sparse_adam(stage: int) -> None:
    model = model_of()
    given_optimizer(stage, torch.optim.SparseAdam(list(model.parameters())), model)


def lbfgs_by_name(stage: int) -> None:
    engine_of(stage, optimizer={"type": "LBFGS", "params": {"lr": 1e-3}})


def optimizer_of_another_model(stage: int) -> None:
    given_optimizer(stage, torch.optim.SGD(model_of().parameters(), lr=0.1), model_of())


def nothing_to_train(stage: int) -> None:
    model = model_of().requires_grad_(False)
    config = config_of(stage)
    del config["optimizer"]
    engine, _, _, _ = hadal.initialize(model=model, config=config)
    engine.backward(engine(INPUTS.clone().requires_grad_()).square().mean())


def loss_of_many_elements(stage: int) -> None:
    engine = engine_of(stage)
    engine.backward(engine(INPUTS).square().mean(dim=1))


def loss_that_is_a_number(stage: int) -> None:
    engine = engine_of(stage)
    engine.backward(engine(INPUTS).square().mean().item())


def loss_without_gradient(stage: int) -> None:
    engine = engine_of(stage)
    engine.backward(engine(INPUTS).square().mean().detach())


def loss_of_integers(stage: int) -> None:
    engine = engine_of(stage)
    engine.backward(engine(INPUTS).argmax())


def step_without_backward(stage: int) -> None:
    engine = engine_of(stage)
    engine(INPUTS)
    engine.step()


def step_without_backward_on_one_rank(stage: int) -> None:
    engine = engine_of(stage)
    outputs = engine(INPUTS)
    if not is_last_rank():
        engine.backward(outputs.square().mean())
    engine.step()


def loss_wrong_on_one_rank(stage: int) -> None:
    engine = engine_of(stage)
    outputs = engine(INPUTS)
    engine.backward(outputs if is_last_rank() else outputs.square().mean())


def second_step_for_one_backward(stage: int) -> None:
    engine = engine_of(stage)
    update(engine)
    engine.step()


def parameter_cast_away(stage: int) -> None:
    model = model_of()
    engine = engine_of(stage, model)
    update(engine)
    model[2].double()
    update(engine)
    update(engine)


def model_cast_away(stage: int) -> None:
    model = model_of()
    engine = engine_of(stage, model)
    update(engine)
    model.double()
    for _ in range(2):
        engine.backward(engine(INPUTS.double()).square().mean())
        engine.step()


def parameter_with_new_data(stage: int) -> None:
    model = model_of()
    engine = engine_of(stage, model)
    update(engine)
    model[2].weight.data = torch.zeros(4, 8)
    update(engine)
    update(engine)


def freed_weight_filled(stage: int) -> None:
    model = model_of()
    engine = engine_of(stage, model)
    update(engine)
    with torch.no_grad():
        model[2].weight.fill_(0.5)
    update(engine)


def edit_by_a_rank_that_is_not_there(stage: int) -> None:
    model = model_of()
    engine_of(stage, model)
    with hadal.zero.GatheredParameters([model[2].weight], modifier_rank=17):
        pass


class GradientInside(nn.Linear):
    """Differentiates itself by a transform of torch.func."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        plain = super().forward
        gradient = torch.func.grad(lambda values: plain(values).square().sum())(inputs)
        return plain(inputs) + gradient.sum()


def transform_the_engine(stage: int) -> None:
    engine = engine_of(stage)
    inputs = torch.ones(6)
    with pytest.raises(UsageError, match=r"transform of torch\.func \(vmap\)"):
        torch.func.vmap(engine)(inputs.expand(3, 6))
    update(engine)
    jacobian = torch.autograd.functional.jacobian(engine, inputs)
    assert jacobian.shape == (4, 6)
    torch.func.grad(lambda values: engine(values).sum())(inputs)


def transform_in_a_forward(stage: int) -> None:
    update(engine_of(stage, GradientInside(6, 4)))


@dataclass(frozen=True)
class Mistake:
    """A mistake, and the error that every rank must raise."""

    do: Callable[[int], None]
    error: type[HadalError] | tuple[type[HadalError], ...]
    words: tuple[str, ...] = ()
    stages: tuple[int, ...] = (0, 3)


MISTAKES = [
    Mistake(
        config_with_three_faults,
        ConfigError,
        (
            "train_micro_batch_size_per_gpu",
            "gradient_cliping",
            '"gradient_clipping"',
            "steps_per_print",
        ),
    ),
    Mistake(config_that_is_no_dict, ConfigError),
    Mistake(config_file_that_is_missing, ConfigError, ("/nowhere/stage",)),
    Mistake(config_wrong_on_one_rank, HadalError, ("gradient_clipping",)),
    Mistake(configs_that_differ, MismatchError, ("gradient_clipping", "0.5", "1.0")),
    Mistake(stages_that_differ, MismatchError, ("zero_optimization.stage",), (0, 1, 2, 3)),
    Mistake(models_of_different_width, MismatchError, ("1.weight",), (0, 1, 2, 3)),
    Mistake(models_of_different_depth, MismatchError, ("1.weight",), (0, 1, 2, 3)),
    Mistake(models_frozen_differently, MismatchError, ("2.bias",)),
    Mistake(no_model, (ModelError, UsageError), ("model",)),
    Mistake(model_that_is_no_module, (ModelError, UsageError), ("dict",)),
    Mistake(parameter_on_meta, ModelError, ("2.weight", "meta"), (0, 1, 2, 3)),
    Mistake(parameter_on_meta_on_one_rank, HadalError, ("2.weight",)),
    Mistake(unknown_optimizer, ConfigError, ("AdamWW", "did you mean", "AdamW")),
    Mistake(unknown_optimizer_setting, (OptimizerError, ConfigError), ("bettas",)),
    Mistake(scheduler_without_optimizer, OptimizerError, ("scheduler",)),
    Mistake(lbfgs, OptimizerError, ("LBFGS",), (0, 1, 2, 3)),
    Mistake(sparse_adam, OptimizerError, ("SparseAdam",), (0, 1, 2, 3)),
    Mistake(lbfgs_by_name, ConfigError, ("optimizer.type", "LBFGS")),
    Mistake(optimizer_of_another_model, OptimizerError),
    Mistake(nothing_to_train, UsageError, (), (0, 1, 2, 3)),
    Mistake(loss_of_many_elements, LossError, ("2",)),
    Mistake(loss_that_is_a_number, LossError, ("float",)),
    Mistake(loss_without_gradient, LossError),
    Mistake(loss_of_integers, LossError),
    Mistake(step_without_backward, UsageError, ("backward",), (0, 1, 2, 3)),
    Mistake(step_without_backward_on_one_rank, HadalError, ("backward",), (0, 1, 2, 3)),
    Mistake(loss_wrong_on_one_rank, LossError, (), (0, 1, 2, 3)),
    Mistake(second_step_for_one_backward, UsageError, ("backward",), (0, 1, 2, 3)),
    Mistake(transform_the_engine, UsageError, ("(grad)", "torch.autograd.grad", "stage 2"), (3,)),
    Mistake(transform_in_a_forward, UsageError, ("torch.autograd.grad", "stage 2"), (3,)),
    Mistake(parameter_cast_away, HadalError, ("2.weight",), (0, 1, 2, 3)),
    Mistake(model_cast_away, HadalError, (".weight",), (0, 1, 2, 3)),
    Mistake(parameter_with_new_data, HadalError, ("2.weight",), (0, 1, 2, 3)),
    Mistake(freed_weight_filled, ShardedAccessError, ("2.weight", "GatheredParameters"), (3,)),
    Mistake(edit_by_a_rank_that_is_not_there, UsageError, ("17",)),
]
# Two stages of each mistake always run, in turn; the others are slow.
CASES = [
    pytest.param(
        mistake,
        stage,
        id=f"{mistake.do.__name__}-stage{stage}",
        marks=() if (number + place) % 2 == 0 or len(mistake.stages) < 3 else pytest.mark.slow,
    )
    for number, mistake in enumerate(MISTAKES)
    for place, stage in enumerate(mistake.stages)
]


@pytest.mark.slow_cells(
    "config_with_three_faults-stage0",
    "config_with_three_faults-stage3",
    "scheduler_without_optimizer-stage0",
    "scheduler_without_optimizer-stage3",
)
@pytest.mark.parametrize(("mistake", "stage"), CASES)
def test_every_rank_gets_the_error(mistake: Mistake, stage: int, ranks: RankPools) -> None:
    """The right exception, with the words that lead to the fault, on both ranks."""
    for rank, error in enumerate(ranks(2).raises(mistake.do, stage, timeout=LIMIT)):
        assert isinstance(error, mistake.error), f"rank {rank} got {error!r}"
        missing = [word for word in mistake.words if word not in str(error)]
        assert not missing, f"rank {rank}: {missing} not in: {error}"


UNREACHABLE = """
import datetime, hadal
from hadal.errors import CommunicationError
try:
    hadal.init_distributed("gloo", timeout=datetime.timedelta(seconds=2))
except CommunicationError as error:
    print(error)
    raise SystemExit(7)
"""


@pytest.mark.slow
def test_a_group_that_cannot_be_reached_is_an_error_within_seconds() -> None:
    """Nobody listens at MASTER_PORT: the message names the address, and nothing hangs."""
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        port = closed.getsockname()[1]
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": "1", "WORLD_SIZE": "2"}
    env = {**os.environ, **where, "LOCAL_RANK": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = forks.run(["-c", UNREACHABLE], env=env, timeout=120)
    assert done.returncode == 7, done.stderr
    assert f"127.0.0.1:{port}" in done.stdout
