"""Signs with a scale: the decoded values, their error, and their bytes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor

from comm.in_one_place import signs
from hadal.comm.codecs import WIRE_BYTES, Sign

FLOATS = st.floats(-1e4, 1e4, width=32)
LEAST = 2.0**-149  # above zero in float32
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def there_and_back(codec: Sign, values: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    wire = torch.full((codec.wire_bytes(values.numel()),), 0xA5, dtype=torch.uint8)
    codec.encode(values, wire)
    out = torch.empty(values.numel(), dtype=dtype)
    codec.decode(wire, out)
    return out


@given(st.lists(FLOATS, min_size=1, max_size=70), st.sampled_from((8, 16, 64)))
def test_it_is_the_mean_magnitude_with_each_sign(given_values: list[float], block: int):
    values = torch.tensor(given_values)
    out = there_and_back(Sign(block), values)
    # Each magnitude is divided before the sum: that rounds below the normal numbers, by at most
    # half of the least number each.
    assert torch.allclose(out, signs(values, block), rtol=1e-5, atol=block * LEAST)


@given(st.lists(FLOATS, min_size=1, max_size=70))
def test_the_error_of_a_block_is_never_longer_than_the_block(given_values: list[float]):
    values = torch.tensor(given_values)
    error = values - there_and_back(Sign(8), values)
    for lost, block in zip(error.split(8), values.split(8), strict=True):
        assert float(lost.double().norm()) <= float(block.double().norm()) * (1 + 1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("numel", [0, 1, 7, 9, 1023, 1024, 1025, 65536 + 1025])
def test_any_length_and_dtype(numel: int, dtype: torch.dtype):
    values = torch.randn(numel).to(dtype)
    out = there_and_back(Sign(), values, dtype)
    assert out.dtype == dtype and out.numel() == numel
    if numel:
        tolerance = 2.0**-7 if dtype in (torch.bfloat16, torch.float16) else 1e-5
        assert torch.allclose(out.float(), signs(values.float(), 1024), rtol=tolerance)


@given(st.integers(0, 40), st.sampled_from((1.0, -1.0, 0.5)))
def test_adding_is_decoding_and_adding(numel: int, factor: float):
    values, before = torch.randn(numel), torch.randn(numel)
    wire = torch.empty(Sign(8).wire_bytes(numel), dtype=torch.uint8)
    Sign(8).encode(values, wire)
    after = before.clone()
    Sign(8).decode_add(wire, after, factor)
    assert torch.equal(after, before.add(there_and_back(Sign(8), values), alpha=factor))


def test_a_block_of_zeros_stays_zero():
    values = torch.cat([torch.zeros(1024), torch.ones(3)])
    assert torch.equal(there_and_back(Sign(), values), values)


@pytest.mark.parametrize("odd", [float("inf"), float("-inf"), float("nan")])
def test_non_finite_values_are_decoded_to_non_finite_values(odd: float):
    values = torch.randn(3000)
    values[1500] = odd
    out = there_and_back(Sign(), values)
    assert not bool(out[1024:2048].isfinite().any())
    assert bool(out[:1024].isfinite().all()) and bool(out[2048:].isfinite().all())


def test_large_values_are_not_an_overflow():
    values = torch.full((1024,), 3e38)
    assert torch.allclose(there_and_back(Sign(), values), values)


@given(st.integers(0, 10**9))
def test_the_wire_is_a_fifteenth_of_16_bits(numel: int):
    nbytes = Sign().wire_bytes(numel)
    assert nbytes % WIRE_BYTES == 0
    assert nbytes <= 2 * numel / 15 + 4 + WIRE_BYTES


def test_padding_behind_the_signs_is_always_the_same():
    wires = [torch.full((Sign().wire_bytes(5),), fill, dtype=torch.uint8) for fill in (0, 255)]
    for wire in wires:
        Sign().encode(torch.arange(5) - 2.0, wire)
    assert torch.equal(*wires)
