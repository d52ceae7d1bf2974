"""The methods of a program's own optimizer, such as `eval` of schedule-free ones."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from ranks import RankPools
from torch import Tensor, nn

import hadal
from engine.toys import (
    assert_close,
    assert_equal,
    backward,
    backward_alone,
    batch_of,
    engine_of,
    model_of,
    train,
)
from hadal.comm import get_rank
from hadal.errors import MismatchError, OptimizerError, UsageError
from hadal.utils import safe_get_full_optimizer_state


class Averaging(torch.optim.Optimizer):
    """SGD that keeps an average of the weights, which `eval` swaps in and `train` out."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})
        self.is_swapped = False

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                state.setdefault("average", parameter.detach().clone())
                parameter.sub_(parameter.grad, alpha=group["lr"])
                state["average"].lerp_(parameter, 0.25)

    def swap(self) -> None:
        self.is_swapped = not self.is_swapped
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                kept = parameter.detach().clone()
                parameter.data.copy_(state["average"])
                state["average"].copy_(kept)

    def eval(self) -> None:
        if not self.is_swapped:
            self.swap()

    def train(self) -> None:
        if self.is_swapped:
            self.swap()

    def get_swapped(self) -> bool:
        return self.is_swapped


class Replacing(Averaging):
    """The same, written as old programs do: `parameter.data` is replaced."""

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                state.setdefault("average", parameter.detach().clone())
                parameter.data = parameter.data - group["lr"] * parameter.grad
                state["average"].lerp_(parameter.data, 0.25)

    def swap(self) -> None:
        self.is_swapped = not self.is_swapped
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                state["average"], parameter.data = parameter.data, state["average"]


def averages(engine: Any) -> dict[str, Tensor]:
    """The averages as weights of the model's dtype."""
    return {
        name: safe_get_full_optimizer_state(parameter, "average").to(parameter.dtype)
        for name, parameter in engine.module.named_parameters()
    }


def swap_and_back(stage: int, kind: str, precision: str, tiers: dict[str, Any]) -> None:
    model, changes = model_of(), {} if precision == "fp32" else {precision: {"enabled": True}}
    optimizer = {"in place": Averaging, "replaced": Replacing}[kind](model.parameters())
    zero = {"stage": stage, "reduce_bucket_size": 60, **tiers}
    engine = engine_of(
        stage, model, {"optimizer": optimizer}, optimizer=None, zero_optimization=zero, **changes
    )
    train(engine, range(3))
    trained, average = engine.state_dict(), averages(engine)
    assert any(not torch.equal(trained[name], average[name]) for name in average)
    optimizer.eval()
    assert_equal(engine.state_dict(), average)
    inputs = batch_of(7, 0)[0].to(next(iter(average.values())).dtype)
    alone = model_of().to(inputs.dtype)
    alone.load_state_dict(average)
    with torch.no_grad():
        assert torch.equal(engine(inputs), alone(inputs))
    optimizer.train()
    assert_equal(engine.state_dict(), trained)
    train(engine, range(3, 5))
    engine.destroy()


DISK = {"device": "nvme"}
CASES: dict[str, tuple[int, str, str, dict[str, Any]]] = {
    **{f"stage {n}": (n, "in place", "fp32", {}) for n in range(4)},
    **{f"stage {n}, bf16": (n, "in place", "bf16", {}) for n in range(4)},
    "replaced, stage 0": (0, "replaced", "fp32", {}),
    "replaced, stage 0, bf16": (0, "replaced", "bf16", {}),
    "replaced, stage 2": (2, "replaced", "fp32", {}),
    "on the host": (2, "in place", "bf16", {"offload_optimizer": {"device": "cpu"}}),
    "on a disk": (1, "in place", "bf16", {"offload_optimizer": DISK}),
    "all on a disk": (3, "in place", "bf16", {"offload_optimizer": DISK, "offload_param": DISK}),
}


