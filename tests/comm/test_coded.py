"""Coded gathers and reductions: the bytes on the wire, and the decoded values on every rank."""

from __future__ import annotations

import gc
import weakref
from contextlib import nullcontext
from functools import partial

import pytest
import torch
from ranks import RankPools, on_ranks
from torch import Tensor

from hadal.comm import Ranks
from hadal.comm.codecs import Blockwise
from hadal.comm.coded import (
    Messages,
    start_coded_gather,
    start_coded_reduce_scatter,
)
from hadal.comm.collectives import (
    slice_of,
    start_all_gather,
    start_gather_in_hops,
)

from .traffic import by_collectives, counted

INT8, INT4 = Blockwise(8, 32), Blockwise(4, 32)
NODE = 2


def values_of(rank: int, numel: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(rank)).to(dtype)


def decoded(codec: Blockwise, values: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    wire = torch.empty(codec.wire_bytes(values.numel()), dtype=torch.uint8)
    codec.encode(values, wire)
    out = torch.empty_like(values, dtype=dtype)
    codec.decode(wire, out)
    return out


# ---- gathers ----------------------------------------------------------------------------------


def gather(way: str, collectives: bool) -> None:
    ranks = Ranks.world()
    fill = partial(start_all_gather, ranks=ranks, label="a gather")
    if way == "hops":
        inside, across = ranks.in_blocks(NODE)
        fill = partial(start_gather_in_hops, across=across, inside=inside, label="a gather")
    for numel in (8, 77, 70_000):
        for dtype in (torch.bfloat16, torch.float32):
            full = torch.full((numel * ranks.size,), torch.nan, dtype=dtype)
            mine = values_of(ranks.rank, numel, dtype)
            slice_of(full, ranks.rank, ranks).copy_(mine)
            with counted() as traffic, by_collectives() if collectives else nullcontext():
                start_coded_gather(full, ranks, INT8, fill).wait()
            everybody = [decoded(INT8, values_of(rank, numel, dtype)) for rank in range(ranks.size)]
            assert torch.equal(full, torch.cat(everybody)), (numel, dtype)
            if way == "one" and not collectives:
                assert traffic.nbytes == (ranks.size - 1) * INT8.wire_bytes(numel)


@pytest.mark.parametrize("world, way", [(2, "one"), (3, "one"), (4, "hops")])
@pytest.mark.parametrize("collectives", [False, True], ids=["pairs", "collectives"])
def test_every_rank_decodes_every_slice(
    world: int, way: str, collectives: bool, ranks: RankPools
) -> None:
    ranks(world).run(gather, way, collectives)


# ---- reductions -------------------------------------------------------------------------------


def sum_at(codec: Blockwise, owner: int, places: range, values: dict[int, Tensor]) -> Tensor:
    """The values of `owner`: its own exact ones, and the received ones."""
    total = values[owner].float()
    for step in range(1, len(places)):
        other = places[(places.index(owner) + step) % len(places)]
        total = total + decoded(codec, values[other], torch.float32)
    return total


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("collectives", [False, True], ids=["pairs", "collectives"])
@on_ranks("world")
def test_an_owner_sums_its_own_and_the_received_values(collectives: bool) -> None:
    ranks = Ranks.world()
    for numel in (8, 77, 70_000):
        for dtype in (torch.float32, torch.bfloat16):
            full = values_of(ranks.rank, numel * ranks.size, dtype)
            given = full.clone()
            slices = {
                rank: slice_of(values_of(rank, full.numel(), dtype), ranks.rank, ranks)
                for rank in range(ranks.size)
            }
            total = sum_at(INT4, ranks.rank, range(ranks.size), slices)
            out = torch.full((numel,), torch.nan)
            start = partial(start_coded_reduce_scatter, full, out, [ranks], Messages(INT4), 0.25)
            with counted() as traffic, by_collectives() if collectives else nullcontext():
                start(False, "a sum").wait()
            assert torch.allclose(out, 0.25 * total, rtol=1e-6, atol=1e-7)
            assert torch.equal(full, given)
            if not collectives:
                assert traffic.nbytes == (ranks.size - 1) * INT4.wire_bytes(numel)
            with by_collectives() if collectives else nullcontext():
                start(True, "a sum").wait()
            assert torch.allclose(out, 0.5 * total, rtol=1e-6, atol=1e-7)


@on_ranks(2)
def test_a_sum_keeps_its_input_no_longer_than_it_takes() -> None:
    ranks = Ranks.world()
    full, out = values_of(ranks.rank, 128), torch.zeros(64)
    seen = weakref.ref(full)
    gc.disable()
    try:
        start_coded_reduce_scatter(full, out, [ranks], Messages(INT4), 1.0, False, "a sum").wait()
        del full
        assert seen() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("collectives", [False, True], ids=["pairs", "collectives"])
@on_ranks(4)
def test_nodes_add_up_first_and_send_one_sum(collectives: bool) -> None:
    ranks = Ranks.world()
    inside, across = ranks.in_blocks(NODE)
    for numel in (8, 70_001 // 8 * 8):
        everybody = [values_of(rank, numel * ranks.size) for rank in range(ranks.size)]
        sums = {}
        for node in range(across.size):
            # My counterpart in that node, and the values sent to it for me.
            first = node * NODE
            near = {r: slice_of(everybody[r], ranks.rank, ranks) for r in (first, first + 1)}
            owner = first + inside.rank
            sums[node] = sum_at(INT4, owner, range(first, first + NODE), near)
        total = sum_at(INT4, across.rank, range(across.size), sums)
        out = torch.ones(numel)
        full = everybody[ranks.rank].clone()
        with counted() as traffic, by_collectives() if collectives else nullcontext():
            start_coded_reduce_scatter(
                full, out, [inside, across], Messages(INT4), 0.5, True, "a sum"
            ).wait()
        assert torch.allclose(out, 1 + 0.5 * total, rtol=1e-6, atol=1e-6)
        if not collectives:
            # Two slices to my mate, one to the other node.
            assert traffic.nbytes == 3 * INT4.wire_bytes(numel)


@on_ranks(4)
def test_a_fault_comes_through_both_hops() -> None:
    ranks = Ranks.world()
    inside, across = ranks.in_blocks(NODE)
    for fault in (torch.inf, torch.nan):
        full = values_of(ranks.rank, 4 * 64)
        if ranks.rank == 3:
            full[5] = fault  # of rank 0's slice: through both hops
        out = torch.zeros(64)
        start_coded_reduce_scatter(
            full, out, [inside, across], Messages(INT4, 0.5), 1.0, False, "a sum"
        ).wait()
        assert bool(out.isfinite().all()) == (ranks.rank != 0)


def feed_back() -> tuple[float, float]:
    """The error of the average of many sums of the same values, without and with feedback."""
    ranks = Ranks.world()
    inside, across = ranks.in_blocks(NODE)
    full = values_of(ranks.rank, 4 * 64)
    slices = [
        slice_of(values_of(rank, full.numel()), ranks.rank, ranks) for rank in range(ranks.size)
    ]
    found = []
    for decay in (None, 0.0):
        messages, out = Messages(INT4, decay), torch.zeros(64)
        for _ in range(40):
            start_coded_reduce_scatter(
                full, out, [inside, across], messages, 1 / 40, True, "a sum"
            ).wait()
        found.append(float((out - torch.stack(slices).sum(0)).abs().max()))
        # Two slices for my mate, one for the other node.
        assert len(messages.residuals) == (0 if decay is None else 3)
        before = [residual.clone() for residual in messages.residuals]
        messages.rescale(2.0)
        for one, other in zip(messages.residuals, before, strict=True):
            assert torch.equal(one, 2 * other)
        messages.drop()
        assert not messages.residuals
    return found[0], found[1]


def test_the_error_of_either_hop_is_sent_later(ranks: RankPools) -> None:
    for without, with_feedback in ranks(4).run(feed_back):
        assert with_feedback < without / 5
