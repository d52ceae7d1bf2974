"""Buckets in motion: late and missing gradients, ranks that go different ways, what is kept."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from engine.toys import TINY, assert_close, batch_of, engine_of, loss_of, model_of, train
from ranks import RankPools, on_ranks
from torch import nn

from hadal import comm
from hadal.errors import MismatchError, ShardedAccessError, UsageError
from hadal.zero import GatheredParameters
from hadal.zero.bucket import Weights


class Branches(nn.Module):
    """Which branch runs is said from outside; branch -1 runs none."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(6, 9)
        self.branches = nn.ModuleList(nn.Linear(9, 9) for _ in range(3))
        self.head = nn.Linear(9, 4)

    def forward(self, inputs: torch.Tensor, branch: int) -> torch.Tensor:
        hidden = torch.tanh(self.trunk(inputs))
        if branch >= 0:
            hidden = hidden + self.branches[branch](hidden)
        return self.head(hidden)


def branches(seed: int = 3) -> Branches:
    torch.manual_seed(seed)
    return Branches()


# One row per update, one column per rank: late ones, missing ones, ranks that differ.
PLANS = {
    "late": [(-1, -1), (-1, -1), (0, 0), (1, 1), (0, 0)],
    "by rank": [(0, 1), (1, 0), (2, 2), (0, -1), (-1, 1)],
    "one rank is late": [(-1, -1), (0, -1), (-1, 2), (1, 1)],
    "stops coming": [(0, 0), (0, 0), (-1, -1), (0, 0)],
}


def train_along(plan: list[tuple[int, int]], stage: int) -> None:
    rank, world = comm.get_rank(), comm.get_world_size()
    plain, model = branches(), branches()
    optimizer = torch.optim.AdamW(plain.parameters(), lr=0.01, weight_decay=0.0)
    engine = engine_of(stage, model)
    for step, row in enumerate(plan):
        for parameter in plain.parameters():
            parameter.grad = torch.zeros_like(parameter)  # no gradient counts as zero
        for other in range(world):
            inputs, targets = batch_of(step, other)
            (loss_of(plain(inputs, row[other]), targets) / world).backward()
        optimizer.step()
        inputs, targets = batch_of(step)
        engine.backward(loss_of(engine(inputs, row[rank]), targets))
        engine.step()
    assert_close(engine.state_dict(), dict(plain.state_dict()))
    engine.destroy()


@pytest.mark.fast_cells(
    "late-1",
    "by rank-1",
    "by rank-2",
    "one rank is late-0",
    "one rank is late-1",
    "one rank is late-2",
    "one rank is late-3",
)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS.keys())
def test_gradients_that_come_late_or_not_at_all(
    plan: list[tuple[int, int]], stage: int, ranks: RankPools
) -> None:
    ranks(2).run(train_along, plan, stage)


class Gate(nn.Module):
    """Two parameters of one bucket; the first, whose gradient comes last, is not always used."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Parameter(torch.full((4,), 0.5))
        self.outer = nn.Parameter(torch.full((4,), 2.0))
        self.is_open = False

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return torch.tanh(inputs * self.inner if self.is_open else inputs) * self.outer


def gated() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 4), Gate())


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@on_ranks(2)
def test_a_gradient_that_was_collected_may_come_late(stage: int, overlap: bool) -> None:
    """A gradient that is collected already comes once more behind its bucket's reduction."""
    rank, world = comm.get_rank(), comm.get_world_size()
    plain, model = gated(), gated()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    engine = engine_of(
        stage,
        model,
        zero_optimization={"stage": stage, **TINY, "overlap_comm": overlap},
        gradient_accumulation_steps=2,
        optimizer={"type": "SGD", "params": {"lr": 0.1}},
    )
    for step, is_open in enumerate((False, False, True, True)):
        plain[1].is_open = model[1].is_open = is_open
        for other in range(world):
            inputs, targets = batch_of(step, other)
            (loss_of(plain(inputs), targets) / (2 * world)).backward()
        if step % 2:
            optimizer.step()
            optimizer.zero_grad()
        inputs, targets = batch_of(step, rank)
        engine.backward(loss_of(engine(inputs), targets))
        engine.step()
    assert_close(engine.state_dict(), dict(plain.state_dict()))
    engine.destroy()


def programs_differ() -> str:
    model = model_of()
    engine = engine_of(3, model)
    with pytest.raises(MismatchError) as raised:
        if comm.get_rank() == 0:
            engine(batch_of(0)[0])
        else:
            with GatheredParameters(model[0].weight):
                pass
    return str(raised.value)


def test_ranks_whose_programs_differ_are_told(ranks: RankPools) -> None:
    for message in ranks(2).run(programs_differ):
        assert "rank 0: the beginning of a forward" in message
        assert "rank 1: the end of GatheredParameters" in message


