"""Chunks of very long sequences that wait in host memory, on a device whose work is late."""

from __future__ import annotations

import gc

import pytest
import torch
from compat.test_fpdt import BATCH, CHUNK, HIDDEN, check_attention, chunked_attention, weights_of
from ranks import RankPools, on_ranks

import npu
from hadal.device import current_device


@on_ranks(2, "npus")
def test_attention_of_offloaded_chunks_is_that_of_the_whole() -> None:
    with npu.asynchronous():
        check_attention(4, 2, True, 4)


def _memory(chunks: int, offloads: bool) -> tuple[int, int]:
    """Return the bytes beside the input that are held after forward, and at most until backward."""
    attention = chunked_attention([4, 4, 4], weights_of(4, 4, True), enable_offloading=offloads)
    x = torch.randn(chunks * CHUNK, BATCH, HIDDEN, device=current_device(), requires_grad=True)
    gc.collect()
    torch.accelerator.reset_peak_memory_stats()
    before = torch.accelerator.memory_allocated()
    output, _ = attention(x, None, None, None)
    held = torch.accelerator.memory_allocated() - before
    output.sum().backward()
    return held, torch.accelerator.max_memory_allocated() - before


def test_the_device_holds_a_few_chunks_of_keys_and_values(npus: RankPools) -> None:
    unit = CHUNK * BATCH * HIDDEN * 4
    # The output before and after its projection, and a log-sum-exp; in backward, two gradients.
    # Without offloading also each chunk's keys and values, and their gradients.
    for offloads, expected in ((True, (2.25, 4.25)), (False, (4.25, 8.25))):
        (short,), (long,) = (npus(1).run(_memory, count, offloads) for count in (8, 32))
        grown = [(more - less) / 24 / unit for less, more in zip(short, long, strict=True)]
        assert grown == pytest.approx(expected, abs=0.1)
