"""Sums that travel in rows: the dense way's bits, for fewer bytes."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import pytest
import torch
from hypothesis import given as drawn, strategies as st
from ranks import RankPools

from comm.traffic import by_collectives, counted
from hadal.comm import Ranks
from hadal.comm.collectives import (
    Factors,
    slice_of,
    start_all_reduce,
    start_reduce_scatter,
    sum_into,
)
from hadal.comm.rows import (
    RowWire,
    _add_up,
    _packed,
    start_rows_all_reduce,
    start_rows_reduce_scatter,
)

FP32, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16
ROWS_OF_A_SHARD, ROW_NUMEL = 30, 8
# How many rows a rank brings: none, a few, most (denser than worth it), and each rank another way.
BROUGHT: list[Callable[[int], int]] = [
    lambda rank: 0,
    lambda rank: 3,
    lambda rank: 70,
    lambda rank: (0, 5, 80)[rank],
]


def values_of(rank: int, count: int, world: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank)
    rows = torch.zeros(ROWS_OF_A_SHARD * world, ROW_NUMEL)
    chosen = torch.randint(len(rows), (count,), generator=generator)
    rows[chosen] = torch.randn(count, ROW_NUMEL, generator=generator)
    rows[chosen[:1]] = 1.0  # some rows are several ranks'
    return rows.flatten().to(dtype)


def cases(world: int):
    all_factors = (Factors.of_mean(world), Factors(1 / 4, 4 / world), Factors(1.0, 1.0))
    return product(range(len(BROUGHT)), (FP32, BF16), (FP32, FP16), all_factors)


def given(ranks: Ranks, number: int, dtype: torch.dtype) -> torch.Tensor:
    return values_of(ranks.rank, BROUGHT[number](ranks.rank), ranks.size, dtype)


numbers = st.floats(width=16) | st.sampled_from([0.0, -0.0, 1.0, 2.0**-24, 65504.0])


@st.composite
def sums(draw: st.DrawFn) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Each rank's slice of a few rows, some of them zero, and what the sum may be added to."""
    world, rows = draw(st.integers(2, 4)), draw(st.integers(1, 5))
    a_row = st.lists(numbers, min_size=3, max_size=3) | st.just([0.0] * 3)
    slices = [
        torch.tensor(draw(st.lists(a_row, min_size=rows, max_size=rows)), dtype=torch.float64)
        for _ in range(world)
    ]
    scales = draw(st.lists(st.sampled_from([1.0, 3e-5, 1 / 3]), min_size=world, max_size=world))
    held = torch.tensor(draw(st.lists(numbers, min_size=3 * rows, max_size=3 * rows)))
    return [one * scale for one, scale in zip(slices, scales, strict=True)], held


@pytest.mark.slow
@drawn(sums(), st.sampled_from([FP32, FP16, BF16]), st.sampled_from([FP32, BF16]), st.booleans())
def test_rows_add_up_as_slices_do(
    drawn_sums: tuple[list[torch.Tensor], torch.Tensor],
    wire: torch.dtype,
    dtype: torch.dtype,
    accumulate: bool,
) -> None:
    """Any values, of 2 to 4 ranks: the same bits, if any rank has anything in a row."""
    slices, held = drawn_sums
    slices = [one.flatten().to(wire) for one in slices]
    for after in (1 / len(slices), 1.0, 0.5, 3.0):
        dense, rows = held.to(dtype), held.to(dtype)
        sum_into(dense, slices, after, accumulate)
        form = RowWire(wire, Factors(1.0, after), 3)
        _add_up(rows, [_packed(one, form) for one in slices], form, accumulate)
        assert torch.equal(dense.nan_to_num(7.0), rows.nan_to_num(7.0))


def as_the_dense_way() -> None:
    ranks = Ranks.world()
    for number, dtype, wire, factors in cases(ranks.size):
        case, rows = (number, dtype, wire, factors), RowWire(wire, factors, ROW_NUMEL)
        for accumulate in (False, True):
            outs = []
            for is_dense in (True, False):
                full, out = given(ranks, number, dtype), torch.full((240,), 0.5)
                if is_dense:
                    start_reduce_scatter(
                        full, out, ranks, wire, accumulate, "dense", factors
                    ).wait()
                else:
                    start_rows_reduce_scatter(full, out, ranks, rows, accumulate, "rows").wait()
                outs.append(out)
            assert torch.equal(*outs), case
        one, other = (given(ranks, number, dtype) for _ in range(2))
        start_reduce_scatter(
            one, slice_of(one, ranks.rank, ranks), ranks, wire, False, "dense in place", factors
        ).wait()
        start_rows_reduce_scatter(
            other, slice_of(other, ranks.rank, ranks), ranks, rows, False, "rows in place"
        ).wait()
        assert torch.equal(slice_of(one, ranks.rank, ranks), slice_of(other, ranks.rank, ranks))
        one, other = (given(ranks, number, dtype) for _ in range(2))
        start_all_reduce(one, ranks, wire, "dense for all", factors).wait()
        start_rows_all_reduce(other, ranks, rows, "rows for all").wait()
        assert torch.equal(one, other), case


