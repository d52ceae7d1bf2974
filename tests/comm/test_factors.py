"""Sums with factors, by every way they may travel, against the formula written out."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from itertools import product

import pytest
import torch
from ranks import RankPools

from comm.traffic import by_collectives, counted
from hadal.comm import Ranks
from hadal.comm.collectives import (
    Factors,
    slice_of,
    start_all_gather,
    start_all_reduce,
    start_gather_in_pieces,
    start_reduce_scatter,
)
from hadal.comm.rows import RowWire, start_rows_all_reduce

FP32, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16
SHARD_NUMEL = 40


def values_of(rank: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(numel, generator=generator).to(dtype)


def factors_of(world: int) -> list[Factors]:
    """Predivided by 3 and by 4, prescaled, and added up."""
    return [
        Factors(1 / 3, 3 / world),
        Factors(1 / 4, 4 / world),
        Factors(1 / world, 1.0),
        Factors(1.0, 1.0),
    ]


def formula(ranks: Ranks, full_dtype: torch.dtype, wire: torch.dtype, factors: Factors):
    """Each rank's part in the order of ranks, in float32."""
    numel = SHARD_NUMEL * ranks.size
    total = torch.zeros(numel)
    for rank in range(ranks.size):
        total += (values_of(rank, numel, full_dtype).float() * factors.before).to(wire).float()
    return total * factors.after


def in_pairs() -> None:
    """Bit for bit."""
    ranks = Ranks.world()
    for dtype, wire, factors in product((FP32, BF16), (FP32, BF16, FP16), factors_of(ranks.size)):
        expected = formula(ranks, dtype, wire, factors)
        given = values_of(ranks.rank, expected.numel(), dtype)
        mine = slice_of(expected, ranks.rank, ranks)
        out = torch.ones(SHARD_NUMEL)
        start_reduce_scatter(given, out, ranks, wire, True, "a sum", factors).wait()
        assert torch.equal(out, mine + 1), (dtype, wire, factors)
        full = given.clone()
        start_all_reduce(full, ranks, wire, "a sum for all", factors).wait()
        if wire.itemsize < dtype.itemsize:
            before, after = factors
            if after > 1:  # carried on before it is enlarged
                unscaled = formula(ranks, dtype, wire, Factors(before, 1.0))
                expected = unscaled.to(wire).float() * after
            expected = expected.to(wire) if after <= 1 else expected
        assert torch.equal(full, expected.to(dtype)), (dtype, wire, factors)


def by_the_backend() -> None:
    """The backend adds up in an order, and dtype, of its own: to rounding."""
    ranks = Ranks.world()
    with by_collectives():
        for dtype, factors in product((FP32, BF16), factors_of(ranks.size)):
            expected = formula(ranks, dtype, dtype, factors)
            given = values_of(ranks.rank, expected.numel(), dtype)
            mine = slice_of(expected, ranks.rank, ranks)
            full, out = given.clone(), torch.ones(SHARD_NUMEL)
            start_reduce_scatter(full, out, ranks, dtype, True, "a sum", factors).wait()
            room = {FP32: 1e-6, BF16: 3e-2}[dtype]
            torch.testing.assert_close(out, mine + 1, rtol=room, atol=room)
            start_all_reduce(given, ranks, dtype, "a sum for all", factors).wait()
            torch.testing.assert_close(given.float(), expected, rtol=room, atol=room)


def in_one_order() -> None:
    """Two terms that 1 swallows one by one, but not their sum: where a slice is cut, and whose it
    is, changes no bit.
    """
    ranks = Ranks.world()
    term = 1.0 if ranks.rank == 0 else 2.0**-24
    for dtype, wire in ((FP32, FP32), (torch.float64, FP32), (FP32, torch.float64)):
        full = torch.full((SHARD_NUMEL * ranks.size,), term, dtype=dtype)
        rows = full.clone()
        start_all_reduce(full, ranks, wire, "a sum", Factors(1.0, 1.0)).wait()
        assert full.unique().numel() == 1, full.view(ranks.size, -1)[:, 0]
        row_wire = RowWire(wire, Factors(1.0, 1.0), 8)
        start_rows_all_reduce(rows, ranks, row_wire, "a sum in rows").wait()
        assert torch.equal(rows, full)


