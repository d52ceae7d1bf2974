"""Listeners: their calls, their arguments, and their state in a checkpoint."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import RankPools, on_ranks
from torch import Tensor, nn

import hadal
from engine.logs import logged
from engine.toys import assert_equal, backward_alone, batch_of, engine_of, model_of, train
from hadal.errors import CheckpointError, LossError, UsageError
from hadal.listener import Forward, Listener, Update

ROOT = Path(__file__).parent.parent.parent


class Recorder(Listener):
    """Records its calls, under the names of the methods."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, Any]] = []
        self.updates: list[Update] = []

    def before_forward(self, forward: Forward) -> None:
        self.calls.append(("before_forward", forward[2:]))

    def after_forward(self, output: Any) -> None:
        self.calls.append(("after_forward", tuple(output.shape)))

    def before_backward(self) -> None:
        self.calls.append(("before_backward", None))

    def after_backward(self, loss: Tensor | None) -> None:
        assert loss is None or not loss.requires_grad
        self.calls.append(("after_backward", loss))

    def before_update(self, gradients: Mapping[str, Tensor]) -> None:
        self.calls.append(("before_update", list(gradients)))

    def after_update(self, update: Update) -> None:
        self.calls.append(("after_update", update.number))
        self.updates.append(update)

    def on_error(self, error: BaseException) -> None:
        self.calls.append(("on_error", error))

    def close(self) -> None:
        self.calls.append(("close", None))

    @property
    def order(self) -> list[str]:
        return [name for name, _ in self.calls]


# ---- when and with what --------------------------------------------------------------------------

BACKWARD = ["before_backward", "after_backward"]
FORWARD = ["before_forward", "after_forward"]
UPDATE = ["before_update", "after_update"]
RATES = {"type": "WarmupLR", "params": {"warmup_max_lr": 0.01, "warmup_num_steps": 9}}


@pytest.mark.parametrize("stage", [0, 3])
@on_ranks(2)
def test_they_follow_training(stage: int) -> None:
    engine = engine_of(
        stage, gradient_accumulation_steps=2, scheduler=RATES, wall_clock_breakdown=True
    )
    recorder = Recorder()
    engine.add_listener(recorder)
    losses = train(engine, range(2))
    engine.eval()
    with torch.no_grad():
        engine(batch_of(9)[0])
    engine.train()
    losses += train(engine, range(2, 4))
    first = [*FORWARD, *BACKWARD, *FORWARD, *BACKWARD, *UPDATE]
    assert recorder.order == [*first, *FORWARD, *first]
    begun = [value for name, value in recorder.calls if name == "before_forward"]
    assert begun == [(0, 0, True), (0, 1, True), (1, 0, False), (1, 0, True), (1, 1, True)]
    assert ("before_update", [name for name, _ in model_of().named_parameters()]) in recorder.calls
    told = [value for name, value in recorder.calls if name == "after_backward"]
    assert [float(loss) for loss in told] == [float(loss) for loss in losses]
    one, two = recorder.updates
    samples = engine.global_samples // 2
    assert (one.samples, one.total_samples, two.total_samples) == (samples, samples, 2 * samples)
    assert one.micro_steps == two.micro_steps == 2
    assert two.loss is not None and torch.equal(two.loss, torch.stack(losses[2:]).mean())
    assert two.norm == engine.get_global_grad_norm()
    assert list(two.rates) == engine.get_lr() and one.rates != two.rates
    assert list(two.momenta) == engine.get_mom() and two.scale == engine.loss_scale
    assert (two.skipped, two.skipped_updates) == (False, 0)
    assert two.is_known and two.times == engine.wall_clock_times() != one.times != {}
    engine.remove_listener(recorder)
    train(engine, range(1))
    assert recorder.order == [*first, *FORWARD, *first]
    engine.add_listener(recorder)
    engine.destroy()
    assert recorder.order[-1] == "close"


class Shift(Listener):
    """Changes the inputs: what the one before it returned, it is given."""

    def __init__(self, number: int) -> None:
        self.name = f"shift {number}"
        self.number = number

    def before_forward(self, forward: Forward) -> Forward:
        factor = forward.kwargs.get("factor", 1.0) * 10 + self.number
        return forward._replace(args=(forward.args[0] + 1,), kwargs={"factor": factor})


