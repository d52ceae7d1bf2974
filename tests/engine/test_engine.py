"""The user's object: counters, boundaries, evaluation, results and refusals."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from ranks import RankPools, on_ranks
from torch import nn

import hadal
from engine.toys import (
    ROWS,
    alone,
    assert_close,
    assert_equal,
    backward,
    backward_alone,
    batch_of,
    config_of,
    engine_of,
    model_of,
    train,
)
from hadal import comm
from hadal.errors import LossError, OptimizerError, UsageError
from hadal.optim.schedules import WarmupDecayLR

STAGES = [0, 1, 2, 3]


@pytest.mark.parametrize("stage", STAGES)
@on_ranks(2)
def test_a_second_initialize_of_one_model_replaces_its_engine(stage: int) -> None:
    """A cell of a notebook runs again: SGD has no state to lose."""
    sgd = {"optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
    once = engine_of(stage, **sgd)
    train(once, range(4))
    first = engine_of(stage, **sgd)
    train(first, range(2))
    model = first.module
    second = engine_of(stage, model, **sgd)
    with pytest.raises(UsageError, match="this engine was destroyed"):
        first(batch_of(0)[0])
    train(second, range(2, 4))
    assert_equal(once.state_dict(), second.state_dict())
    other = nn.Sequential(model[0], nn.Linear(9, 1))
    with pytest.raises(UsageError, match=r"parameter 0.weight belongs to another engine, one of"):
        engine_of(stage, other)
    train(second, range(4, 5))
    second.destroy()
    engine_of(stage, other).destroy()
    once.destroy()


def count(stage: int) -> None:
    engine = engine_of(stage, gradient_accumulation_steps=3)
    world = comm.get_world_size()
    assert engine.train_micro_batch_size_per_gpu() == ROWS
    assert engine.gradient_accumulation_steps() == 3
    assert engine.train_batch_size() == 3 * ROWS * world
    assert engine.get_global_grad_norm() is None
    before = engine.state_dict()
    for step in range(6):
        assert engine.micro_steps == step
        assert engine.global_steps == step // 3
        assert engine.global_samples == step // 3 * 3 * ROWS * world
        assert engine.is_gradient_accumulation_boundary() == (step % 3 == 2)
        backward(engine, step)
        engine.step()
        moved = not torch.equal(engine.state_dict()["0.weight"], before["0.weight"])
        assert moved == (step >= 2)
    assert (engine.skipped_steps, engine.overflow, engine.loss_scale) == (0, False, 1.0)
    assert engine.get_global_grad_norm() > 0
    assert_close(engine.state_dict(), alone(model_of(), [range(3), range(3, 6)]))
    engine.destroy()


def scale_in_float64(stage: int) -> None:
    engine = engine_of(stage, model_of().double(), gradient_accumulation_steps=3)
    for step in range(3):
        inputs, targets = batch_of(step)
        engine.backward((engine(inputs.double()) - targets.double()).square().mean())
        engine.step()
    model, world = model_of().double(), comm.get_world_size()
    for step in range(3):
        for rank in range(world):
            inputs, targets = batch_of(step, rank)
            loss = (model(inputs.double()) - targets.double()).square().mean()
            (loss / (3 * world)).backward()
    norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])
    assert engine.get_global_grad_norm() == pytest.approx(norm.item(), rel=1e-14)
    engine.destroy()


def resize(stage: int) -> None:
    engine = engine_of(stage, gradient_accumulation_steps=2)
    world = comm.get_world_size()
    train(engine, range(2))
    engine.set_train_batch_size(3 * ROWS * world)
    assert engine.gradient_accumulation_steps() == 3
    assert engine.train_batch_size() == 3 * ROWS * world
    for wrong in (ROWS * world + 1, 0, -ROWS * world):
        with pytest.raises(UsageError, match=f"multiple of {ROWS * world}"):
            engine.set_train_batch_size(wrong)
    train(engine, range(2, 4))
    assert engine.global_steps == 1
    with pytest.raises(UsageError, match="inside an accumulation"):
        engine.set_train_batch_size(ROWS * world)
    train(engine, range(4, 5))
    assert engine.global_steps == 2
    engine.set_train_batch_size(ROWS * world)
    train(engine, range(5, 6))
    assert engine.global_steps == 3
    assert engine.global_samples == 6 * ROWS * world
    assert_close(engine.state_dict(), alone(model_of(), [range(2), range(2, 5), [5]]))
    engine.destroy()


def hold_synchronization_back(stage: int) -> None:
    engine = engine_of(stage, gradient_accumulation_steps=3)
    for step in range(3):
        if step < 2:
            with engine.no_sync():
                backward(engine, step)
        else:
            backward(engine, step)
        engine.step()
    # Several backwards of one micro-step: the last one in no_sync, the step reduces what is left.
    engine.set_train_batch_size(ROWS * comm.get_world_size())
    with engine.no_sync():
        with engine.no_sync():
            backward(engine, 3)
        with pytest.raises(UsageError, match="no_sync"):
            engine.step()
    engine.step()
    assert_close(engine.state_dict(), alone(model_of(), [range(3), [3]]))
    engine.destroy()


def drop_gradients(stage: int) -> None:
    """Gradients that `zero_grad` drops have no effect: after a mean, `no_sync` or an exception."""
    model = model_of()
    engine = engine_of(stage, model)
    train(engine, range(1))
    kept = engine.state_dict()
    for fails in (False, True):
        backward(engine, 7)
        if fails:
            handle = model[0].weight.register_hook(fail)
            with pytest.raises(MemoryError):
                backward(engine, 8)
            handle.remove()
        else:
            with engine.no_sync():
                backward(engine, 8)
        engine.zero_grad()
        with pytest.raises(UsageError, match="zero_grad"):
            engine.step()
        assert_equal(engine.state_dict(), kept)
    train(engine, range(1, 3))
    untouched = engine_of(stage)
    train(untouched, range(3))
    assert engine.global_steps == 3
    assert_equal(engine.state_dict(), untouched.state_dict())
    engine.destroy()
    untouched.destroy()


def fail(_: torch.Tensor) -> None:
    raise MemoryError("no room today")


def hand_out(stage: int) -> None:
    model = model_of()
    model.note = "mine"
    model.register_buffer("seen", torch.arange(3))
    engine = engine_of(stage, model)
    assert engine.note == "mine"
    assert engine.module is model
    assert engine.training
    assert engine.seen.tolist() == [0, 1, 2]
    assert engine.device.type == "cpu"
    assert engine.config.zero_optimization.stage == stage
    with pytest.raises(AttributeError, match="nothing"):
        _ = engine.nothing
    state = engine.state_dict()
    assert list(state) == ["seen", *model_of().state_dict()]  # the root's own come first
    for name, value in model_of().state_dict().items():
        assert torch.equal(state[name], value)
    storages = [value.untyped_storage() for value in state.values()]
    assert len({storage.data_ptr() for storage in storages}) == len(storages)
    for value, storage in zip(state.values(), storages, strict=True):
        assert storage.nbytes() == value.numel() * value.itemsize
        assert not value.requires_grad
    kept = {name: value.clone() for name, value in state.items()}
    train(engine, range(1))
    assert_equal(state, kept)
    engine.destroy()


def rates(stage: int) -> None:
    model = model_of()
    groups = [
        {"params": list(model[0].parameters()), "lr": 0.5},
        {"params": list(model[3].parameters())},
    ]
    scheduler = {"type": "WarmupLR", "params": {"warmup_num_steps": 2, "warmup_type": "linear"}}
    engine = engine_of(stage, model, {"model_parameters": groups}, scheduler=scheduler)
    seen = [engine.get_lr()]
    for step in range(3):
        train(engine, range(step, step + 1))
        seen.append(engine.get_lr())
    assert seen == [[0.0, 0.0], [0.0, 0.0], [0.25, 0.005], [0.5, 0.01]]
    assert torch.equal(engine.state_dict()["2.weight"], torch.ones(9))  # in no group
    assert engine.lr_scheduler.get_last_lr() == seen[-1]
    engine.destroy()
    assert engine_of(stage, optimizer=None).get_lr() == []


def evaluate_and_then_train(stage: int) -> None:
    """Without an optimizer it evaluates; the first backward makes AdamW with a schedule."""
    engine = engine_of(stage, optimizer=None)
    assert engine.optimizer is None
    assert engine.lr_scheduler is None
    engine.eval()
    with torch.no_grad():
        for step in range(2):
            inputs, _ = batch_of(step)
            assert torch.allclose(engine(inputs), model_of()(inputs), atol=1e-6)
    engine.train()
    train(engine, range(3))
    assert type(engine.optimizer) is torch.optim.AdamW
    assert type(engine.lr_scheduler).__name__ == "WarmupDecayLR"
    plain = model_of()
    optimizer = torch.optim.AdamW(plain.parameters(), weight_decay=0.0)
    schedule = WarmupDecayLR(optimizer, 100_000)
    for step in range(3):
        optimizer.zero_grad()
        backward_alone(plain, [step])
        optimizer.step()
        schedule.step()
    assert engine.get_lr() == [optimizer.param_groups[0]["lr"]]
    assert_close(engine.state_dict(), dict(plain.state_dict()))
    engine.destroy()


def bring_optimizers(stage: int) -> None:
    """An optimizer, a callable, a section: one and the same training."""
    states = []
    for way in ("object", "callable", "section"):
        model = model_of()
        wishes: dict[str, Any] = {}
        if way == "object":
            wishes["optimizer"] = torch.optim.AdamW(model.parameters(), 0.01, weight_decay=0.0)
            wishes["lr_scheduler"] = torch.optim.lr_scheduler.StepLR(wishes["optimizer"], 1, 0.5)
        elif way == "callable":
            wishes["optimizer"] = lambda ps: torch.optim.AdamW(ps, 0.01, weight_decay=0.0)
            wishes["lr_scheduler"] = lambda o: torch.optim.lr_scheduler.StepLR(o, 1, 0.5)
            wishes["model_parameters"] = (p for p in model.parameters())
        step_lr = {"type": "StepLR", "params": {"step_size": 1, "gamma": 0.5}}
        changes = {"scheduler": step_lr} if way == "section" else {"optimizer": None}
        engine, optimizer, _, schedule = hadal.initialize(
            model=model,
            config={k: v for k, v in config_of(stage, **changes).items() if v is not None},
            **wishes,
        )
        if way == "object":
            assert optimizer is wishes["optimizer"]
            assert schedule is wishes["lr_scheduler"]
        assert (engine.optimizer, engine.lr_scheduler) == (optimizer, schedule)
        train(engine, range(3))
        assert engine.get_lr() == [0.01 / 8]
        states.append(engine.state_dict())
        engine.destroy()
    assert_equal(states[0], states[1])
    assert_equal(states[0], states[2])


def end(stage: int) -> None:
    model = model_of()
    engine = engine_of(stage, model)
    train(engine, range(2))
    state = engine.state_dict()
    engine.destroy()
    engine.destroy()
    assert_equal({n: v.detach() for n, v in model.state_dict().items()}, state)
    for parameter in model.parameters():
        nbytes = parameter.untyped_storage().nbytes()
        assert nbytes == parameter.numel() * parameter.itemsize
    with pytest.raises(UsageError, match="destroyed"):
        engine(batch_of(0)[0])
    again = engine_of(stage, model)
    train(again, range(2, 3))
    again.destroy()


@pytest.mark.slow_cells("bring_optimizers-0", "bring_optimizers-3")
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize(
    "case",
    [
        count,
        scale_in_float64,
        resize,
        hold_synchronization_back,
        drop_gradients,
        hand_out,
        rates,
        evaluate_and_then_train,
        bring_optimizers,
        end,
    ],
    ids=lambda case: case.__name__,
)
def test_engine(case: Callable[[int], None], stage: int, ranks: RankPools) -> None:
    ranks(2).run(case, stage)


# ---- what is refused ----------------------------------------------------------------------------


def step_first() -> None:
    engine_of(1).step()


def step_twice() -> None:
    engine = engine_of(1)
    train(engine, range(1))
    engine.step()


def optimizer_by_hand() -> None:
    """The results equal those of a loop without an engine."""
    engine = engine_of(1)
    engine.backward(engine(batch_of(0)[0]).sum())
    engine.optimizer.step()


def optimizer_of_the_caller_by_hand() -> None:
    model = model_of()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    engine = engine_of(1, model, {"optimizer": optimizer}, optimizer=None)
    train(engine, range(1))
    optimizer.step()


def vector_loss() -> None:
    engine = engine_of(1)
    engine.backward(engine(batch_of(0)[0]))


def scaled_vector_loss() -> None:
    engine = engine_of(1)
    engine.scale(engine(batch_of(0)[0]))


def detached_loss() -> None:
    engine = engine_of(1)
    with torch.no_grad():
        loss = engine(batch_of(0)[0]).sum()
    engine.backward(loss)


def number_as_loss() -> None:
    engine_of(1).backward(0.5)


def all_frozen() -> None:
    model = model_of().requires_grad_(False)
    engine = engine_of(1, model, optimizer=None)
    assert torch.equal(engine(batch_of(0)[0]), model_of()(batch_of(0)[0]))
    engine.backward(torch.ones((), requires_grad=True))


def schedule_object_alone() -> None:
    model = model_of()
    other = torch.optim.SGD(model.parameters(), lr=0.1)
    engine_of(1, model, {"lr_scheduler": torch.optim.lr_scheduler.StepLR(other, 1)})


def callable_that_makes_no_optimizer() -> None:
    engine_of(1, wishes={"optimizer": lambda parameters: "AdamW"}, optimizer=None)


def metric_without_a_schedule() -> None:
    engine = engine_of(1)
    backward(engine, 0)
    engine.step(metric=0.5)


def metric_inside_an_accumulation() -> None:
    section = {"type": "ReduceLROnPlateau", "params": {}}
    engine = engine_of(1, scheduler=section, gradient_accumulation_steps=2)
    backward(engine, 0)
    engine.step(metric=0.5)


@pytest.mark.parametrize(
    ("mistake", "kind", "told"),
    [
        (step_first, UsageError, "no backward came"),
        (step_twice, UsageError, "no backward came"),
        (optimizer_by_hand, UsageError, "engine.step()"),
        (optimizer_of_the_caller_by_hand, UsageError, "engine.step()"),
        (vector_loss, LossError, "scalar"),
        (scaled_vector_loss, LossError, "engine.scale(loss) expects a scalar"),
        (detached_loss, LossError, "no_grad"),
        (number_as_loss, LossError, "float"),
        (all_frozen, UsageError, "nothing to train"),
        (schedule_object_alone, OptimizerError, "without the optimizer"),
        (callable_that_makes_no_optimizer, OptimizerError, "str"),
        (metric_without_a_schedule, UsageError, "takes no metric"),
        (metric_inside_an_accumulation, UsageError, "ends no update"),
    ],
)
def test_mistakes(mistake, kind, told, ranks: RankPools) -> None:
    for error in ranks(2).raises(mistake):
        assert isinstance(error, kind), repr(error)
        assert told in str(error)


@pytest.mark.parametrize(
    "values",
    [torch.arange(6).reshape(2, 3), torch.arange(6).reshape(2, 3).t(), torch.tensor(7)],
    ids=["plain", "transposed", "scalar"],
)
@on_ranks(2)
def test_integer_parameters_are_rank_0s_on_every_rank(values: torch.Tensor) -> None:
    model = model_of()
    model.table = nn.Parameter(values + 10 * comm.get_rank(), requires_grad=False)
    engine = engine_of(3, model)
    assert torch.equal(engine.state_dict()["table"], values)
    train(engine, range(1))
    assert torch.equal(engine.state_dict()["table"], values)
    engine.destroy()


def in_a_thread(act: Callable[[], object]) -> str:
    """Call `act` in another thread; return what it raised."""
    with ThreadPoolExecutor(1, "other") as pool:
        error = pool.submit(act).exception()
    return "" if error is None else f"{type(error).__name__}: {error}"


@pytest.mark.parametrize("stage", [0, 3])
def test_threads_take_turns(stage: int) -> None:
    """One that comes while another is inside is refused by name, and changes nothing."""
    engine, other = engine_of(stage), engine_of(stage)
    inputs, targets = batch_of(0)
    told: list[str] = []

    def intrude(*_: Any) -> None:
        for act in (lambda: engine(inputs), engine.step, lambda: engine.save_checkpoint("none")):
            told.append(in_a_thread(act))

    handle = engine.module[0].register_forward_hook(intrude)
    loss = (engine(inputs) - targets).square().mean()
    handle.remove()
    loss.register_hook(intrude)
    engine.backward(loss)
    assert len(told) == 6
    for line in told:
        assert line.startswith(
            "UsageError: rank 0: thread 'other_0' called the engine while another"
        )
    assert in_a_thread(engine.step) == ""
    other.backward((other(inputs) - targets).square().mean())
    other.step()
    assert_equal(engine.state_dict(), other.state_dict())
    engine.destroy(), other.destroy()
