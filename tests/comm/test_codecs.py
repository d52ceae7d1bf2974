"""Codecs: the error of decoded values, for any values in any number."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

from hadal.comm.codecs import WIRE_BYTES, Blockwise, Codec, ErrorFeedback, working_ranges

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
CODECS = [Blockwise(bits, block) for bits in (4, 8) for block in (2, 32, 128)]
blockwise = st.builds(
    Blockwise,
    bits=st.sampled_from((4, 8)),
    block_numel=st.sampled_from((2, 6, 32, 128)),
)


@st.composite
def values(draw: st.DrawFn) -> Tensor:
    """Up to a few blocks, some zero, of any magnitude that the dtype has."""
    numel = draw(st.integers(0, 300))
    dtype = draw(st.sampled_from(DTYPES))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    info = torch.finfo(dtype)
    largest, smallest = math.log2(info.max) - 4, math.log2(info.tiny) - 4
    exponent = draw(st.floats(smallest, largest))
    found = torch.randn(numel, generator=generator, dtype=torch.float64) * 2.0**exponent
    found[torch.rand(numel, generator=generator) < draw(st.sampled_from((0.0, 0.5)))] = 0
    return found.to(dtype)


def wire_of(codec: Codec, given: Tensor) -> Tensor:
    wire = torch.full((codec.wire_bytes(given.numel()),), 0xA5, dtype=torch.uint8)
    codec.encode(given, wire)
    return wire


def there_and_back(codec: Codec, given: Tensor) -> Tensor:
    out = torch.full_like(given, torch.nan)
    codec.decode(wire_of(codec, given), out)
    return out


def steps_of(codec: Blockwise, given: Tensor) -> Tensor:
    """The distance of neighbouring values in each element's block."""
    missing = -given.numel() % codec.block_numel
    blocks = torch.nn.functional.pad(given.double(), (0, missing)).view(-1, codec.block_numel)
    steps = blocks.abs().amax(1) / codec.limit
    return steps.repeat_interleave(codec.block_numel)[: given.numel()]


@settings(deadline=None, max_examples=150)
@given(codec=blockwise, given=values())
def test_values_are_off_by_half_a_step(codec, given):
    out = there_and_back(codec, given)
    most = 0.5 * steps_of(codec, given)
    # Rounded to the dtype besides; what is next to nothing may become nothing.
    rounded = out.double().abs() * torch.finfo(given.dtype).eps / 2
    nothing = torch.finfo(torch.float32).tiny * codec.limit
    tiny = max(nothing, torch.finfo(given.dtype).smallest_normal * torch.finfo(given.dtype).eps)
    assert ((out.double() - given.double()).abs() <= most * 1.0001 + rounded + tiny).all()
    assert (out[given == 0] == 0).all()


@pytest.mark.parametrize("codec", CODECS, ids=repr)
@pytest.mark.parametrize("numel", [0, 1, 2, 3, 31, 32, 33, 255, 256, 257, 70_001])
def test_wires_are_whole_words_and_the_same_each_time(codec, numel):
    given = torch.randn(numel, generator=torch.Generator().manual_seed(numel))
    nbytes = codec.wire_bytes(numel)
    assert nbytes % WIRE_BYTES == 0
    torch.manual_seed(0)
    wire = wire_of(codec, given)
    torch.manual_seed(0)
    other = torch.zeros(nbytes, dtype=torch.uint8)
    codec.encode(given, other)
    assert torch.equal(wire, other), "some bytes were left as they were"
    out = torch.full_like(given, torch.nan)
    codec.decode(wire, out)
    assert out.isfinite().all()
    both = torch.ones(numel)
    codec.decode_add(wire, both, 0.5)
    assert torch.allclose(both, 1 + out / 2, rtol=1e-5, atol=1e-6)


@settings(deadline=None, max_examples=60)
@given(
    codec=blockwise,
    given=values(),
    place=st.integers(0, 299),
    fault=st.sampled_from((math.inf, -math.inf, math.nan)),
)
def test_of_a_block_with_a_fault_nothing_is_finite(codec, given, place, fault):
    if not given.numel():
        return
    place %= given.numel()
    given[place] = fault
    out = there_and_back(codec, given)
    first = place // codec.block_numel * codec.block_numel
    hit = torch.zeros(given.numel(), dtype=torch.bool)
    hit[first : first + codec.block_numel] = True
    assert not out[hit].isfinite().any()
    assert out[~hit].isfinite().all()


