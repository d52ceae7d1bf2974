"""Products and softmax of block-sparse matrices, against dense ones."""

from __future__ import annotations

import pytest
import torch

from hadal.errors import ModelError
from hadal.plugins.sparse_attention import FixedSparsityConfig, MatMul, Softmax

BLOCK = 4
LAYOUT = FixedSparsityConfig(
    2, BLOCK, different_layout_per_head=True, num_different_global_patterns=2
).make_layout(40)


def drawn(*shape):
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


def dense(sparse):
    """[batch, blocks, block, block] as [batch, heads, L, L], zero elsewhere."""
    count = LAYOUT.shape[1]
    found = sparse.new_zeros(len(sparse), 2, count, count, BLOCK, BLOCK)
    head, row, column = LAYOUT.nonzero().unbind(1)
    found[:, head, row, column] = sparse
    return found.transpose(3, 4).reshape(len(sparse), 2, count * BLOCK, count * BLOCK)


def agree(found, expected, operands):
    torch.testing.assert_close(found, expected)
    gradient = torch.randn_like(found)
    torch.testing.assert_close(
        torch.autograd.grad(found, operands, gradient),
        torch.autograd.grad(expected, operands, gradient),
    )


@pytest.mark.parametrize("trans_a", [False, True])
@pytest.mark.parametrize("trans_b", [False, True])
@pytest.mark.parametrize("mode", ["sdd", "dsd", "dds"])
def test_a_product(mode, trans_a, trans_b):
    length, nnz = 40, int(LAYOUT.sum())
    a = drawn(2, nnz, BLOCK, BLOCK) if mode == "dsd" else drawn(2, 2, length, length)
    b = drawn(2, nnz, BLOCK, BLOCK) if mode == "dds" else drawn(2, 2, length, length)
    first = dense(a) if mode == "dsd" else a
    second = dense(b) if mode == "dds" else b
    first = first.transpose(-1, -2) if trans_a else first
    second = second.transpose(-1, -2) if trans_b else second
    found = MatMul(LAYOUT, BLOCK, mode, trans_a=trans_a, trans_b=trans_b)(a, b)
    if mode == "sdd":
        mask = dense(torch.ones(2, nnz, BLOCK, BLOCK, dtype=torch.float64))
        agree(dense(found), first @ second * mask, (a, b))
    else:
        agree(found, first @ second, (a, b))


@pytest.mark.parametrize("mode", ["add", "mul"])
def test_a_softmax(mode):
    nnz = int(LAYOUT.sum())
    x, rpe = drawn(2, nnz, BLOCK, BLOCK), drawn(1, 2, 40, 40)
    keys = (torch.rand(2, 40) > 0.3).double()
    pairs = torch.ones(40, 40, dtype=torch.float64).tril()
    found = Softmax(LAYOUT, BLOCK)(
        x, 0.5, rpe, keys, pairs, key_padding_mask_mode=mode, attn_mask_mode=mode
    )
    there = dense(torch.ones_like(x)).bool()
    scores = dense(x) * 0.5 + rpe
    if mode == "add":
        scores = scores + keys[:, None, None] + pairs
    else:
        scores = scores.masked_fill((keys == 0)[:, None, None] | (pairs == 0), -torch.inf)
    scores = scores.masked_fill(~there, -torch.inf)
    empty = (scores == -torch.inf).all(-1, keepdim=True)
    expected = scores.masked_fill(empty, 0).softmax(-1).masked_fill(empty | ~there, 0)
    agree(dense(found), expected, (x, rpe))


def test_mismatches_are_refused():
    with pytest.raises(NotImplementedError, match="mode is 'ddd'; expected one of 'sdd'"):
        MatMul(LAYOUT, BLOCK, "ddd")
    x = drawn(1, int(LAYOUT.sum()), BLOCK, BLOCK)
    with pytest.raises(ModelError, match=r"attn_mask is torch\.float32 and x torch\.float64; cast"):
        Softmax(LAYOUT, BLOCK)(x, attn_mask=torch.zeros(40, 40))
