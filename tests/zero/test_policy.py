"""The factors of a reduction: how much is divided, and when."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given, strategies as st

from hadal.comm.collectives import Factors
from hadal.zero.policy import Reduction

RANKS = st.integers(1, 512)
DIVISORS = st.floats(2**-10, 2**10)


def test_the_default_is_the_plain_mean() -> None:
    for world in (1, 2, 3, 7):
        assert Reduction().factors(world) == Factors.of_mean(world) == (1.0, 1 / world)


@given(RANKS, DIVISORS)
def test_a_part_of_the_mean_comes_before(world: int, part: float) -> None:
    before, after = Reduction(predivides_by=part).factors(world)
    assert before == 1 / part
    assert after == part / world


@given(RANKS)
def test_all_of_the_mean_comes_before(world: int) -> None:
    assert Reduction(prescales=True).factors(world) == (1 / world, 1.0)
    assert Reduction(prescales=True, predivides_by=4.0).factors(world) == (1 / world, 1.0)


@given(RANKS, st.sampled_from([1.0, 0.5, 2.0, 8.0]), st.booleans())
def test_a_sum_is_undivided(world: int, part: float, prescales: bool) -> None:
    reduction = Reduction(adds_up=True, predivides_by=part, prescales=prescales)
    before, after = reduction.factors(world)
    assert before * after == 1.0


@given(st.integers(1, 64), st.integers(1, 8), st.booleans(), st.sampled_from([1.0, 2.0, 8.0]))
def test_ranks_that_share_a_sample_count_once(
    groups: int, shared: int, prescales: bool, part: float
) -> None:
    """The mean is over samples: with q ranks to a sequence, ranks/q of them."""
    reduction = Reduction(prescales=prescales, predivides_by=part, sequence_parallel_size=shared)
    before, after = reduction.factors(groups * shared)
    assert before * after == pytest.approx(float(Fraction(1, groups)), rel=1e-15)
    assert before == (1 / groups if prescales else 1 / part)
