"""Ring attention: one process's outputs and gradients, with fewer heads than ranks."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings, strategies as st
from ranks import on_ranks
from torch import Tensor
from torch.nn import functional as F

from hadal import comm
from hadal.errors import SequenceError
from hadal.plugins.sequence import ring, ring_attention
from hadal.plugins.sequence.ring import (
    Operands,
    Pattern,
    attend,
    chunks_of,
    empty_result,
    gradients,
    merge,
)

BATCH, WIDTH = 2, 4


# ---- arithmetic ----------------------------------------------------------------------------------


@given(st.integers(1, 9), st.integers(1, 11))
def test_all_ranks_compute_as_many_pairs(ranks: int, length: int) -> None:
    chunks = [chunks_of(rank, ranks, length, is_balanced=True) for rank in range(ranks)]
    everything = sorted(position for mine in chunks for chunk in mine for position in chunk)
    assert everything == list(range(ranks * length))
    pairs = [sum(position + 1 for chunk in mine for position in chunk) for mine in chunks]
    if length % 2 == 0:
        assert len(set(pairs)) == 1
    else:
        assert max(pairs) - min(pairs) <= ranks * length
    assert all(sum(map(len, mine)) == length for mine in chunks)


def expected_of(operands: list[Tensor], pattern: Pattern, scale: float | None = None) -> Tensor:
    query, key, value = operands
    length = query.shape[2]
    mask = pattern.mask(range(length), range(length), query.device)
    return F.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, scale=scale, enable_gqa=True
    )


def inputs(heads: int, key_heads: int, length: int, dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(7)
    counts = (heads, key_heads, key_heads)
    return [
        torch.randn(BATCH, n, length, WIDTH, generator=generator, dtype=dtype).requires_grad_()
        for n in counts
    ]


@settings(deadline=None, max_examples=30)
@given(
    cuts=st.sets(st.integers(1, 11), max_size=4),
    causal=st.booleans(),
    window=st.none() | st.integers(1, 12),
    documents=st.booleans(),
    fused=st.booleans(),
    scores=st.sampled_from([1, 20, 1 << 24]),
)
def test_pieces_are_the_whole(
    cuts: set[int], causal: bool, window: int | None, documents: bool, fused: bool, scores: int
) -> None:
    length = 12
    operands = inputs(2, 2, length, torch.float64)
    numbers = torch.tensor([[0] * 5 + [1] * 7, [0] * 2 + [1] * 4 + [2] * 6])
    pattern = Pattern(causal, numbers if documents and causal else None, window)
    expected = expected_of(operands, pattern)
    weights = torch.randn(expected.shape, dtype=torch.float64)
    wanted = torch.autograd.grad(expected, operands, weights)
    edges = [0, *sorted(cuts), length]
    ranges = [range(a, b) for a, b in itertools.pairwise(edges)]
    query, key, value = (one.detach() for one in operands)
    found = [torch.zeros_like(one) for one in (query, key, value)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ring, "_SCORES", scores)
        if not fused:
            patch.setattr(ring, "has_fused_attention", lambda device: False)
        for rows in ranges:
            here = slice(rows.start, rows.stop)
            total = empty_result(query[:, :, here])
            each = [
                (columns, Operands(query[:, :, here], key[:, :, there], value[:, :, there]))
                for columns in ranges
                for there in [slice(columns.start, columns.stop)]
            ]
            for columns, piece in each:
                part = attend(piece, rows, columns, pattern, WIDTH**-0.5)
                total = total if part is None else merge(total, part)
            torch.testing.assert_close(total.out, expected[:, :, here].detach())
            for columns, piece in each:
                there = slice(columns.start, columns.stop)
                parts = gradients(
                    weights[:, :, here], piece, total, rows, columns, pattern, WIDTH**-0.5
                )
                if parts is not None:
                    for one, place, part in zip(found, (here, there, there), parts, strict=True):
                        one[:, :, place] += part
    torch.testing.assert_close(found, list(wanted))


def test_plain_operations_ignore_autocast(monkeypatch: pytest.MonkeyPatch) -> None:
    # Backward computes in fp32, without autocast, and needs the log-sum-exp of the same scores.
    monkeypatch.setattr(ring, "has_fused_attention", lambda device: False)
    operands, whole = Operands(*inputs(2, 2, 12, torch.bfloat16)), range(12)
    expected = attend(operands, whole, whole, Pattern(), 1.0)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = attend(operands, whole, whole, Pattern(), 1.0)
    assert expected is not None and found is not None
    assert found.out.dtype == torch.float32
    assert all(map(torch.equal, found, expected))


# ---- ranks ---------------------------------------------------------------------------------------

CASES: list[dict[str, Any]] = [
    {},
    {"heads": 2, "key_heads": 1},
    {"is_causal": False},
    {"length": 7},  # halves of unequal length
    {"documents": True},
    {"window": 5, "length": 9},
    {"scale": 0.3, "dtype": torch.bfloat16},
]


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("case", CASES, ids=[str(case) for case in CASES])
@on_ranks("world")
def test_it_is_the_attention_of_one_process(case: dict[str, Any]) -> None:
    rank, size = comm.get_rank(), comm.get_world_size()
    length = case.get("length", 8)
    dtype = case.get("dtype", torch.float64)
    is_causal = case.get("is_causal", True)
    whole = inputs(case.get("heads", 1), case.get("key_heads", 1), length * size, dtype)
    numbers = None
    if case.get("documents"):
        places = torch.arange(length * size)
        numbers = torch.stack([places // 5, places // 11])
    choices = {"scale": case.get("scale"), "window": case.get("window")}
    expected = expected_of(whole, Pattern(is_causal, numbers, choices["window"]), choices["scale"])
    weights = torch.randn(
        expected.shape, generator=torch.Generator().manual_seed(8), dtype=torch.float64
    ).to(dtype)
    expected.backward(weights)
    here = slice(rank * length, (rank + 1) * length)
    mine = [one.detach()[:, :, here].clone().requires_grad_() for one in whole]
    found = ring_attention(
        *mine, dist.group.WORLD, is_causal=is_causal, documents=numbers, **choices
    )
    near = {} if dtype is torch.float64 else {"rtol": 2e-2, "atol": 3e-2}
    torch.testing.assert_close(found, expected[:, :, here], **near)
    found.backward(weights[:, :, here])
    for one, other in zip(mine, whole, strict=True):
        torch.testing.assert_close(one.grad, other.grad[:, :, here], **near)


@on_ranks(2)
def test_shapes_that_do_not_fit_are_errors() -> None:
    query = torch.randn(1, 3, 4, 2)
    for others, message in (
        ({"key": torch.randn(1, 2, 4, 2)}, r"heads that theirs divide"),
        ({"key": torch.randn(1, 3, 5, 2)}, r"shapes \(1, 3, 4, 2\), \(1, 3, 5, 2\)"),
        ({"documents": torch.zeros(1, 4)}, r"expected \[1, 8\], a number for each position"),
    ):
        key = others.pop("key", query)
        with pytest.raises(SequenceError, match=message):
            ring_attention(query, key, key, dist.group.WORLD, **others)
