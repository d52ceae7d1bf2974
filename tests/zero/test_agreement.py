"""Ranks that go different ways still gather in one order, and never wait for ever."""

from __future__ import annotations

import random

import pytest
from ranks import RankPools

from hadal.comm import Ranks
from hadal.comm.collectives import gather_objects
from hadal.errors import MismatchError
from hadal.zero.agreement import Agreement, Marker


class FakeBucket:
    """Records its gathers, and those in which this rank only serves its shard."""

    rounds = False

    def __init__(self, number: int, moves: list[tuple[str, int]]) -> None:
        self.name = str(number)
        self._number, self._moves = number, moves

    def unshard(self, *, exact: bool) -> None:
        self._moves.append(("gather", self._number))

    def serve(self, *, exact: bool) -> None:
        self._moves.append(("serve", self._number))

    def gatherers_of(self, *, exact: bool) -> range:
        return range(Ranks.world().size)


class NoReductions:
    """Has nothing to reduce."""

    def progress(self) -> int:
        return 0

    def start_together(self, count: int) -> None:
        assert not count


class Log:
    """Records what a rank gathered and lent, in order."""

    def __init__(self) -> None:
        self.moves: list[tuple[str, int]] = []
        self.agreement = Agreement(Ranks.world(), NoReductions())
        self.agreement.buckets = [FakeBucket(number, self.moves) for number in range(6)]

    @property
    def order(self) -> list[int]:
        return [bucket for _, bucket in self.moves]

    @property
    def gathered(self) -> list[int]:
        return [bucket for move, bucket in self.moves if move == "gather"]


def walk(paths: list[list[int]]) -> list[tuple[str, int]]:
    ranks, log = Ranks.world(), Log()
    for bucket in paths[ranks.rank]:
        log.agreement.request(bucket)
        assert log.moves[-1] == ("gather", bucket) or ("gather", bucket) in log.moves
    log.agreement.finish(Marker.END_OF_FORWARD)
    assert log.gathered == paths[ranks.rank]
    orders = gather_objects(log.order, ranks)
    assert all(order == orders[0] for order in orders), orders
    return log.moves


def walk_at_random(seeds: int) -> None:
    size = Ranks.world().size
    for seed in range(seeds):
        chance = random.Random(seed)
        common = [chance.randrange(6) for _ in range(chance.randrange(6))]
        own = [[chance.randrange(6) for _ in range(chance.randrange(5))] for _ in range(size)]
        walk([common + path for path in own])


def test_one_path_serves_nothing(ranks: RankPools) -> None:
    moves = ranks(3).run(walk, [[0, 1, 2]] * 3)
    assert moves == [[("gather", 0), ("gather", 1), ("gather", 2)]] * 3


def test_a_rank_that_went_another_way_serves(ranks: RankPools) -> None:
    moves = ranks(2).run(walk, [[0, 1, 3], [0, 2, 3]])
    assert moves == [
        [("gather", 0), ("gather", 1), ("serve", 2), ("gather", 3)],
        [("gather", 0), ("serve", 1), ("gather", 2), ("gather", 3)],
    ]


def test_a_rank_that_is_through_goes_on_serving(ranks: RankPools) -> None:
    assert ranks(3).run(walk, [[], [4, 4], [5]])[0] == [("serve", 4), ("serve", 5), ("serve", 4)]


@pytest.mark.slow_cells("3")
@pytest.mark.parametrize("world", [1, 2, 3])
def test_any_paths_end(world: int, ranks: RankPools) -> None:
    ranks(world).run(walk_at_random, 25)


def end_differently(paths: list[list[int]], markers: list[Marker]) -> str:
    ranks, log = Ranks.world(), Log()
    for bucket in paths[ranks.rank]:
        log.agreement.request(bucket)
    with pytest.raises(MismatchError) as raised:
        log.agreement.finish(markers[ranks.rank])
    return str(raised.value)


@pytest.mark.parametrize("paths", [[[], []], [[1], []], [[0], [2, 3]]])
def test_programs_that_differ_are_told_on_every_rank(paths, ranks: RankPools) -> None:
    messages = ranks(2).run(end_differently, paths, [Marker.END_OF_FORWARD, Marker.END_OF_BACKWARD])
    for message in messages:
        assert "rank 0: the end of a forward, rank 1: the end of a backward" in message
    messages = ranks(2).run(end_differently, paths, [Marker.END_OF_ACCESS, Marker.END_OF_FORWARD])
    assert "rank 0: the end of GatheredParameters or of a step" in messages[1]
