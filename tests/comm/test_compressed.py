"""The mean in two compressed hops, against all ranks computed in one place."""

from __future__ import annotations

import pytest
import torch
from ranks import RankPools, on_ranks
from torch import Tensor

from comm.in_one_place import TwoHops
from comm.traffic import by_collectives, counted
from hadal.comm import Ranks
from hadal.comm.codecs import Sign
from hadal.comm.coded import CompressedMean

TURNS = 4
CODEC = Sign(16)


def values_of(rank: int, turn: int, numel: int) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(50 * turn + rank))


def exchange(mean: CompressedMean, values: Tensor) -> Tensor:
    out = torch.full_like(values, 7.0)
    mean.owed.mine.add_(values)
    mean.start(lambda at, part: out[at : at + part.numel()].copy_(part), "a test's mean").wait()
    return out


def as_in_one_place() -> None:
    ranks = Ranks.world()
    for shard in (8, 24, 1000):
        numel = shard * ranks.size
        mean, alone = (
            CompressedMean(numel, ranks, CODEC, torch.device("cpu")),
            TwoHops(ranks.size, numel, CODEC.block_numel),
        )
        for turn in range(TURNS):
            found = exchange(mean, values_of(ranks.rank, turn, numel))
            known = alone.mean([values_of(rank, turn, numel) for rank in range(ranks.size)])
            if ranks.size > 1:
                assert torch.allclose(found, known, rtol=1e-5, atol=1e-6), (shard, turn)
                owed = alone.mine[ranks.rank]
                assert torch.allclose(mean.owed.mine, owed, rtol=1e-4, atol=1e-5), (shard, turn)
                owed = alone.of_mean[ranks.rank]
                assert torch.allclose(mean.owed.of_mean, owed, rtol=1e-4, atol=1e-5), (shard, turn)
            else:
                assert torch.equal(found, values_of(0, turn, numel))
        mean.forget()
        assert not any(bool(owed.any()) for owed in mean.owed)


@pytest.mark.fast_cells("1", "2")
@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_both_hops_and_their_residuals(ranks: RankPools, world: int):
    ranks(world).run(as_in_one_place)


@on_ranks(3)
def test_as_on_an_accelerator() -> None:
    with by_collectives():
        as_in_one_place()


def two_at_a_time() -> list[Tensor]:
    ranks, numel = Ranks.world(), 64 * Ranks.world().size
    out = []
    means = [CompressedMean(numel, ranks, CODEC, torch.device("cpu")) for _ in range(2)]
    pendings = []
    for number, mean in enumerate(means):
        mean.owed.mine.add_(values_of(ranks.rank, number, numel))
        out.append(torch.empty(numel))
        to = out[-1]
        pendings.append(
            mean.start(lambda at, part, to=to: to[at : at + part.numel()].copy_(part), f"{number}")
        )
    for pending in pendings:
        pending.wait()
    return out


def test_several_may_be_under_way_and_all_ranks_have_the_same_bits(ranks: RankPools):
    first, *others = ranks(3).run(two_at_a_time)
    for number, one in enumerate(first):
        known = TwoHops(3, one.numel(), CODEC.block_numel).mean(
            [values_of(rank, number, one.numel()) for rank in range(3)]
        )
        assert torch.allclose(one, known, rtol=1e-5, atol=1e-6)
        assert all(torch.equal(one, other[number]) for other in others)


def bytes_sent(numel: int) -> int:
    ranks = Ranks.world()
    mean = CompressedMean(numel, ranks, Sign(), torch.device("cpu"))
    with counted() as traffic:
        exchange(mean, values_of(ranks.rank, 0, numel))
    return traffic.nbytes


@pytest.mark.parametrize("world", [2, 4])
def test_a_fourteenth_of_an_all_reduce_in_bf16(ranks: RankPools, world: int):
    numel = 1 << 16
    in_bf16 = 2 * (world - 1) * numel // world * torch.bfloat16.itemsize
    for sent in ranks(world).run(bytes_sent, numel):
        assert 0 < sent <= in_bf16 / 14


def an_overflow() -> Tensor:
    ranks, numel = Ranks.world(), 64 * Ranks.world().size
    values = values_of(ranks.rank, 0, numel)
    if ranks.rank == 1:
        values[70] = float("inf")
    mean = CompressedMean(numel, ranks, CODEC, torch.device("cpu"))
    return exchange(mean, values)


def test_an_overflow_reaches_all_ranks(ranks: RankPools):
    for found in ranks(2).run(an_overflow):
        assert not bool(found[64:80].isfinite().any())
        assert bool(found[:64].isfinite().all()) and bool(found[80:].isfinite().all())
