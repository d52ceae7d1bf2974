"""torch's fused attention behind Hadal's functions."""

from __future__ import annotations

import pytest
import torch

from hadal.device import fused_attention, fused_attention_backward, has_fused_attention

CPU = torch.device("cpu")


def test_it_is_there_on_cpus_only():
    assert has_fused_attention(CPU)
    assert not has_fused_attention(torch.device("meta"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("rows", ["one mask for all rows", "a mask for each"])
def test_it_is_attention_with_its_log_sum_exp(dtype, rows):
    generator = torch.Generator().manual_seed(0)
    query, key, value = (
        torch.randn(3, 1, n, 8, generator=generator, dtype=dtype).requires_grad_()
        for n in (5, 20, 20)
    )
    bias = torch.randn(3, 1, 1 if "one" in rows else 5, 20, generator=generator, dtype=dtype)
    scores = query @ key.transpose(-1, -2) * 0.3 + bias
    expected = scores.softmax(-1) @ value
    with torch.no_grad():
        out, lse = fused_attention(query, key, value, bias, 0.3)
        torch.testing.assert_close(out, expected)
        torch.testing.assert_close(lse, scores.logsumexp(-1))
        found = fused_attention_backward(out, (query, key, value), (out, lse), bias, 0.3)
    wanted = torch.autograd.grad(expected, (query, key, value), expected.detach())
    torch.testing.assert_close(found, wanted)


def test_gradients_of_some_columns_add_up_to_those_of_all():
    generator = torch.Generator().manual_seed(0)
    query, key, value = (
        torch.randn(2, 1, n, 4, generator=generator, dtype=torch.float64) for n in (5, 12, 12)
    )
    result = fused_attention(query, key, value, None, 0.5)
    gradient = torch.randn_like(query)
    whole = fused_attention_backward(gradient, (query, key, value), result, None, 0.5)
    parts = [
        fused_attention_backward(
            gradient, (query, key[:, :, cut], value[:, :, cut]), result, None, 0.5
        )
        for cut in (slice(0, 3), slice(3, 12))
    ]
    torch.testing.assert_close(sum(part[0] for part in parts), whole[0])
    for number in (1, 2):
        torch.testing.assert_close(torch.cat([part[number] for part in parts], 2), whole[number])


def test_a_fully_masked_row_returns_zero_and_has_no_gradient():
    query, key = torch.randn(1, 1, 2, 4), torch.randn(1, 1, 6, 4)
    bias = torch.zeros(1, 1, 2, 6)
    bias[:, :, 0] = -torch.inf
    out, lse = fused_attention(query, key, key, bias, 1.0)
    assert (out[:, :, 0] == 0).all()
    assert lse[0, 0, 0] == 0
    lse[0, 0, 0] = -1e30  # as the merge of parts writes it
    found = fused_attention_backward(torch.ones_like(out), (query, key, key), (out, lse), bias, 1.0)
    assert all(each.isfinite().all() for each in found)
    assert (found[0][:, :, 0] == 0).all()
