"""Sizes and slices of weights that are cut over ranks."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, strategies as st

from hadal.errors import ModelError
from hadal.plugins.tensor_parallel.layers import WeightCut, shard_sizes, subparameter_sizes


@pytest.mark.parametrize(
    ("total", "ranks", "heads", "grain", "name", "sizes"),
    [
        (16, 2, None, 1, "q", [8, 8]),
        (10, 4, None, 1, "q", [3, 3, 2, 2]),
        (4096, 4, 8, 1, "self_attn.q_proj", [1024] * 4),
        (1024, 4, 8, 1, "self_attn.k_proj", [256] * 4),
        (896, 2, 2, 1, "self_attn.q_proj", [448, 448]),
        (12, 4, 3, 1, "self_attn.q_proj", [4, 4, 4, 0]),
        (12, 4, 3, 1, "mlp.up_proj", [3, 3, 3, 3]),
        (11008, 3, None, 64, "mlp.gate_proj", [3712, 3648, 3648]),
        (130, 4, None, 64, "lm_head", [64, 64, 0, 2]),
        (32000, 3, 8, 1, "lm_head", [10667, 10667, 10666]),
        (7, 4, 7, 1, "attn.out_proj", [2, 2, 2, 1]),
        (30, 4, None, 64, "x", [8, 8, 7, 7]),
    ],
)
def test_sizes_are_those_of_deepspeed(
    total: int, ranks: int, heads: int | None, grain: int, name: str, sizes: list[int]
) -> None:
    assert shard_sizes(total, ranks, heads=heads, grain=grain, name=name) == sizes


def test_a_dimension_may_be_several_fused_parts() -> None:
    assert subparameter_sizes(24, None, 0) == (24,)
    assert subparameter_sizes(24, (3, -1), 0) == (8, 8, 8)
    assert subparameter_sizes(24, ((16, 4, 4), -1), 0) == (16, 4, 4)
    assert subparameter_sizes(24, (-1, 8), 0) == (24,)
    assert subparameter_sizes(24, (-1, (16, 8)), 1) == (16, 8)


@pytest.mark.parametrize(
    ("length", "shape", "dim", "told"),
    [
        (25, (3, -1), 0, "25 rows do not split into 3 equal parts"),
        (24, ((16, 4), -1), 0, "have 20 rows, but the weight 24"),
        (24, (0, -1), 0, "has an entry 0"),
        (24, ((16, 0, 8), -1), 0, "has an entry"),
        (24, (3, (4, 4)), 0, "lists parts in dimension 1, and dimension 0 is cut"),
        (24, ((4, 4), (4, 4)), 0, "lists parts in dimension 1"),
        (24, (3, -1), 2, r"partition_dim 2 .* expected 0\.\.1"),
        (24, (3, 2, -1), 0, "has 3 dimensions"),
    ],
)
def test_parts_that_do_not_fit_are_an_error(
    length: int, shape: object, dim: int, told: str
) -> None:
    with pytest.raises(ModelError, match=told):
        subparameter_sizes(length, shape, dim)  # type: ignore[arg-type]


CUTS = st.integers(1, 4).flatmap(
    lambda ranks: st.lists(
        st.lists(st.integers(0, 3), min_size=ranks, max_size=ranks), min_size=1, max_size=3
    )
)


@given(CUTS, st.integers(0, 1))
def test_slices_of_all_ranks_are_the_whole(parts: list[list[int]], dim: int) -> None:
    cut = WeightCut.of(dim, parts)
    shape = [2, 2]
    shape[dim] = cut.length
    whole = torch.arange(2 * cut.length).view(shape)
    slices = [cut.take(whole, rank) for rank in range(len(parts[0]))]
    assert [one.shape[dim] for one in slices] == cut.sizes
    assert torch.equal(cut.join(slices), whole)
    rows = [row for rank in range(len(parts[0])) for row in cut.spans(rank)]
    taken = sorted(at for start, size in rows for at in range(start, start + size))
    assert taken == list(range(cut.length))
