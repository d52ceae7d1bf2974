"""Buffers for direct disk I/O, and pools of a limited number of them."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, strategies as some

from hadal.errors import OffloadError, UsageError
from hadal.offload import ALIGNMENT, BufferPool, aligned
from hadal.offload.buffers import memory_of


@given(some.integers(0, 20_000), some.booleans())
def test_buffers_begin_on_a_page(nbytes: int, pinned: bool) -> None:
    buffer = aligned(nbytes, pinned=pinned)
    assert buffer.shape == (nbytes,)
    assert buffer.dtype == torch.uint8
    assert buffer.data_ptr() % ALIGNMENT == 0 or not nbytes
    assert buffer.is_pinned() == (pinned and nbytes > 0 and torch.accelerator.is_available())


@pytest.mark.parametrize("nbytes", [1 << 21, (1 << 22) + 10])
def test_long_buffers_begin_on_a_huge_page(nbytes: int) -> None:
    buffer = aligned(nbytes)
    assert buffer.data_ptr() % (1 << 21) == 0
    assert buffer.fill_(3).numel() == nbytes
    again = buffer[5:].clone()
    del buffer
    assert again.sum() == 3 * (nbytes - 5)


def test_viewed_buffers_can_still_be_resized() -> None:
    buffer = torch.empty(10, dtype=torch.uint8)
    memory_of(buffer)[:] = bytes(range(10))
    assert buffer.tolist() == list(range(10))
    buffer.untyped_storage().resize_(1 << 16)  # what numpy has seen refuses


def test_a_pool_lends_a_limited_number_of_buffers() -> None:
    pool = BufferPool(2, 100)
    first, second = pool.take(), pool.take()
    assert first.numel() == second.numel() == 100
    with pytest.raises(OffloadError, match=r"all 2 buffers of 100 bytes are in use.*buffer_count"):
        pool.take()
    with pytest.raises(OffloadError):
        pool.take(100)
    pool.give_back(first)
    with pytest.raises(UsageError, match="already has it back"):
        pool.give_back(first)
    assert pool.take().data_ptr() == first.data_ptr()


def test_a_closed_pool_accepts_returned_buffers() -> None:
    pool = BufferPool(2, 100)
    buffer = pool.take()
    pool.take()
    pool.close()
    with pytest.raises(UsageError, match="closed"):
        pool.take()
    pool.give_back(buffer)