@pytest.mark.parametrize("case", list(CASES))
def test_weights_follow_a_method_of_the_optimizer(
    case: str, ranks: RankPools, tmp_path: Path
) -> None:
    stage, kind, precision, given = CASES[case]
    tiers = {
        key: {**tier, **({"nvme_path": str(tmp_path)} if tier is DISK else {})}
        for key, tier in given.items()
    }
    ranks(2).run(swap_and_back, stage, kind, precision, tiers)


def replace_in_steps(stage: int) -> dict[str, Tensor]:
    model = model_of()
    engine = engine_of(stage, model, {"optimizer": Replacing(model.parameters())}, optimizer=None)
    train(engine, range(3))
    return engine.state_dict()


def test_a_step_may_replace_data(ranks: RankPools) -> None:
    expected, _ = ranks(2).run(replace_in_steps, 1)
    for stage in (0, 3):
        assert_close(ranks(2).run(replace_in_steps, stage)[0], expected)


def halve_in_groups(stage: int) -> dict[str, Tensor]:
    """Halve what the optimizer holds before each update, from the first on."""
    model = model_of()
    optimizer = Averaging(model.parameters())
    engine = engine_of(stage, model, {"optimizer": optimizer}, optimizer=None)
    for step in range(3):
        backward(engine, step)
        with torch.no_grad():
            for values in optimizer.param_groups[0]["params"]:
                values.mul_(0.5)
        engine.step()
    return engine.state_dict()


def test_an_update_begins_with_what_a_program_wrote_into_the_optimizer(ranks: RankPools) -> None:
    expected, _ = ranks(2).run(halve_in_groups, 0)
    for stage in (1, 3):
        assert_close(ranks(2).run(halve_in_groups, stage)[0], expected)


def meetings_of_train(folder: str) -> list[int]:
    model = model_of()
    optimizer = Averaging(model.parameters())
    engine = engine_of(2, model, {"optimizer": optimizer}, optimizer=None)
    gathering = engine._parts.runtime.gathering
    seen = []

    def train_thrice() -> None:
        with patch.object(gathering, "meet", wraps=gathering.meet) as meet:
            for step in range(3):
                optimizer.train()
                train(engine, range(step, step + 1))
        seen.append(meet.call_count)

    train_thrice()
    train_thrice()
    optimizer.eval()
    train_thrice()
    engine.save_checkpoint(folder)
    train_thrice()
    engine.load_checkpoint(folder)
    train_thrice()
    optimizer.load_state_dict(optimizer.state_dict())
    train_thrice()
    engine.destroy()
    return seen


def test_train_is_followed_once(ranks: RankPools, tmp_path: Path) -> None:
    assert ranks(2).run(meetings_of_train, str(tmp_path)) == [[1, 0, 1, 0, 1, 1]] * 2


# ---- the package of schedule-free optimizers -----------------------------------------------------


def run_schedule_free(stage: int, folder: str) -> None:
    """Train, look at the averages, save there, resume and train on: as one process."""
    import schedulefree

    def optimizer_of(model: nn.Module) -> Any:
        return schedulefree.AdamWScheduleFree(model.parameters(), lr=0.02, warmup_steps=2)

    plain = model_of()
    single = optimizer_of(plain)
    single.train()

    def update(step: int) -> None:
        single.zero_grad()
        backward_alone(plain, [step])
        single.step()

    def engine_with(model: nn.Module) -> tuple[Any, Any]:
        optimizer = optimizer_of(model)
        return engine_of(stage, model, {"optimizer": optimizer}, optimizer=None), optimizer

    engine, optimizer = engine_with(model_of())
    optimizer.train()
    train(engine, range(3))
    for step in range(3):
        update(step)
    assert_close(engine.state_dict(), plain.state_dict())
    optimizer.eval()
    single.eval()
    average = copy.deepcopy(plain.state_dict())
    assert_close(engine.state_dict(), average)
    engine.save_checkpoint(folder)
    engine.destroy()

    engine, optimizer = engine_with(model_of(seed=4))
    engine.load_checkpoint(folder)
    assert_close(engine.state_dict(), average)
    optimizer.train()
    single.train()
    train(engine, range(3, 5))
    for step in range(3, 5):
        update(step)
    assert_close(engine.state_dict(), plain.state_dict())
    engine.destroy()


