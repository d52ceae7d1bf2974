"""The pairwise cover covers every pair, is small, and is the same each time."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, strategies as st

from .cells import LEVELS
from .cover import every_cell, every_pair, pairs_of, pairwise_cover

SIZES = st.lists(st.integers(1, 6), min_size=1, max_size=6)


def levels_of(sizes: list[int]) -> dict[str, list[str]]:
    return {f"f{i}": [f"l{j}" for j in range(size)] for i, size in enumerate(sizes)}


@given(SIZES)
def test_every_pair_is_covered(sizes: list[int]) -> None:
    levels = levels_of(sizes)
    met = {pair for cell in pairwise_cover(levels) for pair in pairs_of(cell)}
    assert met == set(every_pair(levels))


@given(SIZES)
def test_no_cover_is_larger_than_the_product(sizes: list[int]) -> None:
    levels = levels_of(sizes)
    cells = [tuple(cell.items()) for cell in pairwise_cover(levels)]
    assert len(set(cells)) == len(cells) <= math.prod(sizes)
    assert {tuple(cell.items()) for cell in every_cell(levels)} >= set(cells)


@pytest.mark.parametrize("factor", sorted(LEVELS))
def test_each_level_of_the_matrix_meets_every_other(factor: str) -> None:
    met = {pair for cell in pairwise_cover(LEVELS) for pair in pairs_of(cell)}
    missing = {pair for pair in every_pair(LEVELS) if factor in dict(pair)} - met
    assert not missing


def test_the_cover_is_the_same_each_time() -> None:
    assert pairwise_cover(LEVELS) == pairwise_cover(LEVELS)


def test_the_cover_of_the_matrix_stays_small() -> None:
    largest = sorted((len(levels) for levels in LEVELS.values()), reverse=True)
    assert len(pairwise_cover(LEVELS)) <= 1.5 * largest[0] * largest[1]