def by_the_backend() -> None:
    """Added up in the ranks' order: the dense way's values to rounding, the same bits on each."""
    ranks = Ranks.world()
    for number, dtype, factors in product(
        range(len(BROUGHT)), (FP32, BF16), (Factors(1 / 4, 4 / ranks.size), Factors(1.0, 1.0))
    ):
        rows = RowWire(dtype, factors, ROW_NUMEL)
        room = {FP32: 1e-6, BF16: 3e-2}[dtype]
        one, other, full = (given(ranks, number, dtype) for _ in range(3))
        start_all_reduce(one, ranks, dtype, "dense for all", factors).wait()
        out = torch.full((240,), 0.5)
        with by_collectives():
            start_rows_all_reduce(other, ranks, rows, "rows for all").wait()
            start_rows_reduce_scatter(full, out, ranks, rows, True, "rows").wait()
        torch.testing.assert_close(other, one, rtol=room, atol=room)
        mine = slice_of(one, ranks.rank, ranks).float() + 0.5
        torch.testing.assert_close(out, mine, rtol=room, atol=room)


def several_at_a_time() -> None:
    ranks = Ranks.world()
    wires = RowWire(FP32, Factors.of_mean(ranks.size), ROW_NUMEL)
    dense, rows = ([given(ranks, number, FP32) for number in range(4)] for _ in range(2))
    for full in dense:
        start_all_reduce(full, ranks, FP32, "dense").wait()
    flights = [start_rows_all_reduce(full, ranks, wires, "one of four") for full in rows]
    while not all(flight.done for flight in flights):
        for flight in flights:
            flight.advance()
    for one, other in zip(dense, rows, strict=True):
        assert torch.equal(one, other)


def not_a_number_travels() -> None:
    ranks = Ranks.world()
    full = torch.zeros(240 * ranks.size)
    if ranks.rank == 1:
        full[-1] = torch.nan
    wire = RowWire(FP32, Factors.of_mean(ranks.size), ROW_NUMEL)
    start_rows_all_reduce(full, ranks, wire, "a NaN").wait()
    assert bool(full[-1].isnan())
    assert full.isnan().sum() == 1


def traffic_of(kind: str, number: int, wire: RowWire | torch.dtype) -> int:
    ranks = Ranks.world()
    full, out = given(ranks, number, FP32), torch.empty(240)
    with counted() as traffic:
        if isinstance(wire, RowWire):
            if kind == "whole":
                start_rows_all_reduce(full, ranks, wire, "rows").wait()
            else:
                start_rows_reduce_scatter(full, out, ranks, wire, False, "rows").wait()
        elif kind == "whole":
            start_all_reduce(full, ranks, wire, "dense").wait()
        else:
            start_reduce_scatter(full, out, ranks, wire, False, "dense").wait()
    return traffic.nbytes


def fewer_bytes() -> None:
    """At most the dense way's; of three rows of ninety, no more than those and their numbers."""
    ranks = Ranks.world()
    for kind, number, wire in product(("whole", "cut"), range(len(BROUGHT)), (FP32, FP16)):
        rows = RowWire(wire, Factors.of_mean(ranks.size), ROW_NUMEL)
        usual, sparse = traffic_of(kind, number, wire), traffic_of(kind, number, rows)
        assert sparse <= usual
        if number == 1:
            row_nbytes = ROW_NUMEL * wire.itemsize + torch.int32.itemsize
            union = 3 * ranks.size * (ranks.size - 1) * (kind == "whole")
            assert sparse <= (3 + union) * row_nbytes < usual


@pytest.mark.slow_cells("as_the_dense_way-2", "as_the_dense_way-3", "by_the_backend-3")
@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize(
    "check",
    [as_the_dense_way, by_the_backend, several_at_a_time, not_a_number_travels, fewer_bytes],
    ids=lambda check: check.__name__,
)
def test_rows(check: Callable[[], None], world: int, ranks: RankPools) -> None:
    ranks(world).run(check)
