"""Masks, blocks and thresholds: arithmetic."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings, strategies as st

from hadal.plugins.compression.masks import (
    Blocks,
    as_matrix,
    as_weight,
    masked_heads,
    sparsity_at,
    thresholds,
)


def alone(counts):
    return counts


@pytest.mark.parametrize(
    ("text", "blocks"),
    [
        ("4x1", Blocks(4, 1, False)),
        ("1x1", Blocks(1, 1, False)),
        ("2:4", Blocks(2, 4, True)),
        *((text, None) for text in ("4:2", "2:2", "0x1", "4x", "4*1", "", "4x1 ")),
    ],
)
def test_patterns(text, blocks):
    assert Blocks.parse(text) == blocks


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.lists(st.sampled_from([0.0, 0.5, 1.0, 1e-30, 3.5]), min_size=1), min_size=1),
    st.integers(1, 300),
)
def test_the_threshold_is_the_smallest_value_of_all_layers(layers, count):
    units = [torch.tensor(layer) for layer in layers]
    both = torch.cat(units)
    count = min(count, both.numel())
    found = thresholds(units, [len(layer) for layer in layers], count, alone, most=1.0)
    assert found == [both.kthvalue(count).values.item()] * len(layers)


def test_no_layer_loses_more_than_98_percent():
    units = [torch.arange(100) / 1e4, torch.arange(100) + 1.0]
    low, high = thresholds(units, [100, 100], 120, alone)
    assert ((units[0] <= low).sum(), (units[1] <= high).sum()) == (98, 22)
    assert thresholds(units, [100, 100], 0, alone) == [-1.0, -1.0]


def test_blocks_of_rows_and_of_inputs():
    values = torch.tensor([[1.0, 4, 2, 3], [3, 0, 4, 1]])
    rows = Blocks(2, 1, False)
    assert rows.reduce(values).tolist() == [[2.0, 2, 3, 2]]
    assert rows.expand(rows.mask(rows.reduce(values), 2.0)).tolist() == [[0.0, 0, 1, 0]] * 2
    two = Blocks(2, 4, True)
    assert two.units(values).tolist() == [0.75, 0.25]
    assert two.mask(values, 0.25).tolist() == [[1.0, 1, 1, 1], [1, 0, 1, 0]]
    assert not rows.fits((3, 4))
    assert not two.fits((2, 6))


def test_a_convolution_is_a_matrix_with_its_channels_innermost():
    weight = torch.arange(24.0).reshape(2, 3, 2, 2)
    matrix = as_matrix(weight)
    assert matrix[0, :3].tolist() == [0.0, 4.0, 8.0]
    assert torch.equal(as_weight(matrix, weight.shape), weight)


def test_the_fraction_grows_to_the_target():
    assert [sparsity_at(i, 2, 0.75) for i in range(3)] == [0.0, 0.5, 0.75]
    assert sparsity_at(0, 0, 0.75) == 0.75


def test_heads_are_blocks_of_columns():
    found = masked_heads(torch.ones(2, 4), torch.tensor([[0.0, 1.0]]))
    assert found.tolist() == [[0.0, 0, 1, 1]] * 2
