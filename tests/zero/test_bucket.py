"""The life of a bucket: sharded and back, what users write, what they break."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import pytest
import torch
from ranks import RankPools, on_ranks

from hadal.errors import ModelError, ShardedAccessError
from hadal.zero.bucket import Bucket, Weights, refresh_all
from hadal.zero.policy import STAGES, Partition

from .buckets import BF16, FP32, FROZEN_WEIGHTS, SHAPES, WIDE, given_values, make_bucket

PRECISIONS = (FP32, BF16, WIDE)


def flat(bucket: Bucket, values: list[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    full = torch.zeros(bucket.layout.numel, dtype=dtype)
    by_name = {f"layer.{index}": value for index, value in enumerate(values)}
    for slot in bucket.layout.slots:
        full[slot.offset : slot.stop] = by_name[slot.name].reshape(-1).to(dtype)
    return full


def check(bucket: Bucket, values: list[torch.Tensor]) -> None:
    """Weights and master are what `values` (fp32) say."""
    precision = bucket.precision
    start, stop = bucket.span
    expected = flat(bucket, values, precision.compute)
    assert torch.equal(bucket.shard, expected[start:stop])
    if bucket.trainable:
        master = flat(bucket, values, precision.master)
        assert torch.equal(bucket.master, master[start:stop])
    else:
        assert bucket.master is None
    if bucket.state is Weights.FULL:
        assert torch.equal(bucket.full, expected)
        for slot, parameter in zip(bucket.layout.slots, bucket.parameters, strict=True):
            assert parameter.dtype == precision.compute
            assert parameter.shape == slot.shape
            assert torch.equal(parameter.detach(), values[int(slot.name[-1])].to(parameter.dtype))


def rank_0s_values_on_every_rank() -> None:
    for partition, precision in product(STAGES, PRECISIONS):
        bucket = make_bucket(partition, precision)
        assert bucket.state is Weights.FULL
        check(bucket, given_values(0))
    bucket = make_bucket(FROZEN_WEIGHTS, BF16, trainable=False)
    check(bucket, given_values(0))


def groups_lie_together() -> None:
    bucket = make_bucket(STAGES[3], FP32, groups=(2, 0, 1, 0, 2))
    assert [slot.group for slot in bucket.layout.slots] == [0, 0, 1, 2, 2]
    assert [slot.name[-1] for slot in bucket.layout.slots] == list("13204")
    check(bucket, given_values(0))


def there_and_back() -> None:
    for precision, trainable in product(PRECISIONS, (True, False)):
        partition = STAGES[3] if trainable else FROZEN_WEIGHTS
        bucket = make_bucket(partition, precision, trainable=trainable)
        pointers = [parameter.data_ptr() for parameter in bucket.parameters]
        for _ in range(3):
            bucket.reshard()
            bucket.reshard()
            assert bucket.state is Weights.SHARDED
            assert bucket.full.untyped_storage().nbytes() == 0
            for slot, parameter in zip(bucket.layout.slots, bucket.parameters, strict=True):
                assert parameter.shape == slot.shape
                assert parameter.dtype == precision.compute
                assert parameter.requires_grad == trainable
                assert bool(parameter.isnan().all())
            check(bucket, given_values(0))
            bucket.start_unshard()
            bucket.unshard()
            assert bucket.state is Weights.FULL
            check(bucket, given_values(0))
        full = bucket.full.untyped_storage()
        assert full.nbytes() == bucket.layout.numel * precision.compute.itemsize
        assert len(pointers) == len(SHAPES)
        views = [slot.offset * precision.compute.itemsize for slot in bucket.layout.slots]
        for parameter, offset in zip(bucket.parameters, views, strict=True):
            if parameter.numel():
                assert parameter.data_ptr() == full.data_ptr() + offset


def whole_weights_are_not_cut() -> None:
    for partition in STAGES[:3]:
        bucket = make_bucket(partition, FP32)
        bucket.reshard()
        assert bucket.state is Weights.FULL
        check(bucket, given_values(0))


def placeholders_share_nothing() -> None:
    bucket = make_bucket(STAGES[3], FP32)
    bucket.reshard()
    pointers = [p.data_ptr() for p in bucket.parameters if p.numel()]
    assert len(set(pointers)) == len(pointers)
    assert sum(p.untyped_storage().nbytes() for p in bucket.parameters[:1]) <= 4 * len(SHAPES)


def edits_are_kept() -> None:
    for partition, precision in product(STAGES, PRECISIONS):
        bucket = make_bucket(partition, precision)
        values = [value.clone() for value in given_values(0)]
        with torch.no_grad():
            bucket.parameters[0][1, 2] = 5.0
            bucket.parameters[4].mul_(2)
        values[0][1, 2] = 5.0
        values[4] = (values[4].to(precision.compute) * 2).float()
        bucket.reshard()
        bucket.absorb_edits()
        if partition.weights:
            bucket.unshard()
        # What was not written keeps the master's full precision, next to the edit too.
        check(bucket, values)


def edits_are_seen_once() -> None:
    """A later update of the master is not undone by an edit that was absorbed before."""
    bucket = make_bucket(STAGES[1], BF16)
    with torch.no_grad():
        bucket.parameters[2].fill_(3.0)
    bucket.absorb_edits()
    bucket.master.fill_(1.5)
    bucket.write_back(0, bucket.shard.numel())
    refresh_all([bucket])
    bucket.absorb_edits()
    assert bool((bucket.master == 1.5).all())
    assert bool((bucket.full == 1.5).all())


def stepped_masters_reach_every_rank() -> None:
    for partition, precision in product(STAGES, PRECISIONS):
        bucket = make_bucket(partition, precision)
        bucket.reshard()
        bucket.master.add_(1.0)
        bucket.write_back(0, bucket.shard.numel())
        refresh_all([bucket])
        bucket.unshard()
        start, stop = bucket.span
        expected = flat(bucket, given_values(0), torch.float32)
        padded = torch.ones(bucket.layout.numel) + expected
        assert torch.equal(bucket.master, padded[start:stop])
        assert torch.equal(bucket.full, padded.to(precision.compute))


def edits_through_data_are_kept() -> None:
    """A write through `.data` moves no version counter."""
    for partition, precision in product(STAGES, PRECISIONS):
        bucket = make_bucket(partition, precision)
        values = [value.clone() for value in given_values(0)]
        bucket.parameters[2].data.fill_(7.0)
        values[2].fill_(7.0)
        bucket.absorb_edits()
        bucket.reshard()
        bucket.unshard()
        check(bucket, values)


@on_ranks(2)
def test_a_rank_lends_its_shard() -> None:
    """One rank gathers while the other lends."""
    bucket = make_bucket(STAGES[3], FP32)
    bucket.reshard()
    if bucket.ranks.rank == 0:
        bucket.unshard()
    else:
        bucket.serve()
        assert bucket.state is Weights.SHARDED
    check(bucket, given_values(0))


def release_gives_memory_back() -> None:
    for partition in STAGES:
        bucket = make_bucket(partition, BF16)
        bucket.release()
        for parameter in bucket.parameters:
            nbytes = parameter.numel() * 2
            assert parameter.untyped_storage().nbytes() == nbytes
        assert not bucket.full.untyped_storage().nbytes()
        for slot, parameter in zip(bucket.layout.slots, bucket.parameters, strict=True):
            expected = given_values(0)[int(slot.name[-1])].bfloat16()
            assert torch.equal(parameter.detach(), expected)


LIVES = [
    rank_0s_values_on_every_rank,
    groups_lie_together,
    there_and_back,
    whole_weights_are_not_cut,
    placeholders_share_nothing,
    edits_are_kept,
    edits_are_seen_once,
    stepped_masters_reach_every_rank,
    edits_through_data_are_kept,
    release_gives_memory_back,
]


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("life", LIVES, ids=lambda life: life.__name__)
def test_bucket(life: Callable[[], None], world: int, ranks: RankPools) -> None:
    ranks(world).run(life)


# ---- mistakes -----------------------------------------------------------------------------------


@torch.no_grad()
def fill(bucket: Bucket) -> None:
    bucket.parameters[2].fill_(0.0)


def fill_data(bucket: Bucket) -> None:
    bucket.parameters[2].data.fill_(1.0)


def write_an_element(bucket: Bucket) -> None:
    bucket.parameters[2].data[3] = 1.0


@torch.no_grad()
def fill_with_nan(bucket: Bucket) -> None:
    """The values do not tell, the version does."""
    bucket.parameters[2].fill_(torch.nan)


def write_while_sharded(write: Callable[[Bucket], None]) -> str:
    bucket = make_bucket(STAGES[3], FP32)
    bucket.reshard()
    write(bucket)
    with pytest.raises(ShardedAccessError) as raised:
        bucket.unshard()
    return str(raised.value)


@pytest.mark.parametrize("write", [fill, fill_data, write_an_element, fill_with_nan])
def test_a_write_that_reaches_nothing_is_told(
    write: Callable[[Bucket], None], ranks: RankPools
) -> None:
    for rank, message in enumerate(ranks(2).run(write_while_sharded, write)):
        assert f"rank {rank}: parameter layer.2 was written to" in message
        assert "GatheredParameters" in message


def float_(parameter: torch.nn.Parameter) -> None:
    parameter.data = parameter.data.float()


def new_memory(parameter: torch.nn.Parameter) -> None:
    parameter.data = parameter.data.clone()


def leave(change: Callable[[torch.nn.Parameter], None], partition: Partition) -> str:
    bucket = make_bucket(partition, BF16)
    change(bucket.parameters[4])
    with pytest.raises(ModelError) as raised:
        bucket.reshard()
        bucket.absorb_edits()
    return str(raised.value)


@pytest.mark.parametrize("stage", [0, 1, 3])
@pytest.mark.parametrize("change", [float_, new_memory])
def test_a_parameter_that_left_is_named(
    change: Callable[[torch.nn.Parameter], None], stage: int, ranks: RankPools
) -> None:
    for rank, message in enumerate(ranks(2).run(leave, change, STAGES[stage])):
        assert f"rank {rank}: parameter layer.4 left its bucket" in message
        assert ("torch.float32" if change is float_ else "torch.bfloat16") in message