class Scaling(nn.Linear):
    def forward(self, inputs: Tensor, factor: float = 1.0) -> Tensor:
        return super().forward(inputs) * factor


@on_ranks(2)
def test_they_may_change_the_inputs() -> None:
    torch.manual_seed(0)
    model = Scaling(6, 4)
    inputs = torch.randn(3, 6)
    wanted = model(inputs + 1 + 1, factor=112.0)
    engine = engine_of(1, model)
    engine.add_listener(Shift(1))
    engine.add_listener(Shift(2))
    assert torch.equal(engine(inputs), wanted)
    engine.destroy()


class Means(Listener):
    """Looks up all mean gradients."""

    def __init__(self) -> None:
        self.found: list[dict[str, Tensor]] = []

    def before_update(self, gradients: Mapping[str, Tensor]) -> None:
        with pytest.raises(KeyError):
            gradients["3.nothing"]
        self.found.append({name: mean.clone() for name, mean in gradients.items()})


def look_up_means(stage: int, keys: dict[str, Any]) -> None:
    engine = engine_of(stage, gradient_accumulation_steps=2, gradient_clipping=1e-3, **keys)
    means = Means()
    engine.add_listener(means)
    model = model_of()
    train(engine, range(2))
    backward_alone(model, range(2))
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        assert torch.allclose(means.found[0][name], parameter.grad, rtol=1e-5, atol=1e-6), name
    # Looking does not change the update.
    silent = engine_of(stage, gradient_accumulation_steps=2, gradient_clipping=1e-3, **keys)
    train(silent, range(2))
    assert_equal(engine.state_dict(), silent.state_dict())
    engine.destroy()
    silent.destroy()


@pytest.mark.fast_cells("1", "2")
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_mean_gradients_are_those_of_plain_torch(stage: int, ranks: RankPools) -> None:
    ranks(2).run(look_up_means, stage, {})


@on_ranks(2)
def test_a_skipped_update_is_recorded_as_skipped() -> None:
    engine = engine_of(1, fp16={"enabled": True, "initial_scale_power": 4, "hysteresis": 1})
    recorder = Recorder()
    engine.add_listener(recorder)
    inputs = torch.ones(3, 6, dtype=torch.float16)
    for factor in (1.0, torch.inf, 1.0):
        engine.backward(engine(inputs).float().mean() * factor)
        engine.step()
    assert [update.skipped for update in recorder.updates] == [False, True, False]
    assert [update.skipped_updates for update in recorder.updates] == [0, 1, 1]
    assert [update.norm == math.inf for update in recorder.updates] == [False, True, False]
    assert [update.scale for update in recorder.updates] == [16.0, 8.0, 8.0]
    assert recorder.updates[1].loss is not None and recorder.updates[1].loss.isinf()
    engine.destroy()


@on_ranks(2)
def test_a_backward_of_the_callers_own() -> None:
    engine = engine_of(2, gradient_accumulation_steps=2)
    recorder = Recorder()
    engine.add_listener(recorder)
    for step in range(4):
        inputs, targets = batch_of(step)
        loss = (engine(inputs) - targets).square().mean()
        (engine.scale(loss) if step < 3 else loss).backward()
        engine.step()
    assert recorder.order == [*FORWARD, *BACKWARD, *FORWARD, *BACKWARD, *UPDATE] * 2
    told = [value for name, value in recorder.calls if name == "after_backward"]
    assert [loss is None for loss in told] == [False, False, False, True]
    one, two = recorder.updates
    assert one.loss is not None and torch.equal(one.loss, torch.stack(told[:2]).mean())
    assert two.loss is None and len(two.losses) == 1
    engine.destroy()


class Fragile(nn.Linear):
    breaks = False

    def forward(self, inputs: Tensor) -> Tensor:
        if self.breaks:
            raise ArithmeticError("no more")
        return super().forward(inputs)