@pytest.mark.parametrize("stage", range(4))
def test_schedule_free_training(stage: int, ranks: RankPools, tmp_path: Path) -> None:
    pytest.importorskip("schedulefree")
    ranks(2).run(run_schedule_free, stage, str(tmp_path))


# ---- what is refused, and what is left alone -----------------------------------------------------


def refusal_of(act: Callable[[Any, Any], None]) -> str:
    model = model_of()
    optimizer = Averaging(model.parameters())
    engine = engine_of(3, model, {"optimizer": optimizer}, optimizer=None)
    train(engine, range(2))
    try:
        act(engine, optimizer)
    except (UsageError, MismatchError) as error:
        return str(error)
    finally:
        engine.destroy()
    return ""


def swap_inside_a_forward(engine: Any, optimizer: Any) -> None:
    engine.module[1].register_forward_hook(lambda *_: optimizer.eval())
    engine(batch_of(0)[0])


def swap_alone(engine: Any, optimizer: Any) -> None:
    if get_rank() == 0:
        optimizer.eval()
    else:
        engine.save_checkpoint("never")


def read_alone(engine: Any, optimizer: Any) -> None:
    if get_rank() == 0:
        assert not optimizer.get_swapped()


@pytest.mark.parametrize(
    ("act", "told"),
    [
        (swap_inside_a_forward, "optimizer.eval() was called inside a forward"),
        (swap_alone, "rank 0: a method of the optimizer, rank 1: engine.save_checkpoint"),
        (read_alone, ""),
    ],
)
def test_a_method_is_for_all_ranks_between_passes(
    act: Callable[[Any, Any], None], told: str, ranks: RankPools
) -> None:
    for found in ranks(2).run(refusal_of, act):
        assert told in found
        assert bool(told) == bool(found)


def replace_data_from_outside() -> str:
    model = model_of()
    optimizer = torch.optim.AdamW(model.parameters())
    engine = engine_of(0, model, {"optimizer": optimizer}, optimizer=None)
    train(engine, range(1))
    for group in optimizer.param_groups:
        for values in group["params"]:
            values.data = values.data * 0.9
    with pytest.raises(OptimizerError) as caught:
        train(engine, range(1, 2))
    engine.destroy()
    return str(caught.value)


def test_the_data_of_a_flat_slice_is_not_replaced(ranks: RankPools) -> None:
    told = 'replaced .data of a tensor in param_groups[0]["params"]'
    assert told in ranks(1).run(replace_data_from_outside)[0]


class Unfinished(torch.optim.Optimizer):
    """A wrapper whose base class was never initialised."""

    def __init__(self, base: torch.optim.Optimizer) -> None:
        self.param_groups, self.state, self.defaults = base.param_groups, base.state, base.defaults


def test_a_wrapper_that_is_no_whole_optimizer_is_refused() -> None:
    model = nn.Linear(2, 2)
    optimizer = Unfinished(torch.optim.SGD(model.parameters(), lr=0.1))
    config = {"train_micro_batch_size_per_gpu": 1}
    with pytest.raises(OptimizerError, match=r"Unfinished was not initialised.*super\(\)"):
        hadal.initialize(model=model, optimizer=optimizer, config=config)


class Assignable(torch.optim.SGD):
    """An optimizer with a property that a program may assign."""

    @property
    def mode(self) -> str:
        return "train"

    @mode.setter
    def mode(self, value: str) -> None:
        pass


def test_properties_that_can_be_assigned_are_reported(caplog: pytest.LogCaptureFixture) -> None:
    for kind, count in ((Assignable, 1), (torch.optim.SGD, 0)):
        model = nn.Linear(2, 2)
        optimizer = kind(model.parameters(), lr=0.1)
        config = {"train_micro_batch_size_per_gpu": 1}
        caplog.clear()
        engine, *_ = hadal.initialize(model=model, optimizer=optimizer, config=config)
        engine.destroy()
        told = [record.getMessage() for record in caplog.records if "assigned" in record.message]
        assert len(told) == count
        assert all("Assignable has properties that can be assigned (mode)" in one for one in told)
