"""One bucket's gradients: collected, averaged, late, missing."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import pytest
import torch
from ranks import RankPools

from hadal.zero.bucket import Bucket
from hadal.zero.gradients import Arrival, Gradients
from hadal.zero.policy import STAGES

from .buckets import BF16, FP32, SHAPES, WIDE, make_bucket

PRECISIONS = (FP32, BF16, WIDE)
ALL = tuple(range(len(SHAPES)))


def gradient(rank: int, index: int, turn: int) -> torch.Tensor:
    """Small whole numbers times the world's size: sums and means are exact in every dtype."""
    generator = torch.Generator().manual_seed(1000 * turn + 10 * rank + index)
    return torch.randint(-3, 4, SHAPES[index], generator=generator).float()


def bring(gradients: Gradients, indices: tuple[int, ...], turn: int) -> None:
    bucket = gradients.bucket
    for index in indices:
        parameter = bucket.parameters[index]
        given = gradient(bucket.ranks.rank, index, turn) * bucket.ranks.size
        given = given.to(parameter.dtype)
        if parameter.grad is None:
            parameter.grad = given
        else:
            parameter.grad.add_(given)  # as autograd does
        gradients.take(index)
        assert parameter.grad is None


def reduce(gradients: Gradients) -> None:
    gradients.start_reduce()
    assert gradients.state is Arrival.REDUCING
    gradients.finish_reduce()
    assert gradients.state is Arrival.MEAN


def expected(bucket: Bucket, brought: list[tuple[tuple[int, ...], int]]) -> torch.Tensor:
    """The mean of what all ranks brought: their sum, as each multiplied by the world's size."""
    full = torch.zeros(bucket.layout.numel)
    for indices, turn in brought:
        for index in indices:
            slot = bucket.layout.slots[index]
            for rank in range(bucket.ranks.size):
                full[slot.offset : slot.stop] += gradient(rank, index, turn).reshape(-1)
    start, stop = bucket.span
    return full[start:stop]


def agrees(gradients: Gradients, brought: list[tuple[tuple[int, ...], int]]) -> bool:
    return torch.equal(gradients.mean.float(), expected(gradients.bucket, brought))


def every_policy() -> list[Gradients]:
    return [Gradients(make_bucket(*policy)) for policy in product(STAGES, PRECISIONS)]


def mean_over_ranks() -> None:
    for gradients in every_policy():
        for turn in range(2):  # the second update starts from nothing
            bring(gradients, ALL, turn)
            assert gradients.state is Arrival.LOCAL
            reduce(gradients)
            assert agrees(gradients, [(ALL, turn)])
            precision = gradients.bucket.precision
            assert gradients.mean.dtype == precision.accumulate
            gradients.clear()
            assert gradients.state is Arrival.EMPTY


def missing_ones_count_as_zero() -> None:
    for gradients in every_policy():
        bring(gradients, ALL, 5)
        reduce(gradients)
        gradients.clear()
        bring(gradients, (0, 4), 6)
        reduce(gradients)
        assert agrees(gradients, [((0, 4), 6)])


def nothing_brought_at_all() -> None:
    for gradients in every_policy():
        bring(gradients, ALL, 5)
        reduce(gradients)
        gradients.clear()
        gradients.count_as_zero()
        assert gradients.state is Arrival.MEAN
        assert agrees(gradients, [])
        gradients.clear()
        reduce(gradients)
        assert agrees(gradients, [])


def several_backwards_before_one_reduction() -> None:
    for gradients in every_policy():
        for turn in range(3):
            gradients.place_views()
            bring(gradients, ALL[turn:], turn)
            gradients.remove_views()
        assert all(parameter.grad is None for parameter in gradients.bucket.parameters)
        reduce(gradients)
        assert agrees(gradients, [(ALL[turn:], turn) for turn in range(3)])


