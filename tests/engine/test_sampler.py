"""Distribution of samples: each is read, replicas get equal numbers, and a break has no effect."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, strategies as st
from torch.utils.data import DistributedSampler

from hadal.data.reading import Sharding, batches_of, count_batches, order_of
from hadal.errors import UsageError

COUNTS = st.integers(0, 60)
SHARDINGS = st.builds(
    Sharding, st.integers(1, 5), replicas=st.integers(1, 5), drop_last=st.booleans()
)


def every_replica(count: int, sharding: Sharding, done: int = 0) -> list[list[list[int]]]:
    order = order_of(count, 0, 0, shuffle=True)
    return [
        list(batches_of(order, replace(sharding, replica=replica), done))
        for replica in range(sharding.replicas)
    ]


@given(COUNTS, SHARDINGS)
def test_replicas_get_equal_batches_that_hold_every_sample(count: int, sharding: Sharding) -> None:
    replicas = every_replica(count, sharding)
    lengths = [[len(batch) for batch in batches] for batches in replicas]
    assert lengths == [lengths[0]] * sharding.replicas
    assert len(lengths[0]) == count_batches(count, sharding)
    read = [index for batches in replicas for batch in batches for index in batch]
    if sharding.drop_last:
        assert set(lengths[0]) <= {sharding.batch_size}
        assert len(read) == len(set(read)) == count // sharding.stride * sharding.stride
    else:
        assert set(read) == set(range(count))
        assert len(read) - count < sharding.replicas  # what is read twice only fills up


@given(COUNTS, SHARDINGS, st.integers(0, 20))
def test_a_break_leaves_no_trace(count: int, sharding: Sharding, batches: int) -> None:
    whole = every_replica(count, sharding)
    rest = every_replica(count, sharding, batches * sharding.stride)
    assert rest == [one[batches:] for one in whole]


@given(COUNTS, SHARDINGS, SHARDINGS, st.integers(0, 20))
def test_the_rest_goes_to_other_replicas(
    count: int, before: Sharding, after: Sharding, batches: int
) -> None:
    before, after = replace(before, drop_last=False), replace(after, drop_last=False)
    done = batches * before.stride
    first = [batch for one in every_replica(count, before) for batch in one[:batches]]
    rest = [batch for one in every_replica(count, after, done) for batch in one]
    assert {index for batch in first + rest for index in batch} == set(range(count))
    lengths = {len(one) for one in every_replica(count, after, done)}
    assert lengths == {count_batches(max(0, count - done), after)}


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("epoch", [0, 3])
def test_the_order_is_torchs(drop_last: bool, shuffle: bool, epoch: int) -> None:
    data = range(23)
    for replica in range(3):
        sampler = DistributedSampler(data, 3, replica, shuffle, seed=5, drop_last=drop_last)
        sampler.set_epoch(epoch)
        order = order_of(23, 5, epoch, shuffle)
        (batch,) = batches_of(order, Sharding(len(sampler), 3, replica, drop_last))
        assert batch == list(sampler)


def test_an_order_hangs_on_seed_and_epoch_alone() -> None:
    one = order_of(50, 1, 2, shuffle=True)
    torch.rand(3)
    assert torch.equal(one, order_of(50, 1, 2, shuffle=True))
    assert not torch.equal(one, order_of(50, 1, 3, shuffle=True))


@pytest.mark.parametrize("sizes", [(0, 1, 0), (1, 0, 0), (1, 2, 2), (1, 2, -1)])
def test_impossible_sizes_are_refused(sizes: tuple[int, int, int]) -> None:
    with pytest.raises(UsageError, match="replica < replicas"):
        Sharding(*sizes)
