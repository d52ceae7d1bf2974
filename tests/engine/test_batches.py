"""The samples of one update, their count, and the weight of an uneven last batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from hypothesis import given, strategies as st
from ranks import RankPools, on_ranks
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from engine.toys import ROWS, assert_close, batch_of, engine_of, loss_of, model_of, train
from hadal import comm
from hadal.engine.policies import BatchSizes
from hadal.errors import MismatchError, UsageError

STAGES = [0, 1, 2, 3]
RATE = 0.05
counts = st.integers(1, 64)


# ---- arithmetic ---------------------------------------------------------------------------------


@given(micro=counts, accumulation=counts, ranks=counts, updates=st.integers(0, 5))
def test_every_update_ends_with_its_last_micro_step(micro, accumulation, ranks, updates):
    sizes = BatchSizes(micro, accumulation, ranks)
    assert sizes.train == micro * accumulation * ranks
    ends = [sizes.ends_update(step) for step in range(updates * accumulation)]
    assert sum(ends) == updates
    assert all(ends[accumulation - 1 :: accumulation])
    assert sizes.consumed(accumulation + 1) == sizes.train


@given(micro=counts, accumulation=counts, ranks=counts, train=st.integers(-9, 9999))
def test_another_train_batch_changes_the_accumulation_only(micro, accumulation, ranks, train):
    sizes = BatchSizes(micro, accumulation, ranks)
    if train <= 0 or train % (micro * ranks):
        with pytest.raises(UsageError, match=f"expected a multiple of {micro * ranks}, which is"):
            sizes.with_train(train)
        return
    changed = sizes.with_train(train)
    assert changed.train == train
    assert (changed.micro, changed.data_parallel_size) == (micro, ranks)


@pytest.mark.parametrize("train", [True, 8.0, "8", None])
def test_sizes_are_whole(train):
    with pytest.raises(UsageError, match="set_train_batch_size"):
        BatchSizes(1, 1, 1).with_train(train)


@given(micro=counts, accumulation=counts, ranks=counts, backwards=counts)
def test_a_caller_who_counts_consumes_by_backwards(micro, accumulation, ranks, backwards):
    sizes = BatchSizes(micro, accumulation, ranks, managed=False)
    # The formula of the key: (train // accumulation) x backwards.
    assert sizes.consumed(backwards) == sizes.train // accumulation * backwards


# ---- the caller owns the boundary ---------------------------------------------------------------


def sgd(parameters: object) -> torch.optim.Optimizer:
    """A factor in the gradient is a factor in its step, unlike Adam's."""
    return torch.optim.SGD(parameters, RATE)  # type: ignore[arg-type]


def alone(updates: Sequence[Sequence[int]], divisors: Sequence[float]) -> dict[str, Tensor]:
    """One process: per update the sum of these micro-steps' mean gradients over a divisor."""
    model = model_of()
    optimizer = sgd(model.parameters())
    for steps, divisor in zip(updates, divisors, strict=True):
        optimizer.zero_grad()
        for step in steps:
            for rank in range(comm.get_world_size()):
                inputs, targets = batch_of(step, rank)
                loss = loss_of(model(inputs), targets)
                (loss / (comm.get_world_size() * divisor)).backward()
        optimizer.step()
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def step_when_the_caller_says(stage: int) -> None:
    seen = []

    class Recording(torch.optim.lr_scheduler.LRScheduler):
        def get_lr(self) -> list[float]:
            if self.last_epoch:
                seen.append(engine.is_gradient_accumulation_boundary())
            return [group["lr"] for group in self.optimizer.param_groups]

    engine = engine_of(
        stage,
        wishes={"optimizer": sgd, "lr_scheduler": Recording},
        managed_gradient_accumulation=False,
        gradient_accumulation_steps=2,
        optimizer=None,
    )
    world = comm.get_world_size()
    updates, number = [range(2), range(2, 5), range(5, 6)], 0
    for count, steps in enumerate(updates):
        for step in steps:
            inputs, targets = batch_of(step)
            assert not engine.is_gradient_accumulation_boundary()
            if count == 1:
                loss = loss_of(engine(inputs), targets) / len(steps)
                engine.backward(loss, scale_wrt_gas=False)
            else:
                engine.backward(loss_of(engine(inputs), targets))
        if count == 1:
            with pytest.raises(UsageError, match="inside an accumulation"):
                engine.set_train_batch_size(ROWS * world)
        engine.step()
        number += len(steps)
        assert (engine.global_steps, engine.micro_steps) == (count + 1, number)
        assert engine.global_samples == number * ROWS * world
    assert seen == [True] * 3
    # The first and the last are divided by gradient_accumulation_steps, the second by the caller.
    assert_close(engine.state_dict(), alone(updates, [2, 3, 2]))
    with pytest.raises(UsageError, match="managed_gradient_accumulation"):
        engine.set_gradient_accumulation_boundary(True)
    with pytest.raises(UsageError, match="has no gradients"):
        engine.step()
    engine.set_train_batch_size(3 * ROWS * world)
    assert engine.gradient_accumulation_steps() == 3
    assert engine.micro_steps == number
    engine.destroy()


