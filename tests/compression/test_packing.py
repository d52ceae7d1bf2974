"""Quantized weights as integers, and integers in bytes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, strategies as st

from hadal.plugins.compression.packed import CodeLayout, decode, encode, grid_of, pack, unpack
from hadal.plugins.compression.quantizers import quantize


@given(st.integers(1, 16), st.integers(1, 5), st.integers(1, 40), st.integers(0, 9))
def test_codes_come_back_from_bytes(bits, rows, columns, seed):
    drawn = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 2**bits, (rows, columns), generator=drawn, dtype=torch.int32)
    packed = pack(codes, bits)
    layout = CodeLayout(bits, 0, 1, 1, (rows, columns))
    # One run of bytes for each power of two in the number of bits.
    width = sum(-(-columns * 2**power // 8) for power in range(5) if bits >> power & 1)
    assert packed.shape == (rows, width)
    assert torch.equal(unpack(packed, bits, columns).int(), codes)
    assert CodeLayout.of(layout.as_tensor()) == layout


def test_bytes_have_the_lowest_code_first():
    assert pack(torch.tensor([[1, 2, 15]], dtype=torch.int32), 4).tolist() == [[0x21, 0x0F]]
    assert pack(torch.tensor([[1, 0, 1, 1]], dtype=torch.int32), 1).tolist() == [[0b1101]]
    # Three bits are the lower two of all codes, then the upper one of each.
    assert pack(torch.tensor([[5, 2]], dtype=torch.int32), 3).tolist() == [[0b1001, 0b01]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bits", range(1, 9))
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("groups", [1, 6, 24])
def test_decoded_values_are_the_quantized_ones(dtype, bits, symmetric, groups):
    if bits < 3 and not symmetric:
        return
    torch.manual_seed(bits)
    weight = torch.randn(12, 10).to(dtype)
    weight[0] = 0.0
    weight[3:5] = 0.75
    values = quantize(weight, bits, groups, symmetric=symmetric, stochastic=bits > 2)
    found = encode(values, grid_of(weight, bits, groups, symmetric=symmetric))
    assert found is not None
    assert found.layout.bits in ((1, 2) if bits == 1 else (bits,))
    back = decode(found.packed, found.layout, found.scale, found.zero)
    assert back.dtype == dtype
    assert torch.equal(back, values)


@pytest.mark.parametrize("bits", [9, 12, 16])
def test_many_bits_are_packed_where_they_are_fewer_than_the_dtype_has(bits):
    weight = torch.randn(5, 7)
    values = quantize(weight, bits)
    found = encode(values, grid_of(weight, bits, 1, symmetric=True))
    assert found is not None
    assert torch.equal(decode(found.packed, found.layout, found.scale, None), values)
    half = weight.bfloat16()
    assert encode(quantize(half, bits), grid_of(half, bits, 1, symmetric=True)) is None


@pytest.mark.parametrize(("bits", "symmetric"), [(1, True), (2, True), (4, True), (4, False)])
def test_weights_that_pruning_removed_are_zeros_of_the_grid(bits, symmetric):
    torch.manual_seed(0)
    weight = torch.randn(8, 8)
    values = quantize(weight, bits, 2, symmetric=symmetric) * (torch.rand(8, 8) > 0.5)
    found = encode(values, grid_of(weight, bits, 2, symmetric=symmetric))
    assert found is not None
    assert found.layout.bits == max(bits, 2)
    assert torch.equal(decode(found.packed, found.layout, found.scale, found.zero), values)


def test_a_zero_outside_the_range_is_not_on_the_grid():
    weight = torch.rand(4, 4) + 5
    values = quantize(weight, 4, symmetric=False)
    grid = grid_of(weight, 4, 1, symmetric=False)
    assert encode(values, grid) is not None
    values[0, 0] = 0.0
    assert encode(values, grid) is None


@pytest.mark.parametrize("groups", [1, 4, 8])
def test_rows_and_columns_that_are_left_keep_their_scales(groups):
    torch.manual_seed(0)
    weight = torch.randn(8, 6)
    values, grid = quantize(weight, 4, groups), grid_of(weight, 4, groups, symmetric=True)
    rows, columns = torch.tensor([0, 3, 4, 7]), torch.tensor([1, 2, 5])
    left = values[rows][:, columns]
    found = encode(
        left,
        grid.cut(0, torch.tensor([0, 2, 3, 4, 7]))
        .cut(1, columns)
        .cut(0, torch.tensor([0, 2, 3, 4])),
    )
    assert found is not None
    assert torch.equal(decode(found.packed, found.layout, found.scale, None), left)
    assert found.layout.groups == (1 if groups == 1 else 4)


def test_groups_that_are_cut_across_are_not_packed():
    weight = torch.randn(8, 6)
    grid = grid_of(weight, 4, 16, symmetric=True)
    kept = torch.tensor([0, 1, 2, 3])
    assert encode(quantize(weight, 4, 16)[:, kept], grid.cut(1, kept)) is None