@on_ranks(2)
def test_errors_are_reported() -> None:
    engine = engine_of(3, Fragile(6, 4))
    recorder = Recorder()
    engine.add_listener(recorder)
    engine.module.breaks = True
    with pytest.raises(ArithmeticError):
        engine(batch_of(0)[0])
    assert recorder.order == ["before_forward", "on_error"]
    engine.module.breaks = False
    with pytest.raises(LossError):
        engine.backward(engine(batch_of(0)[0]))
    assert recorder.order[2:] == [*FORWARD, "on_error"]
    train(engine, range(1))
    assert recorder.order[5:] == [*FORWARD, *BACKWARD, *UPDATE]
    engine.destroy()


@on_ranks(1)
def test_objects_that_are_not_listeners_are_refused() -> None:
    engine = engine_of(0)
    with pytest.raises(UsageError, match="derive its class"):
        engine.add_listener(print)
    recorder = Recorder()
    engine.add_listener(recorder)
    assert engine.listeners[-1] is recorder
    with pytest.raises(UsageError, match="a listener named 'Recorder'"):
        engine.add_listener(Recorder())
    with pytest.raises(UsageError, match="which has Recorder"):
        engine.remove_listener(Recorder())
    engine.destroy()


# ---- checkpoints ---------------------------------------------------------------------------------


class Counting(Listener):
    """Counts updates, and continues counting after a load."""

    name = "counting"

    def __init__(self) -> None:
        self.count, self.loaded = 0, False

    def after_update(self, update: Update) -> None:
        self.count += 1

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count, "by rank": (0.5, None)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        assert state["by rank"] == (0.5, None)
        self.count, self.loaded = state["count"], True


class Picky(Counting):
    """Takes no state but its own."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if state["count"]:
            raise ValueError("this is not mine")


@on_ranks(2)
def test_state_is_saved_by_name(tmp_path: Path) -> None:
    engine = engine_of(2)
    engine.add_listener(Counting())
    engine.add_listener(Recorder())  # has no state
    train(engine, range(2))
    engine.save_checkpoint(tmp_path)
    saved = engine.state_dict()

    again, counting = engine_of(2), Counting()
    again.add_listener(counting)
    with logged() as lines:
        again.load_checkpoint(tmp_path)
    assert (counting.count, counting.loaded, lines) == (2, True, [])

    without = engine_of(2)
    with logged() as lines:
        without.load_checkpoint(tmp_path)
    assert_equal(without.state_dict(), saved)
    if hadal.comm.get_rank() == 0:
        (line,) = lines
        assert "listeners counting, which the engine lacks" in line
    without.save_checkpoint(f"{tmp_path}/without")
    late = Counting()
    without.add_listener(late)
    with logged() as lines:
        without.load_checkpoint(f"{tmp_path}/without")
    assert not late.loaded
    if hadal.comm.get_rank() == 0:
        (line,) = lines
        assert "lacks the state of listeners counting" in line

    refusing = engine_of(2)
    refusing.add_listener(Picky())
    before = refusing.state_dict()
    with pytest.raises(CheckpointError, match=r"listener 'counting' does not fit Picky"):
        refusing.load_checkpoint(tmp_path)
    assert_equal(refusing.state_dict(), before)
    for one in (engine, again, without, refusing):
        one.destroy()


# ---- as it is told -------------------------------------------------------------------------------


def run_example(code: str) -> list[tuple[str, float, int]]:
    sent: list[tuple[str, float, int]] = []

    class Tracker:
        def log(self, name: str, value: float, samples: int) -> None:
            sent.append((name, value, samples))

    engine = engine_of(1)
    exec(code, {"hadal": hadal, "engine": engine, "tracker": Tracker()})
    losses = train(engine, range(20))
    engine.destroy()
    assert [value for name, value, _ in sent if name == "loss"] == [
        float(losses[9]),
        float(losses[19]),
    ]
    return sent


def test_the_example_of_the_page_runs(ranks: RankPools) -> None:
    page = (ROOT / "docs/listeners.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    ((first, *_),) = ranks(1).run(run_example, code)
    assert first[0] == "loss" and first[2] == 30
