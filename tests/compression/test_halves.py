"""2:4 matrices without their zeros."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, strategies as st

from hadal.plugins.compression.export import halve, is_half_zero, whole


@given(
    rows=st.integers(1, 5),
    groups=st.integers(1, 7),
    seed=st.integers(0, 99),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.int8]),
)
def test_the_two_halves_make_the_matrix_again(rows, groups, seed, dtype):
    drawn = torch.Generator().manual_seed(seed)
    full = torch.randint(-9, 9, (rows, 4 * groups), generator=drawn).to(dtype)
    order = torch.rand(rows, groups, 4, generator=drawn).argsort(-1)
    matrix = (full.view(rows, groups, 4) * (order < 2)).view(rows, -1)
    assert is_half_zero(matrix)
    values, places = halve(matrix)
    assert values.shape == (rows, 2 * groups)
    assert values.dtype == dtype
    assert places.shape == (rows, -(-groups // 2))
    assert torch.equal(whole(values, places), matrix)


@pytest.mark.parametrize(
    ("matrix", "expected"),
    [
        (torch.tensor([[1.0, 0.0, 2.0, 3.0]]), False),
        (torch.tensor([[1.0, 0.0, 2.0, 0.0, 0.0, 0.0, 1.0, 1.0]]), True),
        (torch.tensor([[1.0, 0.0, 2.0]]), False),
        (torch.zeros(0, 4), False),
        (torch.zeros(4), False),
    ],
)
def test_half_zero_matrices(matrix, expected):
    assert is_half_zero(matrix) is expected


def test_places_are_bits_of_a_row():
    matrix = torch.tensor([[5.0, 0.0, 0.0, 6.0, 0.0, 7.0, 0.0, 0.0]])
    values, places = halve(matrix)
    assert values.tolist() == [[5.0, 6.0, 0.0, 7.0]]
    assert places.tolist() == [[0b00111001]]