def name_the_boundary(stage: int) -> None:
    """The caller counts, as Accelerate does: a boundary before each backward."""
    engine = engine_of(
        stage, wishes={"optimizer": sgd}, optimizer=None, gradient_accumulation_steps=4
    )
    for step in range(3):
        engine.set_gradient_accumulation_boundary(step == 2)
        assert engine.is_gradient_accumulation_boundary() == (step == 2)
        inputs, targets = batch_of(step)
        engine.backward(loss_of(engine(inputs), targets) / 3, scale_wrt_gas=False)
        engine.step()
    assert engine.global_steps == 1
    assert_close(engine.state_dict(), alone([range(3)], [3]))
    engine.set_gradient_accumulation_boundary(None)
    assert not engine.is_gradient_accumulation_boundary(), "the update ended the count as well"
    engine.set_train_batch_size(4 * ROWS * comm.get_world_size())
    engine.destroy()


def step_once_for_all(stage: int) -> None:
    """The caller counts, as Megatron does: it sets the batch, and one step ends all backwards."""
    engine = engine_of(
        stage, wishes={"optimizer": sgd}, optimizer=None, gradient_accumulation_steps=2
    )
    updates = [range(2), range(2, 5), range(5, 7)]
    for number, steps in enumerate(updates):
        engine.set_train_batch_size(len(steps) * ROWS * comm.get_world_size())
        for step in steps:
            engine.set_gradient_accumulation_boundary(step == steps[-1])
            inputs, targets = batch_of(step)
            engine.backward(loss_of(engine(inputs), targets))
            with pytest.raises(UsageError, match="inside an accumulation"):
                engine.set_train_batch_size(ROWS * comm.get_world_size())
        engine.step()
        assert engine.global_steps == number + 1
    assert_close(engine.state_dict(), alone(updates, [2, 3, 2]))
    engine.destroy()


@pytest.mark.claims("managed_gradient_accumulation", "gradient_accumulation_steps")
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize(
    "case",
    [step_when_the_caller_says, name_the_boundary, step_once_for_all],
    ids=lambda case: case.__name__,
)
def test_the_caller_owns_the_boundary(
    case: Callable[[int], None], stage: int, ranks: RankPools
) -> None:
    ranks(2).run(case, stage)


# ---- uneven last batches ------------------------------------------------------------------------


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@on_ranks(2)
def test_ranks_must_agree_on_the_boundary(stage: int) -> None:
    """Other sizes on another rank raise an error at the first backward, instead of a hang."""
    engine = engine_of(stage)
    train(engine, range(1))
    engine.set_train_batch_size(ROWS * comm.get_world_size() * (1 + comm.get_rank()))
    with pytest.raises(MismatchError, match=r"rank 0: .* last backward, rank 1: .* not end"):
        train(engine, range(1, 2))
    engine.set_train_batch_size(ROWS * comm.get_world_size())
    train(engine, range(1, 2))
    assert engine.global_steps == 2
    engine.destroy()


def rows(count: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(8)
    inputs = torch.randn(count, 6, generator=generator)
    return TensorDataset(torch.arange(count), inputs, torch.randn(count, 4, generator=generator))


def mean_of_means(model: nn.Module, updates: Sequence[Sequence[Sequence[int]]]) -> None:
    """One process: per update, each rank's mean over its own samples counts alike."""
    optimizer, data = sgd(model.parameters()), rows(13)
    for ranks in updates:
        optimizer.zero_grad()
        for mine in ranks:
            _, inputs, targets = data[mine]
            (loss_of(model(inputs), targets) / len(ranks)).backward()
        optimizer.step()


def train_an_epoch(stage: int) -> None:
    """13 samples on 2 ranks, 3 at a time: each gets 7, the last of them alone in its batch."""
    engine = engine_of(stage, wishes={"optimizer": sgd, "training_data": rows(13)}, optimizer=None)
    taken = []
    for numbers, inputs, targets in engine.training_dataloader:
        engine.backward(loss_of(engine(inputs), targets))
        engine.step()
        taken.append(numbers.tolist())
    assert [len(batch) for batch in taken] == [3, 3, 1]
    everybody = comm.collectives.gather_objects(taken, comm.Ranks.world())
    assert {n for mine in everybody for batch in mine for n in batch} == set(range(13))
    plain = model_of()
    mean_of_means(plain, list(zip(*everybody, strict=True)))
    assert_close(engine.state_dict(), dict(plain.state_dict()))
    engine.destroy()


def train_on_unlike_batches(stage: int) -> None:
    """Rank 0 has three samples and rank 1 has one: both count alike."""
    engine = engine_of(stage, wishes={"optimizer": sgd}, optimizer=None)
    cuts, data = [[0, 1, 2], [3]], rows(13)
    _, inputs, targets = data[cuts[comm.get_rank()]]
    engine.backward(loss_of(engine(inputs), targets))
    engine.step()
    plain = model_of()
    mean_of_means(plain, [cuts])
    assert_close(engine.state_dict(), dict(plain.state_dict()))
    engine.destroy()


@pytest.mark.claims("train_micro_batch_size_per_gpu")
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize(
    "case", [train_an_epoch, train_on_unlike_batches], ids=lambda case: case.__name__
)
def test_a_smaller_last_batch_counts_like_any_other(
    case: Callable[[int], None], stage: int, ranks: RankPools
) -> None:
    ranks(2).run(case, stage)