def late_ones_are_reduced_once_more() -> None:
    for gradients in every_policy():
        bring(gradients, (0, 2), 0)
        reduce(gradients)
        bring(gradients, (2, 4), 1)
        reduce(gradients)
        assert agrees(gradients, [((0, 2), 0), ((2, 4), 1)])
        bring(gradients, (1,), 2)
        reduce(gradients)
        assert agrees(gradients, [((0, 2), 0), ((2, 4), 1), ((1,), 2)])


def late_ones_on_one_rank_only() -> None:
    for gradients in every_policy():
        bring(gradients, ALL, 0)
        reduce(gradients)
        rank = gradients.bucket.ranks.rank
        if rank == 0:
            bring(gradients, (4,), 1)
        reduce(gradients)
        late = torch.zeros(gradients.bucket.layout.numel)
        slot = gradients.bucket.layout.slots[4]
        late[slot.offset : slot.stop] = gradient(0, 4, 1).reshape(-1)
        start, stop = gradients.bucket.span
        found = gradients.mean.float() - late[start:stop]
        assert torch.equal(found, expected(gradients.bucket, [(ALL, 0)]))


def late_ones_while_the_reduction_runs() -> None:
    for gradients in every_policy():
        bring(gradients, ALL, 0)
        gradients.start_reduce()
        bring(gradients, (0,), 1)
        # Set aside: to collect it would be to wait for the reduction.
        assert gradients.state is Arrival.REDUCING
        assert gradients.waits
        reduce(gradients)
        assert agrees(gradients, [(ALL, 0), ((0,), 1)])
        assert not gradients.waits


def phases_may_be_advanced() -> None:
    for gradients in every_policy():
        bring(gradients, ALL, 3)
        gradients.start_reduce()
        for _ in range(4):
            gradients.advance()
        assert gradients.state is Arrival.MEAN
        assert agrees(gradients, [(ALL, 3)])


def sparse_ones_are_made_dense() -> None:
    gradients = Gradients(make_bucket(STAGES[2], FP32))
    parameter = gradients.bucket.parameters[4]
    parameter.grad = torch.eye(4, 2).to_sparse()
    gradients.take(4)
    reduce(gradients)
    slot = gradients.bucket.layout.slots[4]
    full = torch.zeros(gradients.bucket.layout.numel)
    full[slot.offset : slot.stop] = torch.eye(4, 2).reshape(-1)
    start, stop = gradients.bucket.span
    assert torch.equal(gradients.mean, full[start:stop])


def large_ones_stay_finite() -> None:
    """Gradients that are finite in 16 bits on every rank have a finite mean, late ones too."""
    precision = BF16.__class__(torch.float16, torch.float32, torch.float16, torch.float16)
    for partition in STAGES:
        gradients = Gradients(make_bucket(partition, precision))
        for index, turn in ((0, 0), (4, 1)):
            parameter = gradients.bucket.parameters[index]
            parameter.grad = torch.full_like(parameter, 40_000.0)
            gradients.take(index)
            reduce(gradients)
            assert bool(gradients.mean.isfinite().all()), (partition, turn)


def memory_is_given_back() -> None:
    """The full buffer of sharded gradients lives only while they are collected."""
    gradients = Gradients(make_bucket(STAGES[2], WIDE))
    bring(gradients, ALL, 0)
    assert gradients.full is not None
    reduce(gradients)
    assert gradients.full is None
    assert gradients.mean.numel() == gradients.bucket.layout.shard_numel


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize(
    "life",
    [
        mean_over_ranks,
        missing_ones_count_as_zero,
        nothing_brought_at_all,
        several_backwards_before_one_reduction,
        late_ones_are_reduced_once_more,
        late_ones_on_one_rank_only,
        late_ones_while_the_reduction_runs,
        phases_may_be_advanced,
        sparse_ones_are_made_dense,
        large_ones_stay_finite,
        memory_is_given_back,
    ],
    ids=lambda life: life.__name__,
)
def test_gradients(life: Callable[[], None], world: int, ranks: RankPools) -> None:
    ranks(world).run(life)