def dividing_before_saves_a_narrow_sum() -> None:
    """Gradients that fp16 cannot hold arrive whole where a part of the division comes first."""
    ranks = Ranks.world()
    for factors, is_finite in (
        (Factors.of_mean(ranks.size), False),
        (Factors(1 / 8, 8 / ranks.size), True),
        (Factors(1 / 16, 16 / ranks.size), True),
    ):
        full = torch.full((SHARD_NUMEL * ranks.size,), 2.0**17)
        out = torch.empty(SHARD_NUMEL)
        start_reduce_scatter(full, out, ranks, FP16, False, "a large sum", factors).wait()
        assert bool(out.isfinite().all()) == is_finite, factors
        if is_finite:
            torch.testing.assert_close(out, torch.full((SHARD_NUMEL,), 2.0**17))


def dividing_before_loses_what_is_small() -> None:
    """Prescaling comes before the rounding for the wire: half of fp16's smallest number is 0."""
    ranks = Ranks.world()
    for factors, expected in (
        (Factors.of_mean(ranks.size), 2.0**-24),
        (Factors(1 / ranks.size, 1.0), 0.0 if ranks.size == 2 else None),
    ):
        full = torch.full((SHARD_NUMEL * ranks.size,), 2.0**-24)
        out = torch.empty(SHARD_NUMEL)
        start_reduce_scatter(full, out, ranks, FP16, False, "a small sum", factors).wait()
        if expected is not None:
            assert torch.equal(out, torch.full_like(out, expected))


@pytest.mark.slow_cells("by_the_backend-3", "dividing_before_saves_a_narrow_sum-3")
@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize(
    "check",
    [
        in_pairs,
        in_one_order,
        by_the_backend,
        dividing_before_saves_a_narrow_sum,
        dividing_before_loses_what_is_small,
    ],
    ids=lambda check: check.__name__,
)
def test_factors(check: Callable[[], None], world: int, ranks: RankPools) -> None:
    ranks(world).run(check)


def bytes_of_sums() -> None:
    """Per rank: a shard for every other one, and for an all-reduce the way back too."""
    ranks = Ranks.world()
    for wire in (FP32, FP16):
        full, out = torch.zeros(SHARD_NUMEL * ranks.size), torch.zeros(SHARD_NUMEL)
        message = [("isend", SHARD_NUMEL * wire.itemsize)] * (ranks.size - 1)
        with counted() as traffic:
            start_reduce_scatter(full, out, ranks, wire, False, "a sum").wait()
        assert traffic.calls == message
        with counted() as traffic:
            start_all_reduce(full, ranks, wire, "a sum for all").wait()
        assert traffic.calls == message * 2


def gather_otherwise() -> None:
    """In pieces: the same values, in messages of the size asked for."""
    ranks = Ranks.world()
    numel = SHARD_NUMEL * ranks.size
    for dtype, pairs in product((FP32, BF16), (True, False)):
        expected = torch.cat([values_of(rank, SHARD_NUMEL, dtype) for rank in range(ranks.size)])
        for at_a_time in (1, 20 * ranks.size, 22 * ranks.size + 1, numel - 1, numel, 2**62):
            full = torch.full((numel,), torch.nan, dtype=dtype)
            slice_of(full, ranks.rank, ranks).copy_(slice_of(expected, ranks.rank, ranks))
            with nullcontext() if pairs else by_collectives(), counted() as traffic:
                start_gather_in_pieces(full, ranks, "a gather", at_a_time).wait()
            assert torch.equal(full, expected), (dtype, pairs, at_a_time)
            piece = max(1, min(at_a_time, numel) // ranks.size)
            assert max(traffic.calls, default=("", 0))[1] <= piece * dtype.itemsize
    start_all_gather(full, ranks, "still in step").wait()


@pytest.mark.slow_cells("gather_otherwise-3")
@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("check", [bytes_of_sums, gather_otherwise], ids=lambda c: c.__name__)
def test_ways(check: Callable[[], None], world: int, ranks: RankPools) -> None:
    ranks(world).run(check)
