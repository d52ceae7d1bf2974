"""Collectives against plain arithmetic on all ranks' inputs, on one, two and three ranks."""

from __future__ import annotations

import os
from collections.abc import Callable
from itertools import product

import pytest
import torch
from ranks import RankPool, RankPools, RanksFailed

from hadal.comm import Ranks
from hadal.comm.collectives import (
    broadcast_,
    gather_codes,
    gather_objects,
    max_,
    slice_of,
    start_all_gather,
    start_all_reduce,
    start_exchange,
    start_exchange_in_pieces,
    start_reduce_scatter,
    start_scatter,
    sum_,
    sum_into,
)
from hadal.errors import CommunicationError

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# The longest shard spans two blocks of the summation.
SHARD_NUMELS = [0, 1, 8, 70_001]
WORLDS = [1, 2, 3]


def values_of(rank: int, numel: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """One rank's values: whole eighths, so that sums are exact in float32."""
    generator = torch.Generator().manual_seed(100 * seed + rank)
    return (torch.randint(-64, 65, (numel,), generator=generator) / 8).to(dtype)


def mean_of(ranks: Ranks, numel: int, dtype: torch.dtype, wire: torch.dtype) -> torch.Tensor:
    """The mean over ranks in float32, of the values as they travel."""
    everybody = [values_of(rank, numel, dtype).to(wire) for rank in range(ranks.size)]
    return torch.stack([one.float() for one in everybody]).sum(0) * (1.0 / ranks.size)


def gather() -> None:
    ranks = Ranks.world()
    for numel, dtype in product(SHARD_NUMELS, [*DTYPES, torch.float64, torch.int32]):
        expected = torch.cat([values_of(rank, numel, dtype) for rank in range(ranks.size)])
        full = torch.full_like(expected, 77)
        slice_of(full, ranks.rank, ranks).copy_(values_of(ranks.rank, numel, dtype))
        pending = start_all_gather(full, ranks, "a gather")
        pending.wait()
        assert pending.done
        assert torch.equal(full, expected), (numel, dtype)


def reduce_and_scatter() -> None:
    ranks = Ranks.world()
    for numel, dtype, wire, out_dtype in product(SHARD_NUMELS, DTYPES, DTYPES, DTYPES):
        if ranks.size == 1 and wire != dtype:
            continue  # nothing travels
        case = (numel, dtype, wire, out_dtype)
        total = numel * ranks.size
        mean = slice_of(mean_of(ranks, total, dtype, wire), ranks.rank, ranks)
        given = values_of(ranks.rank, total, dtype)
        full = given.clone()
        out = torch.full((numel,), torch.nan, dtype=out_dtype)
        start_reduce_scatter(full, out, ranks, wire, False, "a mean").wait()
        assert torch.equal(out, mean.to(out_dtype)), case
        assert torch.equal(full, given), case
        start_reduce_scatter(full, out, ranks, wire, True, "another mean").wait()
        assert torch.equal(out, (mean.to(out_dtype).float() + mean).to(out_dtype)), case
        mine = slice_of(full, ranks.rank, ranks)
        start_reduce_scatter(full, mine, ranks, wire, False, "a mean in place").wait()
        assert torch.equal(mine, mean.to(dtype)), case


def reduce_everywhere() -> None:
    ranks = Ranks.world()
    for numel, dtype, wire in product(SHARD_NUMELS, DTYPES, DTYPES):
        if ranks.size == 1 and wire != dtype:
            continue
        total = numel * ranks.size
        full = values_of(ranks.rank, total, dtype)
        pending = start_all_reduce(full, ranks, wire, "a mean for all")
        pending.advance()
        pending.wait()
        expected = mean_of(ranks, total, dtype, wire)
        if wire.itemsize < dtype.itemsize:
            expected = expected.to(wire)  # the mean travels as its summands did
        assert torch.equal(full, expected.to(dtype)), (numel, dtype, wire)
    random = torch.randn(3000 * ranks.size)
    start_all_reduce(random, ranks, torch.bfloat16, "the same bits").wait()
    everybody = gather_objects(random.numpy().tobytes(), ranks)
    assert len(set(everybody)) == 1


def average_large_values() -> None:
    """A mean of finite 16-bit values is finite."""
    ranks = Ranks.world()
    full = torch.full((4 * ranks.size,), 60_000.0, dtype=torch.float16)
    start_all_reduce(full, ranks, torch.float16, "a large mean").wait()
    assert (full == 60_000.0).all()


def several_at_a_time() -> None:
    """Collectives in flight together do not take each other's values."""
    ranks = Ranks.world()
    fulls = [values_of(ranks.rank, 6 * ranks.size, torch.float32, seed) for seed in range(4)]
    means = [
        torch.stack([values_of(r, 6 * ranks.size, torch.float32, seed) for r in range(ranks.size)])
        for seed in range(4)
    ]
    flights = [start_all_reduce(full, ranks, torch.float32, "one of four") for full in fulls]
    gathered = torch.zeros(ranks.size)
    gathered[ranks.rank] = ranks.rank + 1
    flights.append(start_all_gather(gathered, ranks, "in between"))
    for pending in reversed(flights):
        pending.wait()
    for full, mean in zip(fulls, means, strict=True):
        assert torch.equal(full, mean.sum(0) * (1.0 / ranks.size))
    assert gathered.tolist() == [rank + 1 for rank in range(ranks.size)]


def exchange() -> None:
    """Every rank sends every other one something of another length, some of them nothing."""
    ranks = Ranks.world()
    for by_collective, dtype in product((False, True), (*DTYPES, torch.int64)):
        with pytest.MonkeyPatch.context() as patch:
            if by_collective:
                patch.setattr(Ranks, "exchanges_in_pairs", lambda *_: False)
            length = {(a, b): (3 * a + b) % 4 for a in range(ranks.size) for b in range(ranks.size)}
            outgoing = [
                torch.full((length[ranks.rank, other],), 10 * ranks.rank + other, dtype=dtype)
                for other in range(ranks.size)
            ]
            incoming = [
                torch.zeros(length[other, ranks.rank], dtype=dtype) for other in range(ranks.size)
            ]
            start_exchange(outgoing, incoming, ranks, "an exchange").wait()
            for other, found in enumerate(incoming):
                assert found.tolist() == [10 * other + ranks.rank] * length[other, ranks.rank]


def exchange_in_pieces() -> None:
    """Some ranks send several tensors to another one, some none, and some are not named at all."""
    ranks = Ranks.world()
    numels = {
        (a, b): [(a + b + n) % 3 for n in range(a % 3)] for a, b in product(range(9), repeat=2)
    }
    for by_collective in (False, True):
        with pytest.MonkeyPatch.context() as patch:
            if by_collective:
                patch.setattr(Ranks, "exchanges_in_pairs", lambda *_: False)
            me, others = ranks.rank, range(ranks.size)
            outgoing = {
                other: [torch.full((n,), 10.0 * me + other) for n in numels[me, other]]
                for other in reversed(others)
                if numels[me, other]
            }
            incoming = {r: [torch.zeros(n) for n in numels[r, me]] for r in others if numels[r, me]}
            pending = start_exchange_in_pieces(outgoing, incoming, torch.empty(1), ranks, "pieces")
            pending.wait()
            for other, pieces in incoming.items():
                assert [p.tolist() for p in pieces] == [
                    [10.0 * other + me] * n for n in numels[other, me]
                ]


def broadcast() -> None:
    ranks = Ranks.world()
    for source in range(ranks.size):
        for dtype in (*DTYPES, torch.float64, torch.int64, torch.bool):
            for shape in ((), (5,), (2, 3), (0,)):
                tensor = torch.full(shape, ranks.rank == source, dtype=dtype)
                broadcast_(tensor, source, ranks, "a broadcast")
                assert bool((tensor == 1).all()), (source, dtype, shape)


def scatter() -> None:
    ranks = Ranks.world()
    for source in range(ranks.size):
        for dtype in DTYPES:
            full = torch.arange(3 * ranks.size, dtype=dtype) + 20 * (ranks.rank != source)
            mine = slice_of(full, ranks.rank, ranks)
            start_scatter(full, source, ranks, "a scatter").wait()
            assert mine.tolist() == [3 * ranks.rank + i for i in range(3)], (source, dtype)


def small_reductions() -> None:
    ranks = Ranks.world()
    largest = torch.tensor([ranks.rank, -ranks.rank])
    max_(largest, ranks, "a maximum")
    assert largest.tolist() == [ranks.size - 1, 0]
    total = torch.tensor(float(ranks.rank + 1), dtype=torch.float64)
    sum_(total, ranks, "a sum")
    assert total == ranks.size * (ranks.size + 1) / 2
    flags = torch.tensor([ranks.rank == 0, False], dtype=torch.uint8)
    max_(flags, ranks, "flags")
    assert flags.tolist() == [1, 0]


def codes_and_objects() -> None:
    ranks = Ranks.world()
    for scale in (1, -1, 2**56):
        expected = [scale * rank for rank in range(ranks.size)]
        assert gather_codes(scale * ranks.rank, ranks) == expected
    found = gather_objects({"rank": ranks.rank}, ranks)
    assert [one["rank"] for one in found] == list(range(ranks.size))


@pytest.mark.slow_cells("reduce_and_scatter-3", "reduce_everywhere-3")
@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize(
    "check",
    [
        gather,
        reduce_and_scatter,
        reduce_everywhere,
        average_large_values,
        several_at_a_time,
        exchange,
        exchange_in_pieces,
        broadcast,
        scatter,
        small_reductions,
        codes_and_objects,
    ],
    ids=lambda check: check.__name__,
)
def test_collective(check: Callable[[], None], world: int, ranks: RankPools) -> None:
    ranks(world).run(check)


def wait_for_a_dead_rank() -> None:
    ranks = Ranks.world()
    if ranks.rank == 1:
        os._exit(3)
    start_all_gather(torch.zeros(8), ranks, "the gather of blocks.7").wait()


def test_a_dead_rank_ends_the_wait_with_the_name_of_the_collective(
    fresh_ranks: Callable[[int], RankPool],
) -> None:
    with pytest.raises(RanksFailed) as failed:
        fresh_ranks(2).run(wait_for_a_dead_rank, timeout=20)
    error = failed.value.errors[0]
    assert isinstance(error, CommunicationError)
    assert "rank 0 lost rank 1 in the gather of blocks.7: connection closed" in str(error)
    assert "Rank 1 died (see its own message)" in str(error)


@pytest.mark.parametrize("accumulate", [False, True])
def test_a_mean_is_rounded_once(accumulate: bool) -> None:
    """Added up in bfloat16, a thousand would swallow each of the small summands."""
    pieces = [torch.full((5,), value, dtype=torch.bfloat16) for value in (1024.0, 1.0, 1.0, 1.0)]
    out = torch.full((5,), 0.25)
    sum_into(out, pieces, 0.25, accumulate)
    assert out.tolist() == [1027 / 4 + 0.25 * accumulate] * 5
