"""Quantizers: DeepSpeed's values, and bounds for any input."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, strategies as st

from compression.toys import X
from hadal.plugins.compression.quantizers import (
    largest,
    quantize,
    quantize_in_range,
    straight_through,
)

# The first row of DeepSpeed's results, by bits, groups and whether symmetric.
GOLDEN = {
    (8, 1, True): [0.90234375, -0.99609375, 0.2578125, -0.328125],
    (8, 3, True): [0.8984375, -1.0, 0.2578125, -0.328125],
    (4, 3, True): [0.875, -1.0, 0.25, -0.375],
    (3, 1, True): [0.75, -1.125, 0.375, -0.375],
    (8, 1, False): [0.8984375, -0.99609375, 0.26367188, -0.33203125],
    (4, 3, False): [0.83125001, -0.94999999, 0.23750001, -0.35624999],
    (3, 1, False): [0.9375, -0.9375, 0.3125, -0.3125],
    (2, 1, True): [0.8633334, -0.8633334, 0.0, 0.0],
    (2, 3, True): [0.95, -0.95, 0.0, 0.0],
    (1, 1, True): [0.5275, -0.5275, 0.5275, -0.5275],
    (1, 3, True): [0.6225, -0.6225, 0.6225, -0.6225],
}


@pytest.mark.parametrize("case", GOLDEN)
def test_values_are_those_of_deepspeed(case):
    bits, groups, symmetric = case
    found = quantize(X, bits, groups, symmetric=symmetric)
    assert found[0].tolist() == pytest.approx(GOLDEN[case], abs=1e-6)


@pytest.mark.parametrize(
    ("symmetric", "first"),
    [(True, [0.8984375, -1.0, 0.2578125, -0.328125]), (False, [0.90234375, -0.49804688])],
)
def test_values_in_a_given_range_are_those_of_deepspeed(symmetric, first):
    low, high = torch.tensor(-0.5), torch.tensor(1.0)
    found = quantize_in_range(X, 8, low, high, symmetric=symmetric)
    assert found[0, : len(first)].tolist() == pytest.approx(first, abs=1e-6)


def test_stochastic_rounding_is_that_of_deepspeed():
    torch.manual_seed(0)
    found = quantize(X, 8, stochastic=True)
    assert found[0].tolist() == pytest.approx([0.90234375, -0.99609375, 0.2578125, -0.33984375])


def test_groups_without_a_range_are_unchanged():
    zeros, ones = torch.zeros(2, 2), torch.full((2, 2), 0.7)
    for bits in (1, 2, 4, 8):
        assert torch.equal(quantize(zeros, bits), zeros)
    assert torch.equal(quantize(ones, 8, symmetric=False), ones)
    assert torch.equal(quantize(zeros, 4, symmetric=False), zeros)


def test_the_gradient_passes_unchanged():
    x = X.clone().requires_grad_()
    (straight_through(x, quantize(X, 4)) * torch.arange(12.0).view(3, 4)).sum().backward()
    assert torch.equal(x.grad, torch.arange(12.0).view(3, 4))


@given(
    st.integers(3, 12),
    st.sampled_from([1, 2, 4]),
    st.booleans(),
    st.sampled_from([torch.float32, torch.float16, torch.bfloat16]),
    st.integers(0, 9999),
)
def test_few_values_each_near_the_original(bits, groups, symmetric, dtype, seed):
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(seed)).to(dtype)
    found = quantize(x, bits, groups, symmetric=symmetric)
    assert found.dtype == dtype
    assert found.shape == x.shape
    for before, after in zip(x.view(groups, -1), found.view(groups, -1), strict=True):
        assert after.unique().numel() <= 2**bits
        size = before.float().abs().max()
        # The largest value is a step off (with a rounded offset one and a half), and
        # what a dtype rounds comes on top.
        step = 2 * size / 2**bits
        bound = (1.01 if symmetric else 1.51) * step + 4 * torch.finfo(dtype).eps * size
        assert (before.float() - after.float()).abs().max() <= bound


def test_the_largest_are_kept_and_of_equal_ones_the_first():
    assert largest(X, 0.3).tolist() == [[1, 0, 0, 0], [0, 1, 0, 1], [1, 0, 0, 0]]
    assert largest(torch.ones(6), 0.5).tolist() == [1, 1, 1, 0, 0, 0]
    assert largest(X, 0.0).sum() == 0
    assert largest(X, 1.0).sum() == 12
    assert largest(X, 0.01).sum() == 1
