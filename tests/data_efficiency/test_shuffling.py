"""Shuffling: numpy's order and state, for any type, count and size of block."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, strategies as st

from hadal.plugins.data_efficiency import clusters


@given(
    count=st.integers(0, 700),
    few=st.integers(1, 700),
    block=st.integers(1, 200),
    seed=st.integers(0, 2**32),
    before=st.integers(0, 3),
    kind=st.sampled_from([np.uint16, np.uint32, np.int64]),
)
def test_the_order_and_the_state_are_numpys(
    count: int, few: int, block: int, seed: int, before: int, kind: type
) -> None:
    one, other = np.random.default_rng(seed), np.random.default_rng(seed)
    for generator in (one, other):
        generator.integers(0, 9, before, dtype=np.uint32)  # leaves half of a draw, if odd
    numbers, expected = np.arange(count, dtype=kind), np.arange(count, dtype=kind)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(clusters, "_FEW", few)
        patch.setattr(clusters, "_BLOCK", block)
        clusters.shuffle(numbers, one)
    other.shuffle(expected)
    assert numbers.tolist() == expected.tolist() and numbers.dtype == kind
    assert one.bit_generator.state == other.bit_generator.state


def test_numbers_beyond_the_limit_are_numpys_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clusters, "_LIMIT", 10)
    numbers, expected = np.arange(11), np.arange(11)
    clusters.shuffle(numbers, np.random.default_rng(3))
    np.random.default_rng(3).shuffle(expected)
    assert numbers.tolist() == expected.tolist()