def test_values_beyond_float32_are_a_fault():
    out = there_and_back(Blockwise(8, 4), torch.tensor([1e300, 1, 1, 1], dtype=torch.float64))
    assert not out.isfinite().any()


def test_the_largest_values_stay_finite():
    for dtype in DTYPES:
        given = torch.full((64,), torch.finfo(dtype).max, dtype=dtype)
        for bits in (4, 8):
            out = there_and_back(Blockwise(bits, 32), given)
            assert out.isfinite().all()
            assert torch.allclose(out, given, rtol=1e-6)


@pytest.mark.parametrize("bits", [4, 8])
def test_tiny_values_become_zero(bits):
    codec = Blockwise(bits, 4)
    assert (wire_of(codec, torch.zeros(6)) == 0).all()
    assert (there_and_back(codec, torch.tensor([1e-40, -3e-40, 0.0, 1e-41])) == 0).all()


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("dtype", DTYPES)
def test_decoded_values_are_forwarded_unchanged(bits, dtype):
    codec = Blockwise(bits, 32)
    once = there_and_back(codec, torch.randn(1000).to(dtype))
    assert torch.allclose(there_and_back(codec, once), once, rtol=1e-6)


def test_a_wire_has_the_declared_length():
    numel = 1 << 16
    assert Blockwise(8, 256).wire_bytes(numel) / (2 * numel) == pytest.approx(0.5078125)
    assert Blockwise(4, 128).wire_bytes(numel) / (2 * numel) == pytest.approx(0.265625)


def test_working_ranges_are_whole_blocks_that_stay_in_the_cache():
    cuts = list(working_ranges(1_000_000, 96, torch.device("cpu")))
    assert cuts[0][0] == 0
    assert cuts[-1][1] == 1_000_000
    assert all(one[1] == other[0] for one, other in itertools.pairwise(cuts))
    assert all(start % 96 == 0 and stop - start <= 1 << 16 for start, stop in cuts)
    assert list(working_ranges(1_000_000, 96, torch.device("meta"))) == [(0, 1_000_000)]


# ---- error feedback ---------------------------------------------------------------------------


def sent(feedback: ErrorFeedback, given: Tensor) -> Tensor:
    wire = torch.empty(feedback.codec.wire_bytes(given.numel()), dtype=torch.uint8)
    feedback.encode(given, wire)
    out = torch.empty_like(given)
    feedback.codec.decode(wire, out)
    return out


@pytest.mark.parametrize("bits", [4, 8])
def test_with_feedback_nothing_is_lost_for_good(bits):
    codec = Blockwise(bits, 32)
    given = torch.randn(101, generator=torch.Generator().manual_seed(2))
    feedback = ErrorFeedback(codec, torch.float32)
    total = sum(sent(feedback, given) for _ in range(50))
    assert feedback.residual is not None
    assert torch.allclose(total + feedback.residual, 50 * given, atol=1e-3)
    assert feedback.residual.abs().max() <= steps_of(codec, given).max()
    plain = (there_and_back(codec, given) - given).abs().max()
    assert (total / 50 - given).abs().max() < plain / 10


@settings(deadline=None, max_examples=30)
@given(decay=st.floats(0, 1), seed=st.integers(0, 1000))
def test_a_residual_is_a_moving_average_of_the_error(decay, seed):
    generator = torch.Generator().manual_seed(seed)
    codec = Blockwise(4, 32)
    feedback = ErrorFeedback(codec, torch.float32, decay)
    residual = torch.zeros(70)
    for _ in range(4):
        given = torch.randn(70, generator=generator)
        out = sent(feedback, given)
        residual = decay * residual + (1 - decay) * (given + residual - out)
        assert torch.allclose(feedback.residual, residual, atol=1e-5)


def test_a_fault_is_reported_and_not_cached():
    feedback = ErrorFeedback(Blockwise(4, 4), torch.float32, 0.5)
    given = torch.tensor([1.0, 2.0, 3.0, 4.5, 1.0, 2.0, 3.0, 4.5])
    sent(feedback, given)
    faulty = given.clone()
    faulty[0] = math.inf
    out = sent(feedback, faulty)
    assert not out[:4].isfinite().any()
    assert out[4:].isfinite().all()
    assert feedback.residual is not None
    assert feedback.residual.isfinite().all()
    assert (feedback.residual[:4] == 0).all()
    assert (feedback.residual[4:] != 0).any()
    assert sent(feedback, given).isfinite().all()
