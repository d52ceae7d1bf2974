"""Attention over split sequences: one process's outputs and gradients, for any heads."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings, strategies as st
from ranks import RankPools, on_ranks
from torch import Tensor
from torch.nn import functional as F

from hadal import comm
from hadal.errors import SequenceError
from hadal.plugins.sequence import DistributedAttention, groups
from hadal.plugins.sequence.attention import (
    SeqAllToAll,
    apply_rotary_pos_emb,
    share_heads,
    single_all_to_all,
)

LENGTH, BATCH, WIDTH = 8, 2, 4
HEADS = [(8, 8), (8, 4), (8, 2), (8, 1), (3, 3), (6, 3), (5, 1), (6, 2), (4, 4)]


# ---- arithmetic ----------------------------------------------------------------------------------


@given(st.integers(1, 9), st.integers(1, 6), st.integers(1, 8))
@settings(deadline=None)
def test_heads_are_shared_evenly(group: int, key_heads: int, ranks: int) -> None:
    heads = group * key_heads
    if heads < ranks:
        with pytest.raises(SequenceError, match="each rank needs one; set sequence_parallel_size"):
            share_heads(heads, key_heads, ranks)
        return
    found = share_heads(heads, key_heads, ranks)
    assert [head for mine in found.queries for head in mine] == list(range(heads))
    for rank in range(ranks):
        mine, keys = found.queries[rank], found.keys[rank]
        assert len(mine) and len(keys)
        assert {head // group for head in mine} == set(keys)
        expected = [head // group for head in mine]
        assert [keys[place] for place in found.local_keys(rank)] == expected
        local = found.local_group(rank)
        if local is not None:
            assert [keys[n // local] for n in range(len(mine))] == expected
    if heads % ranks == 0 and (key_heads % ranks == 0 or ranks % key_heads == 0):
        assert {len(mine) for mine in found.queries} == {heads // ranks}
        assert all(found.local_group(rank) for rank in range(ranks))


# ---- outputs and gradients -----------------------------------------------------------------------


def attention(query: Tensor, key: Tensor, value: Tensor, joins: bool = False) -> Tensor:
    q, k, v = (one.transpose(1, 2) for one in (query, key, value))
    found = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)
    return found.flatten(2) if joins else found


def sequence_first(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return attention(*(one.transpose(0, 1) for one in (query, key, value))).transpose(0, 1)


def inputs(heads: int, key_heads: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(7)
    counts = (heads, key_heads, key_heads)
    return [torch.randn(BATCH, LENGTH, n, WIDTH, generator=generator) for n in counts]


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize(("batch_dim_idx", "joins"), [(0, False), (0, True), (1, False)])
@on_ranks("world")
def test_attention_is_that_of_one_process(batch_dim_idx: int, joins: bool) -> None:
    rank, size = comm.get_rank(), comm.get_world_size()
    here = slice(rank * LENGTH // size, (rank + 1) * LENGTH // size)
    weights = torch.randn(BATCH, LENGTH, 1, WIDTH, generator=torch.Generator().manual_seed(8))
    for heads, key_heads in HEADS:
        if heads < size:
            continue
        whole = [one.requires_grad_() for one in inputs(heads, key_heads)]
        expected = attention(*whole)
        (expected * weights).sum().backward()
        mine = [one.detach()[:, here].clone().requires_grad_() for one in whole]
        given = [one.transpose(0, batch_dim_idx) for one in mine]
        local: Any = sequence_first if batch_dim_idx else attention
        layer = DistributedAttention(local, dist.group.WORLD, 2, 1 - batch_dim_idx)
        found = layer(*given, batch_dim_idx, None, *([True] if joins else []))
        found = found.transpose(0, batch_dim_idx)
        if joins:
            assert found.shape == (BATCH, LENGTH // size, heads * WIDTH)
            found = found.unflatten(-1, (heads, WIDTH))
        torch.testing.assert_close(found, expected[:, here], rtol=1e-6, atol=1e-6)
        (found * weights[:, here]).sum().backward()
        for one, other in zip(mine, whole, strict=True):
            torch.testing.assert_close(one.grad, other.grad[:, here], rtol=1e-5, atol=1e-6)


@on_ranks(2)
def test_rotary_embeddings_are_those_of_whole_sequences() -> None:
    rank, size = comm.get_rank(), comm.get_world_size()
    here = slice(rank * LENGTH // size, (rank + 1) * LENGTH // size)
    angles = torch.arange(LENGTH)[:, None, None, None] * torch.tensor([1.0, 0.1]).repeat(2)
    turns = (angles.cos(), angles.sin())
    query, key, value = inputs(4, 2)
    across = [one.transpose(0, 1) for one in turns]
    turned = [apply_rotary_pos_emb(one, *across) for one in (query, key)]
    expected = attention(*turned, value)[:, here]
    mine = [one[:, here] for one in (query, key, value)]
    layer = DistributedAttention(attention, dist.group.WORLD)
    torch.testing.assert_close(layer(*mine, 0, turns), expected)
    layer = DistributedAttention(sequence_first, dist.group.WORLD)
    found = layer(*(one.transpose(0, 1) for one in mine), 1, turns)
    torch.testing.assert_close(found.transpose(0, 1), expected)


def _there_and_back() -> None:
    group = dist.group.WORLD
    values = torch.randn(BATCH, 3, 8, WIDTH) + 10 * comm.get_rank()
    for batch_dim_idx in (0, 1):
        given = values.transpose(0, batch_dim_idx)
        out = single_all_to_all(given, 2, 1 - batch_dim_idx, batch_dim_idx, group)
        size = comm.get_world_size()
        assert out.transpose(0, batch_dim_idx).shape == (BATCH, 3 * size, 8 // size, WIDTH)
        back = SeqAllToAll.apply(group, out, 1 - batch_dim_idx, 2, batch_dim_idx)
        assert torch.equal(back, given)


def test_an_exchange_and_its_inverse_restore_the_input(ranks: RankPools) -> None:
    ranks(2).run(_there_and_back)
    ranks(4).run(_there_and_back)


# ---- groups, and what does not fit ---------------------------------------------------------------


def _groups() -> tuple[int, ...]:
    made = groups.initialize_sequence_parallel(2)
    assert groups.get_sequence_parallel_group() is made.get_sequence_parallel_group()
    return (
        groups.get_sequence_parallel_rank(),
        groups.get_sequence_parallel_world_size(),
        groups.get_sequence_data_parallel_rank(),
        groups.get_sequence_data_parallel_world_size(),
        made.get_sequence_data_parallel_group().size(),
    )


def test_consecutive_ranks_share_a_sequence(ranks: RankPools) -> None:
    found = ranks(4).run(_groups)
    assert found == [(rank % 2, 2, rank, 4, 4) for rank in range(4)]


def _misfit(kind: str) -> None:
    group, query = dist.group.WORLD, torch.zeros(1, 2, 4, 4)
    if kind == "size":
        groups.initialize_sequence_parallel(3)
    elif kind == "heads":
        DistributedAttention(attention, group)(query[:, :, :1], query[:, :, :1], query[:, :, :1], 0)
    elif kind == "shapes":
        DistributedAttention(attention, group)(query, query[:, :1], query, 0)
    elif kind == "mask":
        DistributedAttention(attention, group)(query, query, query, torch.ones(2, 2))
    elif kind == "groups":
        DistributedAttention(attention, group)(query, query[:, :, :3], query[:, :, :3], 0)
    elif kind == "index":
        DistributedAttention(attention, group, scatter_idx=1)
    else:
        single_all_to_all(query[:, :, :3], 2, 1, 0, group)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("size", r"size is 3, but there are 2 ranks; expected a divisor .*: \[2\]"),
        ("heads", "1 attention heads cannot be distributed over the 2 ranks"),
        ("shapes", r"shapes \(1, 2, 4, 4\), \(1, 1, 4, 4\)"),
        (
            "mask",
            r"with batch_dim_idx tensor\(\[\[1.*batch_dim_idx 0.*mask comes after rotary_pos_emb",
        ),
        ("groups", "4 heads of queries cannot share 3 heads of keys"),
        ("index", "got scatter_idx 1"),
        ("one", "cannot be split over 2 ranks along dimension 2"),
    ],
)
def test_mismatched_shapes_are_an_error(kind: str, message: str, ranks: RankPools) -> None:
    for error in ranks(2).raises(_misfit, kind):
        assert isinstance(error, SequenceError)
        with pytest.raises(SequenceError, match=message):
            raise error
