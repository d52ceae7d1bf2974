"""The batch that many numbers of ranks can train: worked examples, and invariants."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from hadal.config import load_config
from hadal.config.elasticity import (
    Nodes,
    Wish,
    candidates,
    chosen,
    chosen_on_nodes,
    micro_for,
    ranks_for,
)

from .faults import faults_of

FIRST = Wish(10000, (8, 12, 16, 17), 32, 1500)
SECOND = Wish(2000, (2, 4, 6), 1, 10000)
ON_NODES = Wish(2000, (2, 4, 6), 8, 128)


def test_many_numbers_of_ranks() -> None:
    counts = {train: len(ranks_for(train, FIRST)) for train in candidates(FIRST)}
    assert counts == {5760: 18, 6120: 18, 6720: 18, 8640: 21, 9792: 23}
    train, ranks = chosen(FIRST)
    assert train == 9792
    assert ranks == (
        *(32, 34, 36, 48, 51, 64, 68, 72, 96, 102, 136, 144, 153, 192, 204, 272, 288, 306),
        *(408, 576, 612, 816, 1224),
    )
    assert micro_for(train, 64, FIRST.micros) == 17
    assert 128 not in ranks


def test_the_defaults() -> None:
    counts = {train: len(ranks_for(train, SECOND)) for train in candidates(SECOND)}
    assert counts == {1440: 30, 1680: 32}
    train, ranks = chosen(SECOND)
    assert (train, len(ranks), ranks[0], ranks[-1]) == (1680, 32, 1, 840)
    for count, accumulation in ((7, 40), (8, 35)):
        micro = micro_for(train, count, SECOND.micros)
        assert micro == 6
        assert train == micro * count * accumulation


def test_ties_go_to_the_larger_or_the_smaller() -> None:
    wish = Wish(20, (7, 9))
    assert candidates(wish) == {14, 18}
    assert chosen(wish) == (18, (1, 2))
    assert chosen(wish._replace(larger=False)) == (14, (1, 2))
    assert chosen(Wish(50, (7, 11))) == (42, (1, 2, 3, 6))


@pytest.mark.parametrize(
    ("wish", "nodes", "ranks", "train", "valid", "micro"),
    [
        (ON_NODES, Nodes(8), 16, 1920, (8, 16, 24, 32, 40, 48, 64, 80, 96, 120), 6),
        (ON_NODES, Nodes(8, 4), 64, 1920, (2, 4, 6, 8, 10, 12, 16, 20, 24, 30, 32), 6),
        (ON_NODES, Nodes(8), 56, 1904, (56,), 2),
        (ON_NODES._replace(larger=False), Nodes(8), 56, 1680, (56,), 2),
        (ON_NODES, Nodes(8), 12, 1992, (12,), 2),
    ],
)
def test_whole_nodes(
    wish: Wish, nodes: Nodes, ranks: int, train: int, valid: tuple[int, ...], micro: int
) -> None:
    assert chosen_on_nodes(wish, nodes, ranks) == (train, valid)
    assert micro_for(train, ranks, wish.micros, larger=wish.larger) == micro


def test_a_bound_below_one_node_is_none() -> None:
    _, valid = chosen_on_nodes(Wish(2000, (2, 4, 6), 1, 4), Nodes(8), 8)
    assert valid[-1] == 960


def test_where_nothing_fits() -> None:
    assert chosen(Wish(20, (4,), least=30, most=40, larger=False)) == (4, ())
    assert chosen(Wish(20, (4,), least=30, most=40)) == (16, ())
    assert micro_for(12, 4, (2, 4)) is None
    assert micro_for(12, 4, (3, 1), larger=False) == 3


@given(
    st.integers(1, 3000).flatmap(
        lambda cap: st.builds(
            Wish,
            st.just(cap),
            st.lists(st.integers(1, cap), min_size=1, max_size=4).map(tuple),
            st.integers(0, 20),
            st.integers(0, 200),
            st.booleans(),
        )
    )
)
def test_every_listed_number_divides_the_batch(wish: Wish) -> None:
    train, ranks = chosen(wish)
    most = wish.most or wish.cap // min(wish.micros)
    assert train <= wish.cap
    assert ranks == tuple(sorted(set(ranks)))
    for count in ranks:
        assert max(1, wish.least) <= count <= most
        micro = micro_for(train, count, wish.micros)
        assert micro is not None
        assert train % (count * micro) == 0
    by_hand = [
        n
        for n in range(max(1, wish.least), most + 1)
        if any(train % (n * m) == 0 for m in wish.micros)
    ]
    assert list(ranks) == by_hand
    assert len(ranks) == max(len(ranks_for(other, wish)) for other in candidates(wish))


# ---- the section -----------------------------------------------------------------------------


def section(**more: object) -> dict[str, dict[str, object]]:
    keys = {"enabled": True, "max_train_batch_size": 2000, "micro_batch_sizes": [2, 4, 6]}
    return {"elasticity": {**keys, **more}}


def sizes(source: dict[str, object], world_size: int) -> tuple[int | None, ...]:
    config = load_config(source, world_size=world_size)
    return (
        config.train_batch_size,
        config.train_micro_batch_size_per_gpu,
        config.gradient_accumulation_steps,
    )


@pytest.mark.claims(
    "elasticity",
    "elasticity.enabled",
    "elasticity.max_train_batch_size",
    "elasticity.micro_batch_sizes",
    "elasticity.version",
)
def test_the_section_sets_all_three_sizes() -> None:
    for count, accumulation in ((7, 40), (8, 35)):
        assert sizes(section(version=0.1), count) == (1680, 6, accumulation)
    config = load_config(section(version=0.1), world_size=7)
    assert config.origins["train_batch_size"] == "inferred"
    assert sizes(section(version=0.1, max_train_batch_size=20, micro_batch_sizes=[7, 9]), 2) == (
        *(18, 9),
        1,
    )


@pytest.mark.claims("elasticity.prefer_larger_batch", "elasticity.prefer_large_batch")
@pytest.mark.parametrize("name", ["prefer_larger_batch", "prefer_large_batch"])
def test_among_equals_the_smaller_may_be_taken(name: str) -> None:
    keys = {"version": 0.1, "max_train_batch_size": 20, "micro_batch_sizes": [7, 9], name: False}
    assert sizes(section(**keys), 2) == (14, 7, 1)


@pytest.mark.claims("elasticity.min_gpus", "elasticity.max_gpus")
def test_a_number_of_ranks_that_cannot_train_it_is_refused_with_those_that_can() -> None:
    bounds = {"version": 0.1, "min_gpus": 4, "max_gpus": 12}
    assert sizes(section(**bounds), 12)[0] == 1680
    for count in (3, 11, 14):
        faults = faults_of(section(**bounds), world_size=count)
        message = faults["elasticity"]
        assert f"{count} ranks cannot train" in message
        assert "4, 5, 6, 7, 8, 10, 12" in message


@pytest.mark.claims("elasticity.num_gpus_per_node", "elasticity.model_parallel_size")
def test_ranks_come_by_nodes_and_may_share_a_model() -> None:
    bounds = {"min_gpus": 8, "max_gpus": 128, "num_gpus_per_node": 8}
    assert sizes(section(**bounds), 16) == (1920, 6, 20)
    shared = section(**bounds, model_parallel_size=4)
    config = load_config(shared, world_size=64, data_parallel_size=16)
    assert (config.train_batch_size, config.train_micro_batch_size_per_gpu) == (1920, 6)
    assert config.gradient_accumulation_steps == 20
    told = faults_of(shared, world_size=64)["elasticity.model_parallel_size"]
    assert "4, but" in told and "1 of the 64 ranks" in told


def test_a_number_outside_the_list_has_its_own_batch_and_is_logged() -> None:
    config = load_config(section(min_gpus=8, max_gpus=128, num_gpus_per_node=8), world_size=56)
    assert config.train_batch_size == 1904
    assert any("1904" in note and "56" in note for note in config.notes)


@pytest.mark.claims("elasticity.ignore_non_elastic_batch_info")
def test_sizes_given_elsewhere_are_overruled_where_that_is_wished() -> None:
    keys = {"version": 0.1, "max_train_batch_size": 100, "micro_batch_sizes": [2, 4]}
    given = {"train_batch_size": 7, **section(**keys)}
    assert "ignore_non_elastic_batch_info" in faults_of(given, world_size=4)["train_batch_size"]
    wished = {"train_batch_size": 7, **section(**keys, ignore_non_elastic_batch_info=True)}
    assert sizes(wished, 4) == (96, 4, 6)