def weights_come_and_go(limits: dict[str, Any]) -> list[list[int]]:
    """Count gathered buckets: at the start, after forward, after backward, after step."""
    engine = engine_of(3, zero_optimization={"stage": 3, **TINY, **limits})
    buckets = [b for b in engine._parts.runtime.buckets if b.partition.weights]

    def count() -> int:
        return sum(bucket.state is Weights.FULL for bucket in buckets)

    counts = [count()]
    inputs, targets = batch_of(0)
    loss = loss_of(engine(inputs), targets)
    counts.append(count())
    engine.backward(loss)
    counts.append(count())
    engine.step()
    counts.append(count())
    with pytest.raises(ShardedAccessError, match=r"parameter 0\.weight was read \(isnan\)"):
        engine.module[0].weight.isnan()
    engine.destroy()
    return counts


def test_weights_are_whole_only_while_they_are_used(ranks: RankPools) -> None:
    assert ranks(2).run(weights_come_and_go, {}) == [[0, 0, 0, 0]] * 2


def test_weights_within_the_limits_stay_until_backward(ranks: RankPools) -> None:
    wide = {"stage3_max_live_parameters": 10**6, "stage3_max_reuse_distance": 10**6}
    for counts in ranks(2).run(weights_come_and_go, wide):
        assert counts[0] == 0
        assert counts[1] > 0
        assert counts[2:] == [0, 0]


def backward_of_another_engine(stage: int) -> str:
    mine, other = engine_of(stage), engine_of(stage)
    inputs, targets = batch_of(0)
    with pytest.raises(UsageError) as raised:
        mine.backward(loss_of(other.module(mine(inputs).repeat(1, 2)[:, :6]), targets))
    return str(raised.value)


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_gradients_of_another_engines_backward_are_refused(stage, ranks: RankPools) -> None:
    for told in ranks(2).run(backward_of_another_engine, stage):
        assert "in the backward of another engine" in told
        assert "call loss.backward()" in told


class Fails(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = model_of()
        self.fails = False

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.inner[0](inputs)
        if self.fails:
            raise FloatingPointError("mine")
        return self.inner[1:](hidden)


@pytest.mark.parametrize("stage", [0, 3])
@on_ranks(2)
def test_training_goes_on_after_a_forward_that_raised(stage: int) -> None:
    expected = engine_of(stage, Fails())
    train(expected, range(2))
    model = Fails()
    engine = engine_of(stage, model)
    for fails in (False, True, False):
        model.fails = fails
        if fails:
            with pytest.raises(FloatingPointError):
                engine(batch_of(0)[0])
        else:
            train(engine, range(int(engine.global_steps), int(engine.global_steps) + 1))
    assert_close(engine.state_dict(), expected.state_dict())
    engine.destroy()
    expected.destroy()


def read_the_modules_state() -> str:
    engine = engine_of(3)
    with pytest.raises(ShardedAccessError) as raised:
        engine.module.state_dict()
    engine.destroy()
    return str(raised.value)


def test_the_modules_own_state_dict_refuses_placeholders(ranks: RankPools) -> None:
    for message in ranks(2).run(read_the_modules_state):
        assert "engine.state_dict()" in message


class LateInABucket(nn.Module):
    """Two weights of one bucket, of which one may stay unused, behind branches."""

    def __init__(self) -> None:
        super().__init__()
        self.pair = Pair()
        self.branches = nn.ModuleList(nn.Linear(9, 9) for _ in range(2))
        self.head = nn.Linear(9, 4)

    def forward(self, inputs: torch.Tensor, both: bool, branch: int) -> torch.Tensor:
        hidden = torch.tanh(self.pair(inputs, both))
        if branch >= 0:
            hidden = hidden + self.branches[branch](hidden)
        return self.head(hidden)


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.randn(6))
        self.second = nn.Parameter(torch.randn(6, 9))

    def forward(self, inputs: torch.Tensor, both: bool) -> torch.Tensor:
        return (inputs * self.first if both else inputs) @ self.second


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@on_ranks(2)
def test_a_late_gradient_waits_for_no_rank_that_waits_for_it(stage: int) -> None:
    """The second gradient of a bucket comes behind its reduction, which the other rank delays."""
    rank = comm.get_rank()
    models = []
    for _ in range(2):
        torch.manual_seed(3)
        models.append(LateInABucket())
    plain, model = models
    optimizer = torch.optim.AdamW(plain.parameters(), lr=0.01, weight_decay=0.0)
    engine = engine_of(stage, model)
    plan = [((False, -1), (False, -1)), ((True, -1), (False, 0)), ((False, 1), (True, 0))]
    for step, row in enumerate(plan):
        for parameter in plain.parameters():
            parameter.grad = torch.zeros_like(parameter)
        for other, path in enumerate(row):
            inputs, targets = batch_of(step, other)
            (loss_of(plain(inputs, *path), targets) / 2).backward()
        optimizer.step()
        inputs, targets = batch_of(step)
        engine.backward(loss_of(engine(inputs, *row[rank]), targets))
        engine.step()
    assert_close(engine.state_dict(), dict(plain.state_dict()))
    engine.destroy()
